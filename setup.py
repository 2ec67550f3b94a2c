"""Builds the CUDA library from csrc/ where nvcc is found; without it, sparkrt installs for the host alone.

`python setup.py build_cuda` compiles it on its own (make build, CI); `pip install` runs the same command as part of the build.
Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build import build

ROOT = Path(__file__).parent
ARCHITECTURES = ("90a",)  # one embedded binary each
LIBRARY = Path("sparkrt", "lib", "libsparkrt_cuda.so")


def find_nvcc() -> Path | None:
    """The CUDA compiler: on PATH, under CUDA_HOME, or where the toolkit usually lies."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    found = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), *(str(home / "bin") for home in homes)]))
    return Path(found) if found else None


class build_cuda(Command):
    """Compile csrc/**/*.cu into one shared library."""

    description = "compile the CUDA kernels (does nothing without nvcc)"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [("build-lib=", None, "where the library goes")]
    editable_mode = False  # set by setuptools for `pip install -e`

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))
        self.sources = sorted(ROOT.glob("csrc/**/*.cu"))
        self.nvcc = find_nvcc()

    @property
    def ready(self) -> bool:
        return bool(self.sources and self.nvcc)

    def run(self) -> None:
        if not self.sources:
            print("sparkrt: no CUDA sources yet: host backend only", flush=True)
        elif not self.nvcc:
            print("sparkrt: nvcc not found (PATH, CUDA_HOME, /usr/local/cuda): host backend only", flush=True)
        else:
            target = self.target()
            target.parent.mkdir(parents=True, exist_ok=True)
            codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
            flags = ["-shared", "-O3", "-std=c++17", "-lineinfo", "-Xcompiler", "-fPIC,-Wall", "-I", str(ROOT / "csrc")]
            subprocess.run([str(self.nvcc), *flags, *codes, "-o", str(target), *map(str, self.sources)], check=True)
            names = ", ".join("sm_" + a for a in ARCHITECTURES)
            print(f"sparkrt: {len(self.sources)} CUDA sources compiled for {names}: {target}", flush=True)

    def target(self) -> Path:
        return ROOT / LIBRARY if self.editable_mode else Path(self.build_lib or "build", LIBRARY)

    # what setuptools asks of a sub-command of build
    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in self.sources]

    def get_outputs(self) -> list[str]:
        return [str(self.target())] if self.ready else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


build.sub_commands = [*build.sub_commands, ("build_cuda", None)]

if __name__ == "__main__":
    setup(cmdclass={"build_cuda": build_cuda})
