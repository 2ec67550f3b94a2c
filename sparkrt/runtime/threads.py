"""BLAS threads: as many as the process has cores to run them on.

A BLAS counts the machine's cores, not a container's quota: 64 threads on 2 cores' worth of time spin on each other and
run slower than one. BLAS reads its environment once, when NumPy loads it, so `sparkrt.runtime` calls `limit_blas_threads`
before it imports NumPy. Where somebody else imported NumPy first, the loaded library is told through `threadpoolctl`, if
that is installed; it is not required, because only a process that imports NumPy before sparkrt under a CPU quota needs it.

A number that the user chose in the environment always stands, and where the process may use the whole machine nothing
is touched at all.
"""

from __future__ import annotations

import importlib
import os
import sys

from sparkrt.runtime.machine import usable_cores

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def limit_blas_threads() -> int | None:
    """Hold BLAS to the usable cores. Returns the number set, None where nothing was changed.

    The variables also reach child processes, so an engine process that is spawned later starts with the same limit.
    """
    cores = usable_cores()
    if cores >= (os.cpu_count() or 1) or any(os.environ.get(name) for name in _VARIABLES):
        return None
    if "numpy" in sys.modules:
        return cores if _limit_loaded(cores) else None
    for name in _VARIABLES:
        os.environ[name] = str(cores)
    return cores


def _limit_loaded(cores: int) -> bool:
    try:
        threadpoolctl = importlib.import_module("threadpoolctl")
    except ImportError:
        return False
    threadpoolctl.threadpool_limits(limits=cores, user_api="blas")  # takes effect at once and stays
    return True
