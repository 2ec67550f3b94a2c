"""Formats csrc/ with clang-format, or with --check fails on the first difference; says so when there is nothing to format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(check: bool) -> int:
    files = [str(p) for p in sorted((ROOT / "csrc").rglob("*")) if p.suffix in {".cu", ".cuh", ".cpp", ".h"}]
    if not files:
        print("clang-format: csrc/ has no sources yet")
        return 0
    tool = Path(sys.executable).with_name("clang-format")
    return subprocess.run([tool, *(["--dry-run", "--Werror"] if check else ["-i"]), *files], check=False).returncode


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
