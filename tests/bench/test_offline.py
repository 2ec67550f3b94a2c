"""`sparkrt bench latency` and `throughput` on the bundled model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparkrt.bench.cli import main

SMALL = ["--input-len", "8", "--output-len", "4", "--disable-tqdm"]


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latency.json"
    argv = ["latency", *SMALL, "--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "1", "--output-json", str(file)]
    assert main(argv) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert len(result["latencies"]) == 3
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    out = capsys.readouterr().out
    assert f"Avg latency: {result['avg_latency']} seconds" in out
    assert f"99% percentile latency: {result['percentiles']['99']} seconds" in out


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "throughput.json"
    assert main(["throughput", *SMALL, "--num-prompts", "5", "--n", "2", "--output-json", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert (result["num_requests"], result["total_num_tokens"]) == (5, 5 * 8 + 10 * 4)
    assert result["tokens_per_second"] == pytest.approx(80 / result["elapsed_time"])
    out = capsys.readouterr().out
    assert re.search(r"Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output tokens/s", out)
    assert "Total num prompt tokens:  40\nTotal num output tokens:  40" in out
