"""`sparkrt chat` as people start it: in a terminal, and in a pipe."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.serve import ROOT
from tests.serve.harness import PATIENCE, Server, running

CHAT = [sys.executable, "-m", "sparkrt", "chat"]
PROMPT = "> \x1b[0m"
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]


class Typist:
    """A process in a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self._end, other = os.openpty()
        env = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"}
        env.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [*CHAT, *argv], cwd=ROOT, env=env, stdin=other, stdout=other, stderr=other, start_new_session=True, preexec_fn=_own
        )
        os.close(other)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, mark: str) -> str:
        """What is shown up to `mark`."""
        seen = b""
        while mark.encode() not in seen:
            assert select.select([self._end], [], [], PATIENCE)[0], f"no {mark!r} after {seen!r}"
            seen += os.read(self._end, 4096)
        return seen.decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


def _own() -> None:
    """The terminal is this process's, so that Ctrl-C reaches it."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def piped(text: str, *argv: str, **options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **options}
    return subprocess.run(
        [*CHAT, *argv], cwd=ROOT, env=env, input=text, text=True, capture_output=True, timeout=PATIENCE, check=False
    )


def test_in_a_terminal(echo: Server, tmp_path: Path) -> None:
    saved, typist = tmp_path / "kept.json", Typist("--url", echo.url, "--system", "Brief.")
    try:
        assert "sparkrt-tiny at 127.0.0.1" in typist.until(PROMPT)
        typist.type("⟦<think>hidden</think>Shown.⟧\n")
        shown = typist.until(PROMPT)
        assert "\x1b[2mhidden\x1b[0m" in shown.replace("\x1b[0m\x1b[2m", "")
        assert "Shown." in shown
        assert "tokens/s · first after" in shown
        typist.type("FOREVER\n")
        typist.until("</think>Shown.<think>")  # the script goes round
        typist.type("\x03")
        assert "stopped · " in typist.until(PROMPT)
        echo.wait_idle()
        typist.type("half a line\x03")
        typist.until(PROMPT)
        typist.type(f"/save {saved}\n")
        assert "saved in" in typist.until(PROMPT)
        typist.type("\x04")
        assert typist.process.wait(PATIENCE) == 0
    finally:
        typist.close()
    roles = [message["role"] for message in json.loads(saved.read_text(encoding="utf-8"))["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_in_a_pipe_there_is_the_answer_and_nothing_else(echo: Server, tmp_path: Path) -> None:
    done = piped("Hello!\n", "--temperature", "0")  # in process
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello! How can I help you today?\n", "")
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS), encoding="utf-8")
    done = piped(
        f"/quit is no command here\n⟦<think>hidden</think>Shown: {CALL}⟧\n", "--url", f"{echo.url}/v1", "--tools", str(tools)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, 'Shown:\nweather {"city": "Oslo"}\n', "")
    assert piped("", "--url", echo.url).returncode == 0


def test_in_a_pipe_errors_are_a_line_and_a_code(echo: Server) -> None:
    for text, argv, says in (
        ("REFUSE", (), "the engine does not like this"),
        ("FAIL", (), "hidden words"),
        ("Hello!", ("--top-k", "-9"), "top_k"),
        ("Hello!", ("nobody",), "The model `nobody` does not exist."),
    ):
        done = piped(text, "--url", echo.url, *argv)
        [line] = done.stderr.splitlines()
        assert done.returncode == 1
        assert line.startswith("sparkrt chat: error: ")
        assert says in line or text == "FAIL"
    with running("--api-key", "sesame", module="tests.serve.fake_engine", key="sesame") as server:
        assert piped("⟦yes⟧", "--url", server.url).returncode == 1
        assert piped("⟦yes⟧", "--url", server.url, "--api-key", "sesame").stdout == "yes\n"
        assert piped("⟦yes⟧", "--url", server.url, OPENAI_API_KEY="sesame").stdout == "yes\n"


def test_an_interrupt_in_a_pipe_stops_the_answer(echo: Server) -> None:
    with subprocess.Popen([*CHAT, "--url", echo.url], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"FOREVER")
        process.stdin.close()
        assert process.stdout.read(7) == b"One two"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        process.stdout.read()
    echo.wait_idle()
