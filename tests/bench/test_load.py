"""The load generator without a server: its clock, its figures, its prompts, and what it refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkrt.bench.cli import main
from sparkrt.bench.client import Client, Reply
from sparkrt.bench.dataset import Dataset, Sample, open_text
from sparkrt.bench.load import arrivals, read
from sparkrt.bench.report import Outcome, block, figures, spread
from sparkrt.errors import SparkrtError

OTHER = "192.0.2.7"  # an address that belongs to nobody
TOKENIZER, TEMPLATE = open_text("sparkrt-tiny", None)
STREAM = (
    'data: {"choices":[{"text":"Gr"}]}\n\n: a ping\n\ndata: {"choices":[{"text":"üße"}]}\r\n\r\n'
    'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
    'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}\n\ndata: [DONE]\n\n'
).encode()


def reply(*pieces: bytes) -> Reply:
    return Reply(sent=10.0, status=200, pieces=[(11.0 + i, data) for i, data in enumerate(pieces)])


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_an_answer_reads_the_same_however_it_is_cut(cuts: set[int]) -> None:
    ends = [*sorted(cuts), len(STREAM)]
    outcome = read(reply(*(STREAM[a:b] for a, b in pairwise([0, *ends]))), Sample("x", 1, 4))
    assert (outcome.text, outcome.error) == ("Grüße", "")
    assert (outcome.input_tokens, outcome.output_tokens) == (5, 4)
    # an event is complete with the line feed after it
    complete = [STREAM.index(b"\n", STREAM.index(mark)) for mark in (b"Gr", "üße".encode(), b"finish")]
    assert outcome.chunks == [11.0 + sum(end <= at for end in ends) for at in complete]


def test_times() -> None:
    chunk = b'data: {"choices":[{"text":"x"}]}\n\n'
    outcome = read(reply(chunk, b":\n\n", chunk + chunk, chunk), Sample("x", 1, 4))
    assert outcome.chunks == [11.0, 13.0, 13.0, 14.0]
    assert (outcome.ttft, outcome.e2el, outcome.tpot) == (1.0, 4.0, 1.0)
    assert outcome.itl == [2.0, 0.0, 1.0]


def test_chat_begins_with_the_first_word_not_with_the_role() -> None:
    chunks = [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm"}, {"content": "Yes"}, {"tool_calls": [{}]}]
    lines = [b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n" for delta in chunks]
    outcome = read(reply(*lines), Sample("x", 1, 4))
    assert (outcome.chunks, outcome.text) == ([12.0, 13.0, 14.0], "HmYes")
    assert outcome.output_tokens == 3  # nobody counted for us


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (503, b'{"error":{"message":"full"}}', "HTTP 503: "),
        (200, b'data: {"choices":[{"text":"a"}]}\n\ndata: {"error":{"message":"the engine has stopped"}}\n\n', "has stopped"),
        (200, b"data: {\n\n", "no chunk"),
        (200, b"data: [DONE]\n\n", "without a token"),
        (200, b"<html>", "without a token"),
    ],
)
def test_answers_that_failed(status: int, body: bytes, words: str) -> None:
    failed = read(Reply(0.0, status, [(1.0, body)]), Sample("x", 1, 4))
    assert words in failed.error
    result = figures([failed], 1.0, {})
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (0, 1, 0)


def test_the_block_and_the_figures() -> None:
    outcomes = [
        Outcome(0.0, 0.5, input_tokens=10, output_tokens=3, chunks=[1.0, 2.0, 4.0]),
        Outcome(3.0, input_tokens=30, output_tokens=1, chunks=[3.5]),
        Outcome(4.0, input_tokens=7, output_tokens=1, chunks=[4.25]),  # begins as the first one ends
        Outcome(0.0, error="refused"),
    ]
    metrics, shares = ["ttft", "tpot", "itl", "e2el", "client_queue_time"], [50.0, 99.5]
    result = figures(outcomes, 4.0, {"ttft": 600.0, "e2el": 500.0}) | spread(outcomes, metrics, shares)
    assert result["mean_ttft_ms"] == pytest.approx(1750 / 3)
    assert (result["mean_tpot_ms"], result["median_itl_ms"], result["p50_e2el_ms"]) == (1500.0, 1500.0, 500.0)
    assert result["p99.5_client_queue_time_ms"] == pytest.approx(495.0)
    assert (result["max_concurrent_requests"], result["max_output_tokens_per_s"]) == (2, 2.0)
    assert (result["request_goodput"], result["total_token_throughput"]) == (0.5, 13.0)
    lines = block(result | {"max_concurrency": 2, "request_rate": 5.0}, metrics[:1], [99.5]).splitlines()
    assert lines == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             2         ",
        "Request rate configured (RPS):           5.00      ",
        "Benchmark duration (s):                  4.00      ",
        "Total input tokens:                      47        ",
        "Total generated tokens:                  5         ",
        "Request throughput (req/s):              0.75      ",
        "Request goodput (req/s):                 0.50      ",
        "Output token throughput (tok/s):         1.25      ",
        "Peak output token throughput (tok/s):    2.00      ",
        "Peak concurrent requests:                2         ",
        "Total token throughput (tok/s):          13.00     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          583.33    ",
        "Median TTFT (ms):                        500.00    ",
        "P99.5 TTFT (ms):                         995.00    ",
        "==================================================",
    ]


@given(st.integers(1, 50), st.floats(0.01, 1000), st.sampled_from([0.1, 1.0, 8.0, float("inf")]), st.integers(0, 9))
def test_arrivals_keep_their_rate(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = list(arrivals(count, rate, burstiness, seed))
    assert times == sorted(times) == list(arrivals(count, rate, burstiness, seed))
    assert times[-1] == pytest.approx(count / rate)
    assert list(arrivals(count, float("inf"), burstiness, seed)) == [0.0] * count


def test_random_prompts() -> None:
    data = Dataset(num_prompts=40, input_len=20, output_len=10, range_ratio=0.5, prefix_len=5, seed=3)
    samples = data.samples(TOKENIZER)
    assert samples == data.samples(TOKENIZER)
    assert len({tuple(sample.prompt[:5]) for sample in samples}) == 1
    assert {len(sample.prompt) for sample in samples} <= set(range(15, 36))
    assert {sample.output_len for sample in samples} <= set(range(5, 16))
    assert 15 < mean(len(sample.prompt) for sample in samples) - 5 < 25
    assert not TOKENIZER.special_ids & {i for sample in samples for i in sample.prompt if isinstance(i, int)}
    assert all(isinstance(sample.prompt, str) for sample in data.samples(TOKENIZER, text=True))


def test_prompts_from_files(tmp_path: Path) -> None:
    chats, lines = tmp_path / "chats.json", tmp_path / "lines.jsonl"
    turns = [[{"from": "human", "value": f"Tell me about number {i}, please."}, {"value": "It is a number."}] for i in range(3)]
    noise = [{"conversations": [{"value": "lonely"}]}, {"conversations": [{"value": "a"}, {"value": "too short a prompt"}]}, 7]
    chats.write_text(json.dumps([*noise, *({"conversations": pair} for pair in turns)]), encoding="utf-8")
    samples = Dataset(name="sharegpt", path=str(chats), num_prompts=5).samples(TOKENIZER)
    assert len(samples) == 5
    assert {sample.prompt for sample in samples} == {pair[0]["value"] for pair in turns}
    assert all(sample.output_len == len(TOKENIZER.encode("It is a number.")) for sample in samples)
    lines.write_text('{"prompt": "Hello!"}\n\n{"prompt": "Hello!", "output_tokens": 256}\n', encoding="utf-8")
    plain, chat = (Dataset(name="custom", path=str(lines), num_prompts=2).samples(TOKENIZER, wrap) for wrap in (None, TEMPLATE))
    assert [(sample.prompt, sample.output_len) for sample in plain] == [("Hello!", 256)] * 2
    assert "Hello!" in str(chat[0].prompt)
    assert chat[0].prompt_len > plain[0].prompt_len


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("custom", '{"text": "x"}', 'line 1: expected {"prompt": text}'),
        ("custom", '{"prompt": "x", "output_tokens": 0}', "output_tokens must be"),
        ("custom", "{", "cannot be read"),
        ("custom", "", "no prompt of a usable length"),
        ("sharegpt", "{}", "expected a list"),
        ("sharegpt", '[{"conversations": [{"value": 1}, {}]}]', "entry 1: expected turns"),
        ("sharegpt", "[" * 100_000, "cannot be read"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, name: str, text: str, words: str) -> None:
    (path := tmp_path / "data").write_text(text, encoding="utf-8")
    with pytest.raises(SparkrtError, match="data") as caught:
        Dataset(name=name, path=str(path)).samples(TOKENIZER)
    assert words in str(caught.value)


@pytest.mark.parametrize("where", ["192.0.2.7:8000", "[2001:db8::1]", "0.0.0.0:8000", ":1", "127.0.0.1:x", ""])
def test_it_loads_no_other_machine(where: str) -> None:
    for scheme in ("http", "ftp"):
        with pytest.raises(SparkrtError):
            Client(f"{scheme}://{where}")


def test_it_loads_this_machine_and_others_when_told_to() -> None:
    for where in ("127.0.0.1:8000", "[::1]:8000/prefix", "localhost:1"):
        Client(f"http://{where}")
    Client(f"http://{OTHER}:8000", allow_remote=True)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([], 2, "no command"),
        (["dance"], 2, "unknown command 'dance'"),
        (["serve", "--port", "x"], 2, "'x' is not a port"),
        (["serve", "--dataset-name", "sharegpt"], 2, "--dataset-name sharegpt needs a --dataset-path"),
        (["serve", "--dataset-path", "x"], 2, "--dataset-name random takes no --dataset-path"),
        (["serve", "--goodput", "itl:5"], 2, "METRIC:MS"),
        (["serve", "--percentile-metrics", "ttft,x"], 2, "is not a list of"),
        (["serve", "--metric-percentiles", "101"], 2, "from 0 to 100"),
        (["serve", "--extra-body", "[]"], 2, "a JSON object"),
        (["serve", "--request-rate", "0"], 2, "a number above 0"),
        (["serve", "--host", OTHER], 1, "--allow-remote"),
        (["serve", "--port", "1"], 1, "/v1/models: "),
        (["latency", "--dtype", "int4"], 2, "--dtype"),
        (["latency", "/nowhere"], 1, "/nowhere"),
        (["throughput", "--max-model-len", "many"], 2, "--max-model-len must be a positive number"),
    ],
)
def test_wrong_command_lines(capsys: pytest.CaptureFixture[str], argv: list[str], code: int, words: str) -> None:
    if code == 2 and len(argv) > 1:
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
    else:
        assert main(argv) == code
    line = capsys.readouterr().err
    assert words in line
    assert line.startswith("sparkrt bench")
    assert line.count("\n") == 1
