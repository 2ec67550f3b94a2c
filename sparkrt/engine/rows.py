"""Between a job's message and the rows of a step: its sampler's parameters, its mask, what is scored, and what came of it."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from sparkrt.engine.job import Slice
from sparkrt.engine.messages import EngineRequest, Logprob
from sparkrt.model.batch import SamplerParams, TokenLogprobs

_SAME = tuple(name for name in EngineRequest.__struct_fields__ if name in SamplerParams.__dataclass_fields__)


def sampler_params(r: EngineRequest, seeds: Random) -> SamplerParams:
    """How its tokens are chosen. One that brings no seed draws it from `seeds`."""
    values: dict[str, Any] = {name: getattr(r, name) for name in _SAME} | {"stop_ids": tuple(r.stop_token_ids)}
    values["seed"] = seeds.getrandbits(64) if r.seed is None else r.seed
    values["logprobs"] = -1 if r.logprobs is None else r.logprobs
    values["masked"] = r.grammar is not None or r.thinking is not None
    values["allowed"] = None if r.allowed_token_ids is None else tuple(r.allowed_token_ids)
    return SamplerParams(**values, bias=(tuple(r.logit_bias), tuple(r.logit_bias.values())))


def targets(part: Slice) -> np.ndarray | None:
    """What followed each token of a slice, if that is to be scored; the prompt's last token has no follower."""
    ids = part.job.message.prompt_ids[part.start + 1 : part.stop + 1] if part.job.scored else []
    return np.array(ids, np.int32) if ids else None


def logprob(row: TokenLogprobs, alternatives: int) -> Logprob:
    top = row.top_ids[:alternatives].tolist(), row.top_logprobs[:alternatives].tolist()
    return Logprob(row.token, row.logprob, row.rank, *top)
