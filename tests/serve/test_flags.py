"""Every flag that the field knows: it works, has no effect and says so, or is refused by its name. And flags from a file."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from sparkrt.engine.config import EngineConfig
from sparkrt.serve.cli import ServeArgs, parse
from sparkrt.serve.foreign import REFUSED, WITHOUT_EFFECT

# flags of `vllm serve`, and the spellings of other engines that scripts carry, each with a value that asks for something
KNOWN = """
--model m|--model-path m|--host ::1|--port 1234|--uds /run/x|--served-model-name a b|--api-key k l|--dtype bfloat16
--max-model-len 32k|--context-length 4096|--gpu-memory-utilization 0.5|--mem-fraction-static 0.5
--kv-cache-memory-bytes 2G|--kv-cache-dtype auto|--kv-cache-dtype fp8|--kv-cache-dtype-skip-layers 0 1|--block-size 16
--page-size 32|--enable-prefix-caching|--no-enable-prefix-caching|--prefix-caching-hash-algo sha256
--mamba-cache-mode align|--mamba-cache-dtype float32|--mamba-ssm-cache-dtype float32
--prefix-cache-retention-interval 256|--gdn-prefill-backend triton|--max-num-seqs 8|--max-running-requests 8
--max-num-batched-tokens 2048|--chunked-prefill-size 2048|--max-num-queued-reqs 9|--max-queued-requests 9
--max-num-queued-tokens 100|--enable-chunked-prefill|--no-enable-chunked-prefill|--long-prefill-token-threshold 100
--scheduling-policy priority|--async-scheduling|--no-async-scheduling|--stream-interval 5|--enforce-eager
--disable-cuda-graph|--cudagraph-capture-sizes 1 2 4|--max-cudagraph-capture-size 64|--quantization fp8|-q fp8
--quantization none|--load-format dummy|--generation-config vllm|--override-generation-config {"top_k":5}|--seed 7
--random-seed 7|--max-logprobs 5|--tensor-parallel-size 1|-tp 1|--tp-size 1|--tensor-parallel-size 2|-pp 1
--pipeline-parallel-size 2|-dp 2|--enable-expert-parallel|--speculative-config {"method":"mtp"}|--spec-method mtp
--spec-model m|--spec-tokens 3|--enable-auto-tool-choice|--tool-call-parser qwen3_coder|--tool-call-parser qwen3_xml
--tool-call-parser hermes|--reasoning-parser qwen3|--reasoning-parser deepseek_r1|--chat-template x
--default-chat-template-kwargs {"a":1}|--enable-prompt-tokens-details|--enable-force-include-usage
--enable-per-request-metrics|--enable-lora|--max-loras 2|--max-lora-rank 8|--lora-modules a=b|--kv-offloading-size 4
--cpu-offload-gb 0|--cpu-offload-gb 4|--enable-sleep-mode|--enable-request-id-headers|--enable-log-requests
--disable-log-requests|--disable-log-stats|--uvicorn-log-level info|--disable-uvicorn-access-log
--allowed-origins ["*"]|--allowed-methods ["GET"]|--allowed-headers ["x"]|--allow-credentials
--ssl-certfile a --ssl-keyfile b|--root-path /llm|--middleware m|--shutdown-timeout 9|--language-model-only
--limit-mm-per-prompt {"image":0}|--trust-remote-code|--enable-metrics|--enable-cache-report|--skip-server-warmup
--admin-api-key k
""".strip().replace("\n", "|")


@pytest.mark.parametrize("typed", [*KNOWN.split("|")])
def test_a_flag_works_or_says_why_not(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = typed.split()
    flag = argv[0]
    try:
        args, plain = parse(argv), parse([])
    except SystemExit:
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"sparkrt serve: error: {flag}")
        assert re.search(r"not supported|only .* is supported", line)
        return
    different = [f.name for f in fields(ServeArgs) if getattr(args, f.name) != getattr(plain, f.name)]
    if flag in WITHOUT_EFFECT:
        assert different == ["without_effect"]
        assert args.without_effect == [flag]
    else:
        asks_for_nothing = typed in ("--kv-cache-dtype auto", "--quantization none", "--cpu-offload-gb 0")
        asks_for_nothing |= typed in ("--tensor-parallel-size 1", "-tp 1", "--tp-size 1", "-pp 1", "--enable-prefix-caching")
        assert bool(different) != asks_for_nothing, different


def test_what_is_refused_can_be_asked_not_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, (_, neutral, why) in REFUSED.items():
        for flag in flags:
            for value in neutral:
                assert parse([flag, value]) == parse([])
            with pytest.raises(SystemExit):
                parse([flag, "something"])
            assert why in capsys.readouterr().err


def config(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "serve.yaml"
    file.write_text(text, encoding="utf-8")
    return ["--config", str(file)]


def test_a_file_says_what_a_command_line_would(tmp_path: Path) -> None:
    text = """
        model: some/model
        port: 1234
        served_model_name: [a, b]  # underscores are fine
        api-key: k
        max-model-len: 32k
        gpu-memory-utilization: 0.5
        enable-prefix-caching: false
        async-scheduling: true
        enforce-eager: false
        default-chat-template-kwargs: {enable_thinking: false}
        allowed-origins: ["*"]
        trust-remote-code: true
        seed: -1
        chat-template:
    """
    line = [
        "some/model",
        "--port",
        "1234",
        "--served-model-name",
        "a",
        "b",
        "--api-key",
        "k",
        "--max-model-len",
        "32k",
        "--seed",
        "-1",
    ]
    line += ["--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching", "--async-scheduling", "--allowed-origins", '["*"]']
    line += ["--default-chat-template-kwargs", '{"enable_thinking": false}', "--trust-remote-code"]
    found = parse(config(tmp_path, text))
    assert found == parse(line)
    assert found.engine == EngineConfig(
        model="some/model",
        max_model_len=32000,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        async_scheduling=True,
        seed=-1,
    )
    assert parse(config(tmp_path, "# nothing\n")) == parse([])


def test_the_command_line_wins(tmp_path: Path) -> None:
    argv = config(tmp_path, "model: from/file\nport: 1\napi-key: [a, b]\nenable-prefix-caching: false\nhost: 0.0.0.0\n")
    for model in (["typed/model"], ["--model", "typed/model"]):
        args = parse([*model, *argv, "--port", "2", "--api-key", "c", "--enable-prefix-caching"])
        assert (args.model, args.port, args.api_keys, args.host) == ("typed/model", 2, ["c"], "0.0.0.0")
        assert args.engine.enable_prefix_caching
    assert parse(argv).model == "from/file"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "'prot' is not a flag: is port meant?"),
        ("1: 2", "1 is not a flag"),
        ("config: x.yaml", "'config' is not a flag"),
        ("help: true", "'help' is not a flag"),
        ("port: many", "argument --port: 'many' is not a port"),
        ("port: [1, 2]", "argument --port: '[1, 2]' is not a port"),
        ("enforce-eager: 5", "enforce-eager must be true or false, got 5"),
        ("quantization: fp8", "--quantization fp8: this is not supported"),
        ("allowed-origins: 5", "is not a JSON list of strings"),
        ("- port", "flags and their values are expected, got a list"),
        ("port: [", "it is not YAML"),
        ("x: !!python/object/apply:os.getcwd []", "it is not YAML"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(config(tmp_path, text))
    assert left.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/serve.yaml: " in line
    assert says in line


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--config", "/nowhere.yaml"])
    assert "/nowhere.yaml: it cannot be read" in capsys.readouterr().err


def test_half_a_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    for given, missing in (("--ssl-certfile", "--ssl-keyfile"), ("--ssl-keyfile", "--ssl-certfile")):
        with pytest.raises(SystemExit):
            parse([given, "x"])
        assert f"{given} needs {missing}" in capsys.readouterr().err
