"""`SamplingParams`: the field's names and defaults, checked once, errors naming the parameter; and the requests they become."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from sparkrt.engine.messages import EngineRequest, ModelInfo
from sparkrt.errors import RequestError
from sparkrt.text.grammar import body_of, grammar_of

MAX_LOGPROBS = 20
_MIN_TEMPERATURE = 1e-5  # below it a draw is the argmax anyway, and logits / temperature would overflow float32
_MAX_STOPS, _MAX_STOP_LENGTH = 32, 1024  # strings, characters
_MAX_LIST = 1024  # of stop_token_ids, logit_bias
_MAX_ALLOWED = 2**20  # of allowed_token_ids: more than there are in any vocabulary
MAX_INT = 2**31 - 1


def _within(low: float, high: float, default: Any = None) -> Any:
    """A field for numbers from `low` to `high`: integers, if the bounds are."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(slots=True)
class SamplingParams:
    """How to generate. None equals absent for every field, as clients send it.

    `seed=None` (or -1) draws one; `max_tokens=None` means the rest of the context. `logprobs=k` returns the chosen token's
    log-probability and the k best. RequestError names a parameter that is out of range or of the wrong type (a bool is no int).
    """

    n: int = _within(1, 128, default=1)
    temperature: float = _within(0.0, 100.0, default=1.0)
    top_p: float = _within(0.0, 1.0, default=1.0)
    top_k: int = _within(-1, MAX_INT, default=0)
    min_p: float = _within(0.0, 1.0, default=0.0)
    repetition_penalty: float = _within(0.01, 100.0, default=1.0)
    presence_penalty: float = _within(-2.0, 2.0, default=0.0)
    frequency_penalty: float = _within(-2.0, 2.0, default=0.0)
    seed: int | None = _within(-(2**63), 2**64 - 1)
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = _within(0, MAX_INT, default=16)  # most tokens of an answer; None: the rest of the context
    min_tokens: int = _within(0, MAX_INT, default=0)
    logprobs: int | None = _within(0, MAX_LOGPROBS)
    prompt_logprobs: int | None = _within(0, MAX_LOGPROBS)
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    thinking_token_budget: int | None = _within(-1, MAX_INT)  # tokens of thinking after which it is closed; -1 means None
    structured_outputs: dict[str, Any] | None = None  # one of json (a schema), json_object, regex, choice, grammar
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: token ids only, no text

    def __post_init__(self) -> None:
        for f in fields(self):
            if (value := getattr(self, f.name)) is None and f.name != "max_tokens":
                value = f.default_factory() if callable(f.default_factory) else f.default
            if value is not None and "range" in f.metadata:
                value = _number(f.name, value, *f.metadata["range"])
            if f.type == "bool" and not isinstance(value, bool):
                raise _bad(f.name, f"must be true or false, got {_shown(value)}")
            setattr(self, f.name, value)
        self.temperature = 0.0 if self.temperature < _MIN_TEMPERATURE else self.temperature
        self.top_k = max(self.top_k, 0)
        self.seed = None if self.seed == -1 else self.seed
        self.thinking_token_budget = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        if self.top_p == 0.0:
            raise _bad("top_p", "must be greater than 0 and at most 1, got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"must not exceed max_tokens {self.max_tokens}, got {self.min_tokens}")
        self.stop = _stop_strings(self.stop)
        if self.stop and not self.detokenize:
            raise _bad("stop", "needs detokenize=True")
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids, _MAX_LIST)
        self.logit_bias = _bias(self.logit_bias)
        self.structured_outputs = self.structured_outputs or None
        if self.structured_outputs is not None:
            body_of(self.structured_outputs, "structured_outputs")
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids, _MAX_ALLOWED)
            if not self.allowed_token_ids:
                raise _bad("allowed_token_ids", "must not be empty")

    @classmethod
    def from_optional(cls, defaults: Mapping[str, Any], **given: Any) -> SamplingParams:
        """The given fields, then `defaults` (a model's generation_config) for those absent or None, then our own defaults."""
        return cls(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


def to_requests(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    info: ModelInfo,
    request_id: str,
    grammar: tuple[str, str] | None = None,
    priority: int | None = None,
    thinks: bool | None = False,
    cache_salt: str | None = None,
) -> list[EngineRequest]:
    """`params.n` engine requests for one prompt, in index order, every default resolved against the model.

    `grammar` (see `EngineRequest`) replaces that of `params.structured_outputs`. `thinks`: whether an answer to this prompt does,
    see `ReasoningFormat.thinks`.
    `max_tokens` is capped at what the context has left. RequestError: no prompt, no room for a token, ids out of vocabulary.
    """
    ids, context, vocab = check_prompt_ids(prompt_ids, info.vocab_size), info.max_model_len, info.vocab_size
    if params.max_tokens is not None and params.max_tokens > context:
        raise _bad("max_tokens", f"must be at most {context}, the context length, got {params.max_tokens}")
    room = context - len(ids)
    if room < (params.max_tokens != 0):
        text = f"The model's context length is {context} tokens and the prompt has {len(ids)}: no room to generate."
        raise RequestError(text, param="prompt", code="context_length_exceeded")
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        if (largest := max(getattr(params, name) or (), default=0)) >= vocab:
            raise RequestError(f"{name}: token id {largest} is out of vocabulary (0 to {vocab - 1})", param=name)
    stops = list(dict.fromkeys([*params.stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids)]))
    shared: dict[str, Any] = {name: getattr(params, name) for name in _PASSED_ON}
    if grammar is None and params.structured_outputs is not None:
        body = body_of(params.structured_outputs, "structured_outputs")
        grammar = None if body is None else (grammar_of([body]), "structured_outputs")
    if grammar is not None and params.allowed_token_ids is not None:
        raise RequestError(f"{grammar[1]} and allowed_token_ids exclude each other", param=grammar[1])
    shared |= {"grammar": grammar, "prompt_ids": ids, "max_tokens": max_tokens, "min_tokens": min(params.min_tokens, max_tokens)}
    shared |= {"top_k": min(params.top_k, vocab), "stop_token_ids": stops}
    if params.thinking_token_budget is not None and thinks is not False:
        shared["thinking"] = params.thinking_token_budget, thinks
    shared["priority"] = 0 if priority is None else _number("priority", priority, -MAX_INT, MAX_INT)
    if cache_salt == "":
        raise RequestError("cache_salt must not be empty", param="cache_salt")
    shared["cache_salt"] = cache_salt
    names = [request_id] if params.n == 1 else [f"{request_id}:{index}" for index in range(params.n)]
    seeds = (None if params.seed is None else child_seed(params.seed, index) for index in range(params.n))
    return [EngineRequest(**shared | {"request_id": name, "seed": seed}) for name, seed in zip(names, seeds, strict=True)]


def child_seed(seed: int, index: int) -> int:
    """The seed of the index-th answer, mixed (splitmix64), not added: answer 1 of seed 42 must not be answer 0 of seed 43."""
    mask = 2**64 - 1
    if index == 0:
        return seed & mask
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def check_prompt_ids(ids: Collection[Any], vocab_size: int) -> list[int]:
    """`ids` as a list of ints in [0, vocab_size). Raises RequestError for an empty prompt, a wrong type or an unknown id."""
    if not len(ids):
        raise RequestError("the prompt has no tokens", param="prompt")
    if set(map(type, ids)) != {int}:  # the rest at C speed, for prompts are long
        wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, Integral)]
        if wrong:
            raise RequestError(f"token ids must be integers, got {_shown(wrong[0])}", param="prompt")
    checked = list(map(int, ids))
    if (low := min(checked)) < 0 or max(checked) >= vocab_size:
        shown = _shown(low if low < 0 else max(checked))
        raise RequestError(f"token id {shown} is out of vocabulary (0 to {vocab_size - 1})", param="prompt")
    return checked


def _bad(name: str, what: str) -> RequestError:
    return RequestError(f"{name} {what}", param=name)


def _shown(value: Any) -> str:
    """A value in a message: its repr, cut, so that a hostile one cannot fill the log."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 40 else text[:37] + "..."


def _number(name: str, value: Any, low: float, high: float) -> Any:
    """An int if `low` is one, else a float; NaN and infinity are out of every range."""
    kind: Any = Integral if isinstance(low, int) else Real
    if isinstance(value, bool) or not isinstance(value, kind):
        raise _bad(name, f"must be {'an integer' if kind is Integral else 'a number'}, got {_shown(value)}")
    if not low <= value <= high:
        raise _bad(name, f"must be between {low} and {high}, got {_shown(value)}")
    return int(value) if kind is Integral else float(value)


def _stop_strings(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops):
        raise _bad("stop", "must be a non-empty string or a list of them")
    if len(stops) > _MAX_STOPS or any(len(s) > _MAX_STOP_LENGTH for s in stops):
        raise _bad("stop", f"takes at most {_MAX_STOPS} strings of at most {_MAX_STOP_LENGTH} characters each")
    return list(stops)


def _ids(name: str, value: Any, most: int) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise _bad(name, f"must be a list of token ids, got {_shown(value)}")
    if len(value) > most:
        raise _bad(name, f"takes at most {most} ids, got {len(value)}")
    if value and {*map(type, value)} == {int} and min(value) >= 0 and max(value) <= MAX_INT:  # long ones at C speed
        return list(value)
    return [_number(name, i, 0, MAX_INT) for i in value]


def _bias(value: Any) -> dict[int, float]:
    """JSON has only string keys: "12" is the id 12, a word is an error."""
    name, bias = "logit_bias", dict[int, float]()
    if not isinstance(value, Mapping):
        raise _bad(name, f"must map token ids to numbers, got {_shown(value)}")
    if len(value) > _MAX_LIST:
        raise _bad(name, f"takes at most {_MAX_LIST} ids, got {len(value)}")
    for key, amount in value.items():
        if isinstance(key, str):
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise RequestError(f"{name}: {_shown(key)} is not a token id", param=name)
            key = int(key)
        bias[_number(name, key, 0, MAX_INT)] = _number(name, amount, -100.0, 100.0)
    return bias


_PASSED_ON = tuple(name for name in EngineRequest.__struct_fields__ if name in SamplingParams.__dataclass_fields__)
