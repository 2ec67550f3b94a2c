"""Builds the CUDA kernels where nvcc is found; without it, sparkrt installs for the host alone and says so.

`pip install` runs build_kernels.py as part of the build, `python setup.py build_cuda` alone. Everything else is
in pyproject.toml.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a build front end need not start here

import build_kernels  # noqa: E402

READY = bool(build_kernels.sources() and build_kernels.find_nvcc() and build_kernels.wanted())


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
        if build_kernels.wanted():
            build_kernels.build(self.root.resolve())

    @property
    def root(self) -> Path:
        return ROOT if self.editable_mode else Path(self.build_lib or "build/lib")

    # what setuptools asks of a sub-command of build
    def get_source_files(self) -> list[str]:
        files = [ROOT / "build_kernels.py", *sorted(path for path in ROOT.glob("csrc/**/*") if path.is_file())]
        return [str(path.relative_to(ROOT)) for path in files]

    def get_outputs(self) -> list[str]:
        return [str(self.root / name) for name in (build_kernels.LIBRARY, build_kernels.BINDING)] if READY else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class SparkrtDistribution(Distribution):
    """A wheel with kernels in it belongs to one platform and Python; one without runs anywhere."""

    def has_ext_modules(self) -> bool:
        return READY


build.sub_commands = [*build.sub_commands, ("build_cuda", None)]

if __name__ == "__main__":
    setup(cmdclass={"build_cuda": build_cuda}, distclass=SparkrtDistribution)
