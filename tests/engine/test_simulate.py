"""The simulator: the same trace gives the same report, every request ends once, and what could be reused is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.engine import fleet, traces
from sparkrt.engine.fleet import Cost, Report
from sparkrt.engine.simulate import Replica, main, plot, replay
from sparkrt.errors import LoadError

RESULTS = Path(__file__).parents[2] / "benchmarks/results/engine-nvidia-h200.json"
PAGE = 64


def ideal_hits(arrivals: list[traces.Arrival]) -> int:
    """Tokens, in whole pages, that each prompt begins with as earlier ones did, from the third visitor of a page on."""
    visits, hits = Counter[int](), 0
    for arrival in arrivals:
        ids, chain, here = arrival.ids(), 0, True
        for page in range((len(ids) - 1) // PAGE):
            chain = hash((chain, ids[page * PAGE : (page + 1) * PAGE].tobytes()))
            here = here and visits[chain] >= 2
            hits += PAGE * here
            visits[chain] += 1
    return hits


@pytest.mark.parametrize("kind", traces.SYNTHETIC)
def test_the_same_seed_gives_the_same_report(kind: str) -> None:
    trace = traces.SYNTHETIC[kind](60, 10.0, 3)
    assert trace == traces.SYNTHETIC[kind](60, 10.0, 3) != traces.SYNTHETIC[kind](60, 10.0, 4)
    assert [a.at for a in trace] == sorted(a.at for a in trace)
    assert replay(trace, Replica(), Cost()) == replay(trace, Replica(), Cost())
    assert fleet.estimate(trace, 5, 8, 100_000, Cost()) == fleet.estimate(trace, 5, 8, 100_000, Cost())


def check_conserved(report: Report, trace: list[traces.Arrival]) -> None:
    assert report.ended.total() + report.refused == len(trace)
    assert len(report.ttft) == report.ended["length"] == report.ended.total()
    if not report.refused:
        assert report.answer_tokens == sum(a.answer for a in trace)
        assert report.prompt_tokens == sum(a.tokens for a in trace)
    assert min(report.ttft, default=0) >= 0
    assert report.cached_tokens <= report.prompt_tokens


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["chat", "shared"]),
    seed=st.integers(0, 99),
    rows=st.integers(1, 12),
    blocks=st.integers(40, 200),
    snapshots=st.integers(0, 20),
    caching=st.booleans(),
)
def test_every_request_ends_once(kind: str, seed: int, rows: int, blocks: int, snapshots: int, caching: bool) -> None:
    trace = traces.SYNTHETIC[kind](20, 50.0, seed)
    check_conserved(replay(trace, Replica(rows, 512, blocks, PAGE, snapshots, caching), Cost()), trace)
    check_conserved(fleet.estimate(trace, 3, rows, blocks * PAGE * caching, Cost()), trace)


def test_shared_system_prompts_are_found() -> None:
    trace = traces.shared(300, 8.0)
    ideal = ideal_hits(trace)
    assert ideal > 0.7 * sum(a.tokens for a in trace)
    assert replay(trace, Replica(), Cost()).cached_tokens >= 0.95 * ideal
    assert replay(trace, Replica(caching=False), Cost()).cached_tokens == 0


def test_the_router_sends_a_session_where_its_prefix_is() -> None:
    trace = traces.agent(400, 20.0)
    routed, forgetful = (fleet.estimate(trace, 50, 16, tokens, Cost()) for tokens in (10**7, 0))
    assert routed.cached_tokens > 0.8 * routed.prompt_tokens
    assert forgetful.cached_tokens == 0
    assert sum(routed.ttft) < sum(forgetful.ttft)


def test_a_cost_comes_from_measured_results(tmp_path: Path) -> None:
    measured, default = Cost.from_results(RESULTS, "35b"), Cost()
    assert measured.batches == default.batches
    assert measured.step(20, 0) == pytest.approx(default.step(20, 0), rel=0.5)
    assert default.step(256, 0) > default.step(128, 0) > default.step(64, 0) > default.step(0, 0) == 0
    with pytest.raises(LoadError, match="'70b'"):
        Cost.from_results(RESULTS, "70b")


def test_trace_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, path = traces.chat(10, 5.0), tmp_path / "trace.jsonl"
    traces.write(trace, path)
    assert traces.read(path) == trace
    assert main(["--trace", str(path), "--costs", str(RESULTS)]) == 0
    assert "10 ended, 0 refused" in capsys.readouterr().out
    good = json.loads(path.read_text().splitlines()[0])
    for bad in ({"at": 1}, good | {"prompt": []}, good | {"prompt": [[3, 0]]}, good | {"answer": "many"}, 5):
        path.write_text(json.dumps(good) + "\n" + json.dumps(bad))
        assert main(["--trace", str(path)]) == 1
        assert "line 2: " in capsys.readouterr().err
    assert main(["--trace", str(tmp_path / "none")]) == 1


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = replay(traces.chat(5, 5.0), Replica(), Cost())
    report.count(1.5, "preemptions", 3)
    plot(report, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    for text in ("time to first token", "time between tokens", "answer tokens/s", "% of prompts cached", "3 preemptions"):
        assert text in drawn
    plot(Report(), tmp_path / "empty.svg")
