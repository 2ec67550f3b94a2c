"""What the scheduler plans with: jobs, slices of their tokens, steps, and what there is to share."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from sparkrt.cache.prefix import Lease, Match
from sparkrt.cache.spill import Hold
from sparkrt.engine.messages import EngineOutput, EngineRequest, Logprob
from sparkrt.model.batch import SamplerParams
from sparkrt.model.sequence import SequenceState
from sparkrt.text.guide import Guide

CHUNK = 64  # prompt slices end on absolute multiples of it, whatever the budget: the same cuts give the same bits


@dataclass(slots=True, eq=False)
class Job:
    """One request: how far it is, and what it owns. Counts are tokens.

    Its prompt is computed first, up to `target`; after a preemption the answer so far is part of what has to be computed again.
    """

    message: EngineRequest
    outbox: list[EngineOutput]  # for its news; jobs that share one, share steps
    order: tuple[int, int] = (0, 0)  # priority and arrival: lower goes first
    arrived: int = 0  # how many steps with prompts there had been
    blocks: int = 0  # in its table
    reserved: int = 0  # blocks counted on for it: what it will probably need
    room: int = 0  # of `generated`, when it ends or needs another block
    prefilled: int = 0  # tokens planned, of `target`
    generated: int = 0  # sampled tokens planned
    emitted: int = 0  # tokens read and told: lags `generated` by the steps in flight
    counted: int = 0  # tokens of the prompt that are in the statistics
    step: int = 0  # the last one that carries it: its slot and blocks are in use until that is read
    finished: bool = False
    preempted: bool = False  # has to let go of its slot and blocks, and waits again when it has
    immune: int = 0  # it is not chosen again before this many tokens are generated
    served: int = -1  # the last step that gave it a fair share of prefill
    since: float = 0.0  # when it came, s
    queued: float | None = None  # how long it waited until it began
    deadline: float = float("inf")
    guide: Guide | None = None  # decides, token by token, what may come next
    params: SamplerParams | None = None  # from its first admission on
    match: Match | None = None  # what it found in the prefix cache,
    lease: Lease | None = None  # what it uses of it,
    cached: int = 0  # how much of its tokens is in there,
    skipped: int | None = None  # and how much of it was when it began
    fetch: Hold | None = None  # what it waits for that is read from disk, or waits for room with,
    loading: int | None = None  # the ticket of what is brought back to its blocks and slot: it cannot run before,
    swap: Hold | None = None  # and its own state, kept when it was preempted
    leader: tuple[Job, int] | None = None  # who is computing that many of its tokens: it waits for that
    seq: SequenceState | None = None  # while it has a slot
    request_id: str = field(init=False)
    root: int = field(init=False)  # of the prefix cache: one for each salt, the tokens of which nobody else finds
    ids: np.ndarray = field(init=False)  # int32: its prompt, and what of its answer has to be computed again
    answer: list[int] = field(default_factory=list)
    points: set[int] = field(default_factory=set)  # positions in `ids` where the state should be kept
    prompt: int = field(init=False)
    target: int = field(init=False)
    goal: int = field(init=False)  # others may wait for it to be this far
    max_tokens: int = field(init=False)
    min_tokens: int = field(init=False)
    scored: bool = field(init=False)  # every prompt row needs logits
    stop_ids: frozenset[int] = field(init=False)
    prompt_logprobs: list[Logprob | None] = field(default_factory=lambda: [None])  # nothing precedes the first token

    def __post_init__(self) -> None:
        m = self.message
        self.request_id, self.ids = m.request_id, np.array(m.prompt_ids, np.int32)
        digest = b"" if m.cache_salt is None else blake2b(m.cache_salt.encode(errors="surrogatepass"), digest_size=16).digest()
        self.root = int.from_bytes(digest, "little")
        self.prompt = self.target = self.goal = len(self.ids)
        self.max_tokens, self.min_tokens = m.max_tokens, m.min_tokens
        self.scored, self.stop_ids = m.prompt_logprobs is not None, frozenset(m.stop_token_ids)

    @property
    def life(self) -> int:
        """Tokens that it may ever have."""
        return self.prompt + self.max_tokens

    @property
    def hangs(self) -> bool:
        """Whether its last token has to be read before the next one is sampled."""
        return self.guide is not None and self.emitted < self.generated and self.guide.depends(self.generated)

    @property
    def computed(self) -> int:
        """Tokens whose work is lost when it is preempted."""
        return self.prefilled + max(self.generated - (self.target - self.prompt) - 1, 0)

    @property
    def left(self) -> int:
        """Prompt tokens to compute until it, or somebody who waits for it, can go on."""
        return (self.goal if self.goal > self.prefilled else self.target) - self.prefilled

    def restart(self) -> None:
        """Nothing of it is computed, or no more: from here it begins with all its tokens so far."""
        if self.emitted or self.scored:
            self.scored = self.scored and not self.emitted
            self.prompt_logprobs = self.prompt_logprobs if self.emitted else [None]
            self.ids = np.array(self.message.prompt_ids + self.answer, np.int32)
            self.target = len(self.ids)
        self.goal = self.target
        self.prefilled, self.generated, self.preempted = 0, self.emitted, False


class Hit(NamedTuple):
    """What a waiting job has in the prefix cache. `wait`: another is computing what it needs."""

    pages: int = 0
    idle: int = 0  # of these pages, used by nobody else: free blocks until it takes them
    resume: int = 0  # tokens that need not be computed
    wait: bool = False


class Slice(NamedTuple):
    """Tokens [start, stop) of what a job has to compute first. `sample`: the last row yields a token of the answer."""

    job: Job
    start: int
    stop: int
    sample: bool


@dataclass(slots=True)
class Plan:
    """One step: jobs that decode, slices of prompts."""

    decode: list[Job] = field(default_factory=list)  # the same list as in the last step, while nobody joins or leaves
    prefill: list[Slice] = field(default_factory=list)
    step: int = 0  # its number, once it is launched

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def jobs(self) -> list[Job]:
        return self.decode + [part.job for part in self.prefill]

    @property
    def rows(self) -> list[Job]:
        """Who gets a token, in order."""
        return self.decode + [part.job for part in self.prefill if part.sample]


@dataclass(frozen=True, slots=True)
class Limits:
    """What there is: state slots, KV blocks of `block_size` tokens, tokens a step, prompt rows with logits a step."""

    slots: int
    blocks: int
    block_size: int
    budget: int
    scored_rows: int

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
