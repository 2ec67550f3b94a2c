"""`sparkrt bench serve` against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.serve import ROOT
from tests.serve.harness import PATIENCE, Server

SMALL = ["--num-prompts", "12", "--input-len", "20", "--output-len", "6", "--disable-tqdm"]


def bench(server: Server, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparkrt", "bench", "serve", "--base-url", server.url, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)


def figure(out: str, label: str) -> float:
    [line] = [line for line in out.splitlines() if line.startswith(label)]
    return float(line.removeprefix(label))


def test_completions(tiny: Server, tmp_path: Path) -> None:
    before = tiny.stats()
    more = ["--max-concurrency", "4", "--request-rate", "200", "--num-warmups", "2", "--metadata", "card=none"]
    kept = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new"), "--result-filename", "x.json"]
    done = bench(tiny, *SMALL, *more, *kept, "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99.9")
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout, "Successful requests:") == 12
    assert figure(done.stdout, "Total input tokens:") == 240
    assert figure(done.stdout, "Total generated tokens:") == 72
    assert figure(done.stdout, "Median TTFT (ms):") == figure(done.stdout, "P50 TTFT (ms):") > 0
    assert "Mean ITL" not in done.stdout
    assert tiny.stats()["generation_tokens"] - before["generation_tokens"] == 14 * 6
    result = json.loads((tmp_path / "new" / "x.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["max_concurrency"], result["card"]) == (12, 4, "none")
    assert result["max_concurrent_requests"] <= 4
    assert result["input_lens"] == [20] * 12
    assert result["errors"] == [""] * 12
    assert result["p99.9_e2el_ms"] >= result["p99.9_ttft_ms"]


def test_chat_and_a_file(tiny: Server, tmp_path: Path) -> None:
    (file := tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello!"}\n', encoding="utf-8")
    argv = ["--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "3", "--disable-tqdm"]
    out = tmp_path / "out.json"
    for backend in ("openai", "openai-chat"):
        kept = ["--append-result", "--save-detailed", "--result-filename", str(out)]
        done = bench(tiny, *argv, *kept, "--backend", backend, "--temperature", "0")
        assert done.returncode == 0, done.stderr
    plain, chat = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert plain["generated_texts"] == chat["generated_texts"] == ["Hello! How can I help you today?"] * 3
    assert plain["input_lens"] == chat["input_lens"]


def test_requests_that_fail(tiny: Server) -> None:
    done = bench(tiny, *SMALL, "--model", "sparkrt-tiny", "--served-model-name", "nobody")
    assert done.returncode == 1
    assert figure(done.stdout, "Failed requests:") == 12
    assert done.stderr.count("failed: HTTP 404: ") == 10
    assert "Traceback" not in done.stderr
