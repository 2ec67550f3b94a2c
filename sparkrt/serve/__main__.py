"""`python -m sparkrt.serve [MODEL] ...`"""

from __future__ import annotations

import sys

from sparkrt.serve.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
