"""SamplingParams: every field, wrong types and ranges named; and what becomes of one prompt's parameters."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from sparkrt.engine.messages import ModelInfo
from sparkrt.engine.params import SamplingParams, check_prompt_ids, child_seed, to_requests
from sparkrt.errors import RequestError

NAN, INF = math.nan, math.inf
INFO = ModelInfo(
    name="m", architecture="A", dtype="float32", device="host", max_model_len=100, vocab_size=1000, eos_token_ids=[7, 8]
)

REFUSED = [
    *(("n", v) for v in (0, -1, 129, True, 1.5, "2", 10**6)),
    *(("temperature", v) for v in (-0.1, 999999, NAN, INF, -INF, "1", True, 10**400, [1])),
    *(("top_p", v) for v in (0, -1, 1.01, NAN, INF, "x")),
    *(("top_k", v) for v in (-2, 1.0, True, "5", 2**31)),
    *(("min_p", v) for v in (-0.1, 1.1, NAN)),
    *(("repetition_penalty", v) for v in (0, -1, NAN, INF, 1e30, 1e-30)),
    *(("presence_penalty", v) for v in (-2.1, 2.1, NAN, "0")),
    *(("frequency_penalty", v) for v in (-2.1, 2.1, INF, False)),
    *(("seed", v) for v in (1.0, "1", True, 2**64, -(2**63) - 1)),
    *(("max_tokens", v) for v in (-1, 1.5, True, "16", 2**31)),
    *(("min_tokens", v) for v in (-1, 17, True, 0.5)),
    *(("logprobs", v) for v in (-1, 21, True, 1.0, 10**6)),
    *(("prompt_logprobs", v) for v in (-1, 21, False)),
    *(("stop", v) for v in ("", ["a", ""], [1], 5, ["x"] * 33, ["x" * 1025], {"a": 1})),
    *(("stop_token_ids", v) for v in ("1", [-1], [True], [1.0], [2**31], [1] * 1025)),
    *(("allowed_token_ids", v) for v in ([], [-1], ["1"], 5)),
    *(("logit_bias", v) for v in ({"AI": -100}, {"-1": 1}, {-1: 1}, {1: 101}, {1: NAN}, {1: "x"}, {"²": 1}, [1], {"9" * 30: 1})),
    *(("logit_bias", v) for v in ({True: 1}, dict.fromkeys(range(1025), 1))),
    *((f, v) for f in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output") for v in (1, "true")),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda v: repr(v)[:24])
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400
    assert field in caught.value.message
    assert len(caught.value.message) < 200
    json.dumps(caught.value.message)


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 1e-9, 0.0),
        ("temperature", np.float32(0.5), 0.5),
        ("top_k", -1, 0),
        ("top_k", np.int64(5), 5),
        ("seed", -1, None),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("stop", "end", ["end"]),
        ("stop", ("a", "b"), ["a", "b"]),
        ("max_tokens", 0, 0),
        ("max_tokens", None, None),
        ("logprobs", 0, 0),
        ("logit_bias", {"12": -100, 3: 5}, {12: -100.0, 3: 5.0}),
    ],
)
def test_good_values_are_kept(field, value, kept):
    result = getattr(SamplingParams(**{field: value}), field)
    assert result == kept
    assert type(result) is type(kept)


def test_none_equals_absent():
    # A06
    names = SamplingParams.__dataclass_fields__
    nulls = SamplingParams(**{name: None for name in names if name != "max_tokens"})
    assert nulls == SamplingParams()
    assert SamplingParams.from_optional({}, **dict.fromkeys(names)) == SamplingParams()


def test_defaults_of_the_model_stand_behind_what_is_given():
    defaults = {"temperature": 0.7, "top_k": 20}
    params = SamplingParams.from_optional(defaults, temperature=None, top_k=5, n=2)
    assert (params.temperature, params.top_k, params.n, params.top_p) == (0.7, 5, 2, 1.0)


def test_no_list_is_shared():
    SamplingParams().stop.append("x")
    assert SamplingParams().stop == []


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_requests_for_n_answers():
    # A09: one seed is reproducible and not n copies
    requests = to_requests([1, 2, 3], SamplingParams(n=4, seed=42, max_tokens=5), INFO, "r")
    assert [r.request_id for r in requests] == ["r:0", "r:1", "r:2", "r:3"]
    seeds = [r.seed for r in requests]
    assert seeds[0] == 42
    assert len(set(seeds)) == 4
    assert seeds == [r.seed for r in to_requests([1, 2, 3], SamplingParams(n=4, seed=42, max_tokens=5), INFO, "s")]
    unseeded = to_requests([1], SamplingParams(n=2), INFO, "r")
    assert [r.seed for r in unseeded] == [None, None]
    assert to_requests([1], SamplingParams(), INFO, "r")[0].request_id == "r"


def test_seeds_of_children_do_not_meet_those_of_neighbours():
    seeds = [child_seed(seed, index) for seed in (-5, -1, 0, 1, 42, 43, 2**63) for index in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**64 for s in seeds)


def test_context_left():
    # A16
    def max_tokens(length, **params):
        return to_requests([1] * length, SamplingParams(**params), INFO, "r")[0].max_tokens

    assert max_tokens(10, max_tokens=None) == 90
    assert max_tokens(10) == 16
    assert max_tokens(99) == 1
    assert max_tokens(95, max_tokens=100, min_tokens=50) == 5
    assert max_tokens(100, max_tokens=0) == 0
    with pytest.raises(RequestError, match=r"100 tokens.*100") as caught:
        max_tokens(100)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(RequestError, match="at most 100") as caught:
        max_tokens(1, max_tokens=101)
    assert caught.value.param == "max_tokens"


def test_stop_ids_are_eos_and_given_ones():
    # C12
    assert to_requests([1], SamplingParams(stop_token_ids=[9, 7]), INFO, "r")[0].stop_token_ids == [9, 7, 8]
    assert to_requests([1], SamplingParams(stop_token_ids=[9], ignore_eos=True), INFO, "r")[0].stop_token_ids == [9]


@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {"191222": 5}), ("stop_token_ids", [1000]), ("allowed_token_ids", [1, 1000])]
)
def test_ids_beyond_the_vocabulary_are_refused(field, value):
    # A10
    with pytest.raises(RequestError, match="out of vocabulary") as caught:
        to_requests([1], SamplingParams(**{field: value}), INFO, "r")
    assert caught.value.param == field


@pytest.mark.parametrize("ids", [[], [1000], [-1], [[-1]], [1.5], [True], [10**19], [10**5000], ["1"], [None], [1, 2, 200000]])
def test_bad_prompts_are_refused(ids):
    # A12, A17
    with pytest.raises(RequestError) as caught:
        check_prompt_ids(ids, 1000)
    assert caught.value.param == "prompt"
    assert len(caught.value.message) < 200


def test_prompts_of_numpy_ids_are_taken():
    assert check_prompt_ids(np.array([1, 2], np.int64), 1000) == [1, 2]
