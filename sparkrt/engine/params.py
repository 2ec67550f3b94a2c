"""`SamplingParams`: the field's names and defaults, checked once, errors naming the parameter.

`to_requests` turns one prompt and its parameters into what the engine takes: n requests with nothing left to default.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from sparkrt.engine.messages import EngineRequest, ModelInfo
from sparkrt.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-5  # below it a draw is the argmax anyway, and logits / temperature would overflow float32
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024  # characters
MAX_ID_LIST = 1024  # stop_token_ids, logit_bias
MAX_TOKENS = 2**31 - 1


@dataclass(slots=True)
class SamplingParams:
    """How to generate. None equals absent for every field, as clients send it.

    `seed=None` (or -1) draws one; `max_tokens=None` means the rest of the context. `logprobs=k` returns the chosen token's
    log-probability and the k best; `prompt_logprobs=k` the same for the prompt. `stop` may be one string. Raises
    RequestError with `param` set for a value out of range or of the wrong type (a bool is not an int).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name in _DEFAULTS:
            if getattr(self, name) is None:
                setattr(self, name, _DEFAULTS[name]())
        self.n = _int("n", self.n, 1, MAX_N)
        self.temperature = _float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if self.temperature < MIN_TEMPERATURE:
            self.temperature = 0.0
        self.top_p = _float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be greater than 0 and at most 1, got 0", param="top_p")
        self.top_k = max(_int("top_k", self.top_k, -1, MAX_TOKENS), 0)
        self.min_p = _float("min_p", self.min_p, 0.0, 1.0)
        self.repetition_penalty = _float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        self.presence_penalty = _float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            seed = _int("seed", self.seed, -(2**63), 2**64 - 1)
            self.seed = None if seed == -1 else seed
        if self.max_tokens is not None:
            self.max_tokens = _int("max_tokens", self.max_tokens, 0, MAX_TOKENS)
        self.min_tokens = _int("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} must not exceed max_tokens {self.max_tokens}", param="min_tokens")
        if self.logprobs is not None:
            self.logprobs = _int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {_shown(getattr(self, name))}", param=name)

    def _check_lists(self) -> None:
        stop: Any = self.stop
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) and s for s in stop):
            raise RequestError("stop must be a non-empty string or a list of them", param="stop")
        if len(stop) > MAX_STOP_STRINGS or any(len(s) > MAX_STOP_LENGTH for s in stop):
            raise RequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters each", param="stop"
            )
        self.stop = list(stop)
        if self.stop and self.detokenize is False:
            raise RequestError("stop strings need detokenize=True", param="stop")
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids, MAX_ID_LIST)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids, None)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        self.logit_bias = _bias(self.logit_bias)

    @classmethod
    def from_optional(cls, defaults: Mapping[str, Any], **given: Any) -> SamplingParams:
        """The given fields, then `defaults` (a model's generation_config) for those absent or None, then our own defaults."""
        return cls(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


# Fields that mean their default when None arrives; those whose type has None keep it.
_DEFAULTS: dict[str, Any] = {
    f.name: f.default_factory if callable(f.default_factory) else (lambda value=f.default: value)
    for f in fields(SamplingParams)
    if f.default is not None and f.name != "max_tokens"
}


def to_requests(
    prompt_ids: Sequence[int], params: SamplingParams, info: ModelInfo, request_id: str, *, priority: int = 0
) -> list[EngineRequest]:
    """`params.n` engine requests for one prompt, in index order, every default resolved against the model.

    `max_tokens` is capped at what the context has left (the request then ends with "length"). Raises RequestError for a prompt
    that is empty, out of vocabulary or leaves no room for a token, and for ids outside the vocabulary.
    """
    ids = check_prompt_ids(prompt_ids, info.vocab_size)
    context = info.max_model_len
    if params.max_tokens is not None and params.max_tokens > context:
        raise RequestError(
            f"max_tokens must be at most {context}, the context length, got {params.max_tokens}", param="max_tokens"
        )
    room = context - len(ids)
    if room < (0 if params.max_tokens == 0 else 1):
        raise RequestError(
            f"The model's context length is {context} tokens and the prompt has {len(ids)}: no room to generate.",
            param="prompt",
            code="context_length_exceeded",
        )
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    for name, checked in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        _check_vocabulary(name, checked, info.vocab_size)
    stop_ids = dict.fromkeys(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= dict.fromkeys(info.eos_token_ids)
    return [
        EngineRequest(
            request_id=request_id if params.n == 1 else f"{request_id}:{index}",
            prompt_ids=ids,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=min(params.top_k, info.vocab_size),
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=None if params.seed is None else child_seed(params.seed, index),
            stop_token_ids=list(stop_ids),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            priority=priority,
        )
        for index in range(params.n)
    ]


def child_seed(seed: int, index: int) -> int:
    """The 64-bit seed of the index-th answer of one request: the first keeps the seed, the others are mixed from it.

    Mixed (splitmix64), not added: answer 1 of seed 42 must not be answer 0 of seed 43.
    """
    mask = 2**64 - 1
    if index == 0:
        return seed & mask
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def check_prompt_ids(ids: Sequence[Any], vocab_size: int, param: str = "prompt") -> list[int]:
    """`ids` as a list of ints in [0, vocab_size). Raises RequestError for an empty prompt, a wrong type or an unknown id."""
    if not len(ids):
        raise RequestError("the prompt has no tokens", param=param)
    if all(type(i) is int for i in ids):  # the usual case, at C speed
        low, high = min(ids), max(ids)
        if low >= 0 and high < vocab_size:
            return list(ids)
        wrong = _shown(low if low < 0 else high)
        raise RequestError(f"token id {wrong} is out of vocabulary (0 to {vocab_size - 1})", param=param)
    return check_prompt_ids([_int(param, i, None, None, "token ids") for i in ids], vocab_size, param)


def _check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for i in ids:
        if not 0 <= i < vocab_size:
            raise RequestError(f"{name}: token id {_shown(i)} is out of vocabulary (0 to {vocab_size - 1})", param=name)


def _shown(value: Any) -> str:
    """A value in a message: its repr, cut, so that a hostile one cannot fill the log."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 40 else text[:37] + "..."


def _int(name: str, value: Any, low: int | None, high: int | None, what: str | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{what or name} must be an integer, got {_shown(value)}", param=name)
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise RequestError(f"{name} must be between {low} and {high}, got {_shown(value)}", param=name)
    return number


def _float(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} must be a number, got {_shown(value)}", param=name)
    try:
        number = float(value)
    except OverflowError:  # an int beyond any float
        number = math.inf
    if not low <= number <= high:  # NaN and infinity end here too
        raise RequestError(f"{name} must be between {low:g} and {high:g}, got {_shown(value)}", param=name)
    return number


def _ids(name: str, value: Any, most: int | None) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{name} must be a list of token ids, got {_shown(value)}", param=name)
    if most is not None and len(value) > most:
        raise RequestError(f"{name} takes at most {most} ids, got {len(value)}", param=name)
    return [_int(name, i, 0, MAX_TOKENS) for i in value]


def _bias(value: Any) -> dict[int, float]:
    """JSON has only string keys: "12" is the id 12, a word is an error."""
    name = "logit_bias"
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must map token ids to numbers, got {_shown(value)}", param=name)
    if len(value) > MAX_ID_LIST:
        raise RequestError(f"{name} takes at most {MAX_ID_LIST} ids, got {len(value)}", param=name)
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if isinstance(key, str):
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise RequestError(f"{name}: {_shown(key)} is not a token id", param=name)
            key = int(key)
        bias[_int(name, key, 0, MAX_TOKENS)] = _float(name, amount, -100.0, 100.0)
    return bias
