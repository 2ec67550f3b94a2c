"""What `LLM.generate` returns, in the shape the field's harnesses expect."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token at one position; `rank` 1 is the most likely."""

    logprob: float  # natural logarithm, of the model's own distribution: before temperature and penalties
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `token_ids` include the stop token that ended it, `text` does not (unless asked for).

    `finish_reason` ∈ stop | length | abort; `stop_reason`: the stop string or id, None for eos. `logprobs` by position and id.
    """

    index: int  # 0 to n - 1
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # the sum over `token_ids`, if log-probabilities were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # a row for each of `token_ids`
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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # a row for each of `prompt_token_ids`
    outputs: list[CompletionOutput] = field(default_factory=list)  # n of them
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)  # first_token and finished, in seconds since the call
    num_cached_tokens: int = 0  # of the prompt, that the prefix cache spared
