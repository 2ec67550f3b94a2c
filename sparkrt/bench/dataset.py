"""What is asked in a benchmark: random tokens, or prompts out of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from math import ceil, floor
from pathlib import Path
from typing import Any

from sparkrt.engine.config import EngineConfig, load_text
from sparkrt.engine.flags import BUNDLED
from sparkrt.errors import LoadError, SparkrtError
from sparkrt.text.template import ChatTemplate
from sparkrt.text.tokenizer import Tokenizer

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048  # tokens of a ShareGPT turn, of its prompt, of both: others are passed over
_Entries = list[tuple[int, Any]]  # with their place in the file


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. `prompt_len`: tokens, as far as they are known here."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """How to make `num_prompts` samples. Lengths are tokens."""

    name: str = "random"
    path: str | None = None  # of every kind but "random"
    num_prompts: int = 1000
    input_len: int = 1024  # of random prompts
    output_len: int | None = None  # None: 128 random, as in the file for sharegpt, 256 custom
    range_ratio: float = 0.0  # random lengths are within [1 - r, 1 + r] of those
    prefix_len: int = 0  # that all random prompts share, on top of `input_len`
    seed: int = 0

    def samples(self, tokenizer: Tokenizer, template: ChatTemplate | None = None, text: bool = False) -> list[Sample]:
        """SparkrtError for a file that cannot be used. `text`: no token ids; `template`: what wraps the prompts of a file."""
        rng = random.Random(self.seed)
        if self.path is None:
            return list(self._random(rng, tokenizer, text))
        entries = list(enumerate(_json(self.path, lines=self.name == "custom"), 1))
        rng.shuffle(entries)
        read = _sharegpt if self.name == "sharegpt" else _custom
        found = list(islice(read(self.path, entries, tokenizer, self.output_len), self.num_prompts))
        if not found:
            raise SparkrtError(f"{self.path}: there is no prompt of a usable length in it")
        samples = []
        for prompt, answer in islice(cycle(found), self.num_prompts):  # from the beginning again, if there are too few
            if template is not None:
                prompt = template.render([{"role": "user", "content": prompt}], None, add_generation_prompt=True)
            samples.append(Sample(prompt, len(tokenizer.encode(prompt, add_special_tokens=template is None)), answer))
        return samples

    def _random(self, rng: random.Random, tokenizer: Tokenizer, text: bool) -> Iterator[Sample]:
        words = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids and tokenizer.token_bytes(i)]

        def length(mean: int) -> int:
            return rng.randint(max(1, floor(mean * (1 - self.range_ratio))), max(1, ceil(mean * (1 + self.range_ratio))))

        shared = rng.choices(words, k=self.prefix_len)
        for _ in range(self.num_prompts):
            ids = [*shared, *rng.choices(words, k=length(self.input_len))]
            answer = length(128 if self.output_len is None else self.output_len)
            yield Sample(tokenizer.decode(ids) if text else ids, len(ids), answer)


def open_text(model: str | None, named: str | None) -> tuple[Tokenizer, ChatTemplate]:
    """The tokenizer and template of `model`, or where `named` says. LoadError if they cannot be found."""
    try:
        return load_text(EngineConfig(model=None if model == BUNDLED else model, tokenizer=named))
    except LoadError as error:
        raise LoadError(f"no tokenizer to make prompts with: {error} (--tokenizer PATH names one)") from None


def _sharegpt(path: str, entries: _Entries, tokenizer: Tokenizer, output_len: int | None) -> Iterator[tuple[str, int]]:
    """The first two turns of each conversation: a prompt, and how long its answer is."""
    for number, entry in entries:
        turns = entry.get("conversations", []) if isinstance(entry, dict) else []
        if len(turns) < 2:
            continue
        try:
            prompt, answer = turns[0]["value"], turns[1]["value"]
            tokens, said = len(tokenizer.encode(prompt)), len(tokenizer.encode(answer))
        except (KeyError, TypeError):
            raise SparkrtError(f'{path}, entry {number}: expected turns like {{"from": "human", "value": text}}') from None
        short = tokens < SHORTEST or (said < SHORTEST and output_len is None)
        said = said if output_len is None else output_len
        if not short and tokens <= LONGEST_PROMPT and tokens + said <= LONGEST:
            yield prompt, said


def _custom(path: str, entries: _Entries, tokenizer: Tokenizer, output_len: int | None) -> Iterator[tuple[str, int]]:
    for number, entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise SparkrtError(f'{path}, line {number}: expected {{"prompt": text}}, perhaps with "output_tokens"')
        answer = entry.get("output_tokens", 256) if output_len is None else output_len
        if not isinstance(answer, int) or answer < 1:
            raise SparkrtError(f"{path}, line {number}: output_tokens must be a whole number of at least 1")
        yield entry["prompt"], answer


def _json(path: str, lines: bool) -> list[Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise SparkrtError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, list):
        raise SparkrtError(f"{path}: expected a list of conversations")
    return found
