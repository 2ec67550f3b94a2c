"""What travels between the engine and who drives it: plain data, tokens and never text. `n` answers are n requests."""

from __future__ import annotations

import msgspec

LARGEST_STEP = 14  # log2 of the tokens of a step, as they are counted


class EngineRequest(msgspec.Struct, kw_only=True):
    """One sequence to generate, fully resolved: no field means "default" any more."""

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = []  # eos included unless ignore_eos
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    grammar: tuple[str, str] | None = None  # that the answer must follow, and the field of the request that asked for it
    thinking: tuple[int, bool | None] | None = None  # most tokens of it; whether the prompt has opened it, None: the answer may
    cache_salt: str | None = None  # its prompt is found, and finds, under the same salt only
    priority: int = 0  # lower goes first, if the scheduling policy is "priority"


class Logprob(msgspec.Struct, array_like=True, gc=False):
    token_id: int
    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of one request after a step. `finish_reason` ∈ stop | length | abort | timeout | error, set exactly once, last.

    With the first token: `cached_tokens` of the prompt, and `queued_seconds` that the request waited for a slot.

    `stop_token` is the stop id that ended it (it is the last of `token_ids`). `error` explains "timeout" and "error".
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    queued_seconds: float = 0.0
    error: str | None = None


class OffloadStats(msgspec.Struct, kw_only=True):
    """What the prefix cache has in host memory and on disk, and what moved, since the start."""

    host_bytes: int = 0
    total_host_bytes: int = 0
    disk_bytes: int = 0
    total_disk_bytes: int = 0
    hits: int = 0  # tokens of prompts that were restored
    spilled_bytes: int = 0
    restored_bytes: int = 0
    loaded_bytes: int = 0  # from disk into host memory
    swaps: int = 0  # preempted requests whose state was kept
    lost: int = 0  # pages and states that there was no room for
    corrupt_files: int = 0
    disk_failures: int = 0


class EngineStats(msgspec.Struct, kw_only=True):
    """Gauges and counters of the engine. `host_seconds` are those of `step_seconds` in which it did not wait for a result."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    free_slots: int = 0
    total_slots: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_blocks: int = 0  # of the free ones: what they hold is still of use
    state_cache_slots: int = 0  # for snapshots of recurrent state
    free_state_cache_slots: int = 0
    prefix_cache_queries: int = 0  # tokens that were looked up in the prefix cache
    prefix_cache_hits: int = 0  # of these, tokens that were not computed again
    offload: OffloadStats | None = None  # None: nothing is spilled
    preemptions: int = 0  # requests that had to give up their KV blocks and wait again
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    gap_seconds: float = 0.0  # between steps that had work to do: news told and read
    idle_seconds: float = 0.0  # with requests at hand, and nothing launched that was not read
    asleep: int = 0  # the level of its sleep
    step_tokens: int = 0  # of prompts and answers, in all steps
    steps_by_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (LARGEST_STEP + 2))  # by ⌈log2⌉, and larger ones


class ModelInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What the outside needs to know of the loaded model: names, limits, defaults."""

    name: str  # what was asked for: a folder, a file or a hub id
    architecture: str
    dtype: str
    device: str
    max_model_len: int  # tokens, prompt and answer together
    vocab_size: int  # ids that may be given or sampled; the padded rest of the embedding never is
    eos_token_ids: list[int]  # union of generation_config, config and tokenizer
    sampling_defaults: dict[str, float | int] = {}  # from generation_config: fields of SamplingParams
    max_num_seqs: int = 0
    kv_tokens: int = 0  # tokens that fit into the KV pool
    weight_bytes: int = 0
    lines: list[tuple[str, str]] = []  # (what, value): the memory plan and every resolved option, to print
    warnings: list[str] = []  # what was asked for and could not be had in full
