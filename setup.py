"""Builds the CUDA kernels where nvcc is found; without it, sparkrt installs for the host alone and says so.

Two files: the kernels, one C library of every csrc/**/*.cu, and `sparkrt._kernels`, the binding that calls them. `pip install`
makes them as part of the build, `python setup.py build_cuda` alone (make build, CI). All else is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.build import build

ROOT = Path(__file__).parent
SOURCES = sorted(ROOT.glob("csrc/**/*.cu"))
ARCHITECTURES = ("90a",)  # machine code for each goes into the library
LIBRARY = Path("sparkrt", "_lib", "libsparkrt_kernels.so")
BINDING = Path("sparkrt", "_kernels" + sysconfig.get_config_var("EXT_SUFFIX"))


def find_nvcc() -> str | None:
    """The CUDA compiler: on PATH, under CUDA_HOME, or where the toolkit usually lies."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    return shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), *(str(home / "bin") for home in homes)]))


NVCC = find_nvcc()


class build_cuda(Command):
    """Compile the kernels and their binding."""

    description = "compile the CUDA kernels (does nothing without nvcc)"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [("build-lib=", None, "where the libraries go")]
    editable_mode = False  # set by setuptools for `pip install -e`

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        if not SOURCES:
            print("sparkrt: no CUDA sources: host backend only", flush=True)
        elif not NVCC:
            print("sparkrt: nvcc not found (PATH, CUDA_HOME, /usr/local/cuda): host backend only", flush=True)
        else:
            import pybind11

            includes = [f"-I{path}" for path in (ROOT / "csrc", pybind11.get_include(), sysconfig.get_path("include"))]
            codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
            self.compile(LIBRARY, [*codes, "-O3", "-lineinfo", *includes[:1], *map(str, SOURCES)])
            self.compile(BINDING, ["-O2", *includes, str(ROOT / "csrc" / "bindings.cpp"), "-ldl"])
            print(f"sparkrt: {len(SOURCES)} CUDA sources compiled for {', '.join('sm_' + a for a in ARCHITECTURES)}", flush=True)

    def compile(self, name: Path, arguments: list[str]) -> None:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(NVCC), "-shared", "-std=c++17", "-Xcompiler=-fPIC,-Wall", "-o", str(target), *arguments], check=True)

    @property
    def root(self) -> Path:
        return ROOT if self.editable_mode else Path(self.build_lib or "build/lib")

    # what setuptools asks of a sub-command of build
    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/**/*")) if path.is_file()]

    def get_outputs(self) -> list[str]:
        return [str(self.root / name) for name in (LIBRARY, BINDING)] if SOURCES and NVCC else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class SparkrtDistribution(Distribution):
    """A wheel with kernels in it belongs to one platform and Python; one without runs anywhere."""

    def has_ext_modules(self) -> bool:
        return bool(SOURCES and NVCC)


build.sub_commands = [*build.sub_commands, ("build_cuda", None)]

if __name__ == "__main__":
    setup(cmdclass={"build_cuda": build_cuda}, distclass=SparkrtDistribution)
