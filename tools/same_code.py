"""Which kernels of two builds of the library differ in their machine code: `python -m tools.same_code BEFORE.so AFTER.so`.

For changes that must change nothing, such as moving device functions between headers: what is the same to the instruction needs
no GPU to be believed. Needs `cuobjdump` of the CUDA toolkit in PATH. The exit status is 1 where kernels differ or are missing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?;)", re.ASCII)  # /*0010*/  S2R R151, SR_TID.X ;  /* its encoding */
PLACE = re.compile(r"_GLOBAL__N__[0-9a-f]{8}_\d+_|_cu_[0-9a-f]{8}")  # what a name has of its file's path


def kernels(library: Path) -> dict[tuple[str, str], list[str]]:
    """Instructions by architecture and name."""
    architecture, found, code = "", dict[tuple[str, str], list[str]](), list[str]()
    with subprocess.Popen(["cuobjdump", "-sass", library], stdout=subprocess.PIPE, text=True) as dump:
        assert dump.stdout is not None
        for line in dump.stdout:
            if line.startswith("arch = "):
                architecture = line.split()[-1]
            elif "Function : " in line:
                code = found[architecture, PLACE.sub("", line.split(" : ")[1].strip())] = []
            elif instruction := INSTRUCTION.match(line):
                code.append(instruction[1])
    if dump.returncode:
        sys.exit(f"cuobjdump failed on {library}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Which kernels of two builds differ in their machine code.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    paths = parser.parse_args()
    before, after = kernels(paths.before), kernels(paths.after)
    different = 0
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old != new:
            different += 1
            said = "only before" if new is None else "only after" if old is None else f"{len(old)} to {len(new)} instructions"
            print(f"{key[0]} {key[1]}: {said}")
    print(f"{len(before)} kernels, {different} differ")
    return different > 0


if __name__ == "__main__":
    sys.exit(main())
