"""Prints the size of the house, room by room, and fails when it outgrows its budget."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE_LINES = 21_798  # sparkrt/ without assets: what it is now and no more (docs/adr/0015)
FILE_LINES = 500
KERNEL_LINES = 600
SOURCES = {".py", ".html", ".js", ".css"}
KERNELS = {".cu", ".cuh", ".cpp", ".h"}


def count(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def sources(folder: Path, suffixes: set[str]) -> dict[Path, int]:
    """Lines of every source file under `folder`, assets left out."""
    found = (p for p in sorted(folder.rglob("*")) if p.suffix in suffixes and "assets" not in p.relative_to(folder).parts)
    return {path: count(path) for path in found}


def main() -> int:
    package, kernels = sources(ROOT / "sparkrt", SOURCES), sources(ROOT / "csrc", KERNELS)
    tests = sources(ROOT / "tests", SOURCES)
    rooms: dict[str, int] = defaultdict(int)
    for path, lines in package.items():
        inside = path.relative_to(ROOT / "sparkrt").parts
        rooms[inside[0] + "/" if len(inside) > 1 else "."] += lines
    total, longest = sum(package.values()), max(package, key=lambda p: package[p])
    for room, lines in sorted(rooms.items(), key=lambda item: -item[1]):
        print(f"  sparkrt/{room:<10} {lines:6,}".replace("/.", "  "))
    print(f"sparkrt/ {total:,} of {PACKAGE_LINES:,} lines in {len(package)} files", end=", ")
    print(f"longest {longest.relative_to(ROOT)} ({package[longest]})", end="; ")
    print(f"csrc/ {sum(kernels.values()):,}, tests/ {sum(tests.values()):,}")

    faults = [f"sparkrt/ has {total:,} lines, the budget is {PACKAGE_LINES:,}"] if total > PACKAGE_LINES else []
    for files, limit in ((package, FILE_LINES), (kernels, KERNEL_LINES)):
        over = {path.relative_to(ROOT): lines for path, lines in files.items() if lines > limit}
        faults += [f"{path} has {lines} lines, the limit is {limit}" for path, lines in over.items()]
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
