"""The project as a whole: licences, sizes, what must not be in it, and that what the README promises exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = {"", ".cfg", ".cpp", ".cu", ".cuh", ".h", ".html", ".json", ".md", ".py", ".svg", ".toml", ".txt", ".yml"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked() -> list[Path]:
    """The files of the project as git knows them; in an unpacked archive, everything that is not hidden or built."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        found = (p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file())
        return [p for p in found if not {"build", "dist"} & set(p.parts) and not any(part.startswith(".") for part in p.parts)]
    return [Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_licences_are_there() -> None:
    apache = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert apache.lstrip().startswith("Apache License")
    assert "END OF TERMS AND CONDITIONS" in apache
    notice = (ROOT / "sparkrt/assets/sparkrt-tiny/LICENSE").read_text(encoding="utf-8")
    for name in ("Attribution-ShareAlike 4.0", "Schema-Guided Dialogue", "Wikipedia", "GSM8K", "Storybook", "chatterbot-corpus"):
        assert name in notice
    assert "sparkrt/assets/sparkrt-tiny/LICENSE" in (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0 AND CC-BY-SA-4.0"
    for pattern in PROJECT["license-files"]:
        assert list(ROOT.glob(pattern)), pattern


def test_sizes_stay_within_budget() -> None:
    done = subprocess.run([sys.executable, "tools/size.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_machine_or_registry_is_named() -> None:
    """No path of somebody's machine, and no address but this machine's own and those of licences and standards."""
    paths = r"(?<![\w/.])/(?:home|root|work|Users)/\w|/tmp/\w+"
    addresses = r"https?://(?!127\\?\.|localhost|a\.example|example\.org|www\.apache\.org|creativecommons\.org|www\.w3\.org|\{)"
    forbidden = re.compile(f"{paths}|{addresses}")
    faults = []
    for path in tracked():
        if path.suffix not in TEXT or "assets" in path.parts or path == Path(__file__).relative_to(ROOT):
            continue
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
            if forbidden.search(line):
                faults.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not faults, "\n".join(faults)


def test_no_file_is_left_broken() -> None:
    """No merge marker, no carriage return, no tab in Python, and text files end in one newline."""
    for path in tracked():
        if path.suffix in {".py", ".md", ".toml"} and "assets" not in path.parts:
            text = (ROOT / path).read_bytes().decode()
            assert not re.search(r"^(?:<{7}|>{7}) ", text, re.MULTILINE), path
            assert "\r" not in text, path
            assert "\t" not in text or path.suffix != ".py", path
            assert not text or (text.endswith("\n") and not text.endswith("\n\n")), path


def test_readme_commands_exist() -> None:
    readme, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    promised = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(re.findall(r"```.*?```|`[^`\n]+`", readme, re.DOTALL))))
    assert {"serve", "test"} <= promised <= targets
    assert {"serve", "test", "lint", "build", "bench", "goldens", "clean"} <= targets


@pytest.mark.parametrize(
    "document", ["README.md", "CHANGELOG.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_links_between_files_lead_somewhere(document: str) -> None:
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r"(?:src|srcset|href)=\"([^\"#]+)\"", text)
    for target in targets:
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document} links to {target}"


def test_python_examples_of_the_readme_are_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_decisions_are_numbered_and_listed() -> None:
    records = sorted((ROOT / "docs/adr").glob("*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    listing = records[0].read_text(encoding="utf-8")
    for path in records:
        assert path.name in listing, f"{path.name} is not in the table of the first record"


def test_importing_the_package_needs_no_pytorch() -> None:
    """Neither does it load NumPy: `sparkrt --help` must be instant."""
    probe = "import sys, sparkrt, sparkrt.serve.cli; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
