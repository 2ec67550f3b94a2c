"""An engine without a model, for faults that the real one does not have: it recites SCRIPT, or what the prompt has last between
⟦ and ⟧ (⟪ and ⟫: a token for each byte), or does what the prompt says.

Run as a program it is a server around that engine: `python -m tests.serve.fake_engine [flags of sparkrt serve]`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sparkrt.engine.config import EngineConfig, Progress
from sparkrt.engine.messages import EngineOutput, EngineRequest, EngineStats, Logprob, ModelInfo
from sparkrt.errors import CapacityError, EngineFatal, LoadError, RequestError
from sparkrt.serve.cli import parse
from sparkrt.serve.server import run
from sparkrt.text.template import ChatTemplate
from sparkrt.text.tokenizer import Tokenizer
from tests.serve import TINY

SCRIPT = "One two three: 你好 🎉 and that is all there is to say about it."
STEP = 0.002  # s that a step takes, so that there is time to do something to a running request


@dataclass
class Running:
    request: EngineRequest
    prompt: str
    script: list[int]
    done: int = 0


class FakeEngine:
    """Words of a prompt that do something: REFUSE and FULL when it is added, FAIL, LATE, BREAK, RAISE and HANG at its third
    token, FOREVER instead of ending; TELL and the path of a pipe, into which something is written when it has ended.
    """

    grammars = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = {raw[0]: i for i in range(tokenizer.vocab_size) if len(raw := tokenizer.token_bytes(i)) == 1}
        self._running: dict[str, Running] = {}
        self._stats = EngineStats(total_blocks=10, free_blocks=10)

    def add(self, request: EngineRequest) -> None:
        prompt = self._tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        if "REFUSE" in prompt:
            raise RequestError("the engine does not like this", param="prompt", code="disliked")
        if "FULL" in prompt:
            raise CapacityError("the engine is full")
        script = self._tokenizer.encode(SCRIPT, add_special_tokens=False)
        if "⟦" in prompt:
            script = self._tokenizer.encode(prompt.split("⟦")[-1].split("⟧")[0], add_special_tokens=False)
        if "⟪" in prompt:
            script = [self._bytes[byte] for byte in prompt.split("⟪")[-1].split("⟫")[0].encode()]
        script = script * 500 if "FOREVER" in prompt else [*script, *self._tokenizer.eos_token_ids[:1]]
        self._running[request.request_id] = Running(request, prompt, script)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[EngineOutput]:
        time.sleep(STEP)
        return [self._next(running) for running in list(self._running.values())]

    def _next(self, running: Running) -> EngineOutput:
        request, token = running.request, running.script[running.done]
        running.done += 1
        if running.done == 3:
            if "BREAK" in running.prompt:
                raise EngineFatal("the device is lost")
            if "RAISE" in running.prompt:
                raise ZeroDivisionError("a bug")
            if "HANG" in running.prompt:
                time.sleep(3600)
            if "LATE" in running.prompt:
                del self._running[request.request_id]
                why = "the request was not done within 1 s"
                return EngineOutput(request_id=request.request_id, finish_reason="timeout", error=why)
            if "FAIL" in running.prompt:
                del self._running[request.request_id]
                return EngineOutput(request_id=request.request_id, finish_reason="error", error="ValueError: hidden words")
        output = EngineOutput(request_id=request.request_id, token_ids=[token])
        if request.logprobs is not None:
            k = request.logprobs
            output.logprobs = [Logprob(token, float("-inf"), 1, [0, 1][:k], [float("-inf"), float("nan")][:k])]
        if token in request.stop_token_ids:
            output.finish_reason, output.stop_token = "stop", token
        elif running.done == request.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            del self._running[request.request_id]
            if "TELL" in running.prompt and not self._running:
                Path(running.prompt.split("TELL ")[1]).write_bytes(b"ended")
        self._stats.generation_tokens += 1
        return output

    def reset_prefix_cache(self) -> None:
        pass

    def stats(self) -> EngineStats:
        self._stats.running = len(self._running)
        return self._stats

    def close(self) -> None:
        pass


def load(config: EngineConfig, progress: Progress) -> tuple[FakeEngine, Tokenizer, ModelInfo]:
    """`config.model` may ask for trouble: load-error, load-bug, load-forever; gate:PATH loads when something writes to PATH."""
    progress("weights", 0, 2)
    if config.model == "load-error":
        raise LoadError("model.safetensors: tensor x has shape [2], expected [3]")
    if config.model == "load-bug":
        raise ZeroDivisionError("a bug\nof two lines")
    if config.model == "load-forever":
        time.sleep(3600)
    if config.model is not None and config.model.startswith("gate:"):
        Path(config.model.removeprefix("gate:")).read_bytes()
    progress("weights", 2, 2)
    tokenizer, _ = load_text(config)
    info = ModelInfo(
        name="fake",
        architecture="Fake",
        dtype="float32",
        device="host",
        max_model_len=4096,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=list(tokenizer.eos_token_ids),
        max_num_seqs=4,
    )
    return FakeEngine(tokenizer), tokenizer, info


def load_text(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = Tokenizer.from_folder(TINY)
    return tokenizer, ChatTemplate.from_folder(TINY, tokenizer)


if __name__ == "__main__":
    # the engine process imports this module by its name, not as __main__
    from tests.serve import fake_engine

    sys.exit(run(parse(sys.argv[1:]), fake_engine.load, fake_engine.load_text))
