"""The compiled kernel library: found beside the package, opened once, launchers looked up by an operator's symbol."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkrt.errors import EngineFatal, LoadError
from sparkrt.runtime.backend import Launchable

_BAD_ARGUMENT = -1
_UNSUPPORTED = -2


class UnsupportedCall(EngineFatal):
    """The operator has no kernel for these dtypes or sizes: plans must not ask for it."""


def library_path() -> Path:
    return Path(__file__).resolve().parent.parent / "_lib" / "libsparkrt_kernels.so"


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """What the kernels were built with and for. `archs` as nvcc spells them: "80", "90a", "120f"."""

    cuda: tuple[int, int]
    archs: tuple[str, ...]

    @classmethod
    def find(cls, path: Path | None = None) -> KernelBuild | None:
        """Of the library beside the package; None if there is none. Raises LoadError if it cannot be opened."""
        path = path or library_path()
        if not path.exists():
            return None
        try:
            said = ctypes.CDLL(str(path)).spark_build_info
        except (OSError, AttributeError) as error:
            raise LoadError(f"{path}: {error}; build the kernels again (make kernels)") from error
        said.restype = ctypes.c_char_p
        return cls.parse(said().decode())

    @classmethod
    def parse(cls, text: str) -> KernelBuild:
        """From the library's own words, "cuda=13.0 archs=80,90a"."""
        fields = dict(word.split("=", 1) for word in text.split())
        major, minor = fields["cuda"].split(".")
        return cls((int(major), int(minor)), tuple(fields["archs"].split(",")))

    def covers(self, capability: tuple[int, int]) -> bool:
        """Whether a device can run them: "a" code runs on its own capability, "f" and plain code on later minors too."""
        major, minor = capability
        for arch in self.archs:
            number = int(arch.rstrip("af"))
            if number // 10 == major and (number % 10 == minor if arch.endswith("a") else number % 10 <= minor):
                return True
        return False


class KernelLibrary:
    """Launches operators by their C launchers."""

    def __init__(self, path: Path | None = None) -> None:
        from sparkrt import _kernels

        self._library = _kernels.Library(str(path or library_path()))
        self._launchers: dict[str, int] = {}

    def launch(self, op: Launchable, args: Sequence[Any], stream: int) -> int:
        """Enqueue `op`; returns a cudaError_t. Raises EngineFatal on a call that the launcher refuses."""
        launcher = self._launchers.get(op.name)
        if launcher is None:
            launcher = self._launchers[op.name] = self._find(op)
        status: int = self._library.launch(launcher, args, stream)
        if status == _BAD_ARGUMENT:
            raise EngineFatal(f"operator {op.name} was called with arguments its kernel does not accept: {_said(args)}")
        if status == _UNSUPPORTED:
            raise UnsupportedCall(f"operator {op.name} has no kernel for these dtypes or sizes: {_said(args)}")
        return status

    def _find(self, op: Launchable) -> int:
        launcher = self._library.find(op.cuda) if op.cuda else 0
        if not launcher:
            raise UnsupportedCall(f"operator {op.name} has no CUDA launcher in this build")
        return int(launcher)


def _said(args: Sequence[Any]) -> str:
    return ", ".join(repr(a) for a in args)
