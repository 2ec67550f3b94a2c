"""A conversation in a terminal, with a source that says what it is told to, and with the bundled model in this process."""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkrt.chat.cli import main
from sparkrt.chat.screen import Screen
from sparkrt.chat.session import Session
from sparkrt.chat.source import Asked, Local, Said
from sparkrt.engine.config import EngineConfig
from sparkrt.errors import RequestError, SparkrtError
from sparkrt.text.reply import ReplyDelta
from sparkrt.text.tools.calls import CallDelta

FIELDS = {name: {"type": "string"} for name in ("title", "directed_by")}
TOOL = {"type": "function", "function": {"name": "FindMovies", "parameters": {"type": "object", "properties": FIELDS}}}
WISH = "Can you find a movie for me that was directed by Michael Chaves?"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Script:
    """Answers with what it was given, in turn: deltas, or an exception among them."""

    name = "script"

    def __init__(self, *answers: list[ReplyDelta | BaseException]) -> None:
        self.answers, self.asked, self.ended = list(answers), list[Asked](), 0

    def answer(self, asked: Asked) -> Generator[Said, None, None]:
        self.asked.append(Asked([*asked.messages], asked.tools, dict(asked.sampling), asked.thinking))
        try:
            for tokens, delta in enumerate(self.answers.pop(0), 1):
                if isinstance(delta, BaseException):
                    raise delta
                yield Said(delta, tokens)
        finally:
            self.ended += 1

    def close(self) -> None:
        pass


def text(*parts: str) -> list[ReplyDelta | BaseException]:
    return [ReplyDelta(parts=[part]) for part in parts]


def typed(monkeypatch: pytest.MonkeyPatch, source: Script, *lines: str, **settings: Any) -> tuple[Session, str]:
    """The session after these lines, and all that it wrote."""
    out, rest = Terminal(), list(lines)

    def read(prompt: str) -> str:
        out.write(prompt)
        if not rest:
            raise EOFError
        return rest.pop(0)

    monkeypatch.setattr(builtins, "input", read)
    session = Session(source, Screen(out, colour=False), **settings)
    session.run()
    return session, out.getvalue()


def test_an_answer_becomes_part_of_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Script([ReplyDelta("hm"), *text("a", "b")], text("c"))
    session, shown = typed(monkeypatch, source, "one", "", "two \\", "three", system="brief", temperature=0.5, thinking=False)
    assert "hm\n\nab\n" in shown
    assert "3 tokens" in shown
    answer = {"role": "assistant", "content": "ab", "reasoning_content": "hm"}
    system, one, two = [
        {"role": role, "content": said} for role, said in (("system", "brief"), ("user", "one"), ("user", "two \nthree"))
    ]
    assert source.asked == [Asked(m, (), {"temperature": 0.5}, False) for m in ([system, one], [system, one, answer, two])]
    assert session.messages[-1] == {"role": "assistant", "content": "c"}


def test_calls_wait_for_their_results(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [CallDelta(0, "x", "f"), CallDelta(0, arguments='{"a": 1}'), CallDelta(1, "y", "g"), CallDelta(1, arguments="{}")]
    source = Script([ReplyDelta(parts=[call]) for call in calls], text("done"))
    session, shown = typed(monkeypatch, source, "go", "first", "second", tools=[TOOL])
    assert '→ f {"a": 1}\n→ g {}\n' in shown
    assert "f returns> g returns> done" in shown
    results = [{"role": "tool", "tool_call_id": i, "content": said} for i, said in (("x", "first"), ("y", "second"))]
    assert session.messages[2:4] == results
    assert [len(asked.messages) for asked in source.asked] == [1, 4]


def test_a_stopped_answer_stays_but_for_a_call_that_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ReplyDelta(parts=["so far", CallDelta(0, "x", "f", '{"a"')])
    source = Script([half, KeyboardInterrupt()], [KeyboardInterrupt()], text("fine"))
    session, shown = typed(monkeypatch, source, "one", "two", "three")
    assert shown.count("stopped") == source.ended - 1 == 2
    assert [message["content"] for message in session.messages] == ["one", "so far", "three", "fine"]
    assert "tool_calls" not in session.messages[1]


def test_what_goes_wrong_leaves_the_conversation_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "it.json"
    wrong = ["/nothing", "/set x 1", "/set top_k a", "/set thinking a", "/save", f"/save {tmp_path}"]
    lines = ["one", *wrong, f"/save {saved}", f"/save {saved}", "/quit", "never read"]
    session, _ = typed(monkeypatch, Script([RequestError("too hot")]), *lines)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].split()[0] for line in said] == ["too", "there", "/set", "/set", "/set", "/save", "/save", "/save"]
    assert session.messages == []
    assert json.loads(saved.read_text(encoding="utf-8")) == {"messages": []}


def test_settings_can_be_changed_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Script(text("a"), text("b"))
    lines = ["/set temperature 0.5", "/set top-k 3", "/set thinking on", "/system short", "one", "/set top_k", "/set thinking"]
    _, shown = typed(monkeypatch, source, *lines, "/clear", "two", "/help")
    assert "temperature 0.5, top_k 3, thinking on" in shown
    assert "Ctrl-C stops an answer" in shown
    first, second = source.asked
    assert (first.sampling, first.thinking) == ({"temperature": 0.5, "top_k": 3}, True)
    assert (second.sampling, second.thinking) == ({"temperature": 0.5}, None)
    assert [message["content"] for message in second.messages] == ["short", "two"]


def test_an_answer_cannot_steer_the_terminal() -> None:
    out = Terminal()
    Screen(out).show(ReplyDelta("\x1b[2J\x07", ["a\x1b]0;title\x9b\x7f\r\tb\n"]))
    assert out.getvalue() == "\x1b[2m[2J\x1b[0m\n\na]0;title\tb\n"
    plain = io.StringIO()
    Screen(plain).show(ReplyDelta("thoughts", ["a\x1bb"]))
    assert plain.getvalue() == "a\x1bb"  # a file gets what there is, and no thinking


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    source = Local(EngineConfig(max_num_seqs=4), lambda what, done, total: None)
    yield source
    source.close()


def idle(source: Local) -> bool:
    stats = source._core.stats()
    return stats.free_slots == stats.total_slots and stats.running == stats.waiting == 0


def test_a_model_in_this_process(local: Local) -> None:
    asked = Asked([{"role": "user", "content": WISH}], [TOOL], {"temperature": 0})
    *_, last = said = list(local.answer(asked))
    whole = ReplyDelta()
    for piece in said:
        whole.add(piece.delta)
    [call] = whole.calls
    assert (call.name, json.loads(call.arguments)["directed_by"]) == ("FindMovies", "Michael Chaves")
    assert (last.reason, whole.content) == ("tool_calls", "")
    assert idle(local)
    with pytest.raises(SparkrtError, match="temperature"):
        next(local.answer(Asked(asked.messages, [], {"temperature": -1})))


def test_an_interrupt_waits_for_the_step_and_gives_everything_back(local: Local) -> None:
    before, asked = (
        signal.getsignal(signal.SIGINT),
        Asked([{"role": "user", "content": "Tell me a story."}], [], {"temperature": 0}),
    )
    answer = local.answer(asked)
    next(answer)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    assert idle(local)
    assert signal.getsignal(signal.SIGINT) == before
    answer = local.answer(asked)
    next(answer)
    answer.close()
    assert idle(local)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--url", "ftp://x"], 1, "--url ftp://x: expected an address"),
        (["--url", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9/v1 cannot be reached"),
        (["--url", "http://127.0.0.1:9", "--device", "cpu"], 2, "--device"),
        (["--api-key", "x"], 2, "--api-key is for --url"),
        (["--temperature", "warm"], 2, "'warm' is not a number"),
        (["--tools", "/nowhere"], 2, "/nowhere: cannot be read"),
        (["/nowhere"], 1, "/nowhere"),
    ],
)
def test_command_lines_that_cannot_be(argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    if code == 2:
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 2
    else:
        assert main(argv) == code
    [line] = capsys.readouterr().err.splitlines()
    assert says in line
