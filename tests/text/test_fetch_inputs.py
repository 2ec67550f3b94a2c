"""Fetching real inputs: checked, complete or not there at all, and no harm where nothing can be reached."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from tools import fetch_inputs
from tools.fetch_inputs import Input


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and inputs whose registry is a folder beside it."""
    registry = tmp_path / "registry"
    registry.mkdir()
    with zipfile.ZipFile(registry / "a.whl", "w") as archive:
        archive.writestr("deep/one.txt", "1")
        archive.writestr("deep/two.bin", "2")
    digest = hashlib.sha256((registry / "a.whl").read_bytes()).hexdigest()
    script = f"import shutil; shutil.copy({str(registry / 'a.whl')!r}, '.')"
    copy = (sys.executable, "-c", script)
    inputs = {
        "good": Input(copy, digest, ("deep/*.txt",)),
        "changed": Input(copy, "0" * 64, ("deep/*",)),
        "refused": Input((sys.executable, "-c", "raise SystemExit('no route to host')"), digest, ()),
        "no client": Input(("no-such-client-anywhere",), digest, ()),
    }
    monkeypatch.setattr(fetch_inputs, "INPUTS", inputs)
    monkeypatch.setattr(fetch_inputs, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fetch_inputs.py", *arguments])
    return fetch_inputs.main()


def test_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch_inputs.folder("good") is None
    assert run(monkeypatch, "good") == 0
    assert fetch_inputs.folder("good") == cache / "good"
    assert (cache / "good" / "one.txt").read_text() == "1"
    assert not (cache / "good" / "two.bin").exists()
    monkeypatch.setattr(fetch_inputs, "_run", lambda *_: pytest.fail("fetched again"))
    assert run(monkeypatch, "good") == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [("changed", "has sha256"), ("refused", "no route to host"), ("no client", "no-such-client-anywhere is not installed")],
)
def test_what_cannot_be_had_is_said(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    assert run(monkeypatch, "good", name) == 1
    assert run(monkeypatch, "--optional", name) == 0
    assert f"{name}: cannot be fetched: " in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=reason):
        fetch_inputs.fetch(name)
    assert fetch_inputs.folder(name) is None
    assert sorted(path.name for path in cache.iterdir()) == ["good"]
