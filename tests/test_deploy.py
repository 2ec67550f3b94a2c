"""deploy/: what it copies is there, what it runs is a command of ours, nobody is root, and systemd understands its unit."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sparkrt.serve.cli import parse

ROOT = Path(__file__).parent.parent
UNIT, DOCKERFILE, CONFIG = (ROOT / "deploy" / name for name in ("sparkrt.service", "Dockerfile", "serve.yaml"))


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def test_the_image_has_what_it_copies_and_ignores_the_rest() -> None:
    ignored = (ROOT / "deploy/Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [word for kind, rest in instructions() if kind == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    used = {"pyproject.toml", "setup.py", "build_kernels.py", "README.md", "LICENSE", "NOTICE", "csrc", "sparkrt"}
    assert used <= {*copied}


def test_the_image_runs_as_nobody_in_particular() -> None:
    last = dict(instructions())  # of each kind
    assert re.fullmatch(r"[1-9]\d+", last["USER"])  # a number: Kubernetes can see that it is not root
    [_, *argv] = yaml.safe_load(last["ENTRYPOINT"])
    assert parse([*argv[1:], *yaml.safe_load(last["CMD"])]).host == "0.0.0.0"
    assert f":{parse(argv[1:]).port}/health" in last["HEALTHCHECK"]


def test_the_unit_starts_a_command_of_ours() -> None:
    text = UNIT.read_text(encoding="utf-8")
    [line] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, command, *argv = shlex.split(line)
    assert (program, command) == ("/opt/sparkrt/bin/sparkrt", "serve")
    argv[argv.index("--config") + 1] = str(CONFIG)
    keys = argv.index("--api-key-file")
    assert argv[keys + 1] == "${CREDENTIALS_DIRECTORY}/keys"
    args = parse(argv[:keys])
    assert args.access_log == "-"
    timeout = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert timeout is not None
    assert int(timeout[1]) > args.shutdown_timeout + 10
    assert "DeviceAllow=char-nvidia* rw" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "sparkrt.service"
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/sparkrt/bin/sparkrt", shutil.which("true") or "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if str(unit) in line or "sparkrt.service" in line]) == (
        0,
        [],
    )
    security = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--threshold=20",
        str(unit),
    ]  # a threshold of exposure, in tenths
    done = subprocess.run(security, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
