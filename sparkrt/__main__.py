"""`python -m sparkrt COMMAND ...`"""

from __future__ import annotations

import sys

from sparkrt.serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
