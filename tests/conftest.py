"""One BLAS thread per test process, set before NumPy is loaded.

Workers share few cores; two threads each would spin against one another and make everything many times slower.
"""

from __future__ import annotations

import os

from hypothesis import settings

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(name, "1")

settings.register_profile("long", max_examples=500)  # --hypothesis-profile=long
