"""What `LLM.generate` returns, in the shape the field's harnesses expect."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token at one position; `rank` 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `token_ids` include the stop token that ended it, `text` does not (unless asked for).

    `finish_reason` ∈ stop | length | abort; `stop_reason`: the stop string or id, None for eos. `logprobs` by position and id.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds since the request was handed in."""

    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt with its answers. `prompt` is None where ids were given; `prompt_logprobs[0]` is always None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
