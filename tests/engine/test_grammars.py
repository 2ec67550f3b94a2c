"""Answers under a grammar, in the engine: the mask is the next step's own, and nobody else waits for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sparkrt import LLM, SamplingParams
from sparkrt.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
PROMPT = "I want to book a table in"


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "ahead"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(async_scheduling=request.param, debug=True) as llm:
        yield llm


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 48, **more})


def texts(llm: LLM, *asked: SamplingParams) -> list[str]:
    return [output.outputs[0].text for output in llm.generate([PROMPT] * len(asked), list(asked), use_tqdm=False)]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_follow_the_grammar(llm: LLM, temperature: float) -> None:
    found = llm.generate(
        [PROMPT], params(structured_outputs={"json": SCHEMA}, temperature=temperature, seed=5, n=3), use_tqdm=False
    )
    for output in found[0].outputs:
        answer = json.loads(output.text)
        assert set(answer) == {"city", "people"}
        assert 1 <= answer["people"] <= 9
        assert output.finish_reason == "stop"
    assert texts(llm, params(structured_outputs={"choice": ["Rome", "Oslo"]}))[0] in ("Rome", "Oslo")
    assert texts(llm, params(structured_outputs={"regex": "[0-9]{3}"}, min_tokens=40))[0].isdigit()


def test_neighbours_do_not_wait(llm: LLM) -> None:
    """Beside a row under a grammar, others take as many steps as alone and say the same; it is the one that lags."""
    plain, steps = params(max_tokens=40, ignore_eos=True), llm.core.stats().steps
    alone = texts(llm, plain)
    needed, steps = llm.core.stats().steps - steps, llm.core.stats().steps
    beside = texts(llm, plain, params(structured_outputs={"regex": "[a-z]{10}"}), plain)
    assert [beside[0], beside[2]] == alone * 2
    assert len(beside[1]) == 10
    assert llm.core.stats().steps - steps <= needed + 2


def test_grammars_with_other_rules(llm: LLM) -> None:
    """Penalties, bias, log-probabilities and a limit act within what is allowed."""
    regex = {"regex": "[ab]{8}"}
    assert texts(llm, params(structured_outputs=regex, max_tokens=3, logprobs=2))[0].strip("ab") == ""
    b = llm.tokenizer.encode("b", False)[0]
    assert "b" in texts(llm, params(structured_outputs=regex, logit_bias={b: 100}, presence_penalty=2.0))[0]
    cut = llm.generate([PROMPT], params(structured_outputs={"json": SCHEMA}, max_tokens=2), use_tqdm=False)[0].outputs[0]
    assert cut.finish_reason == "length"


def test_what_is_no_grammar(llm: LLM) -> None:
    for asked in ({"json": {"type": "not-a-type"}}, {"regex": "["}, {"grammar": "start: nothing"}):
        with pytest.raises(RequestError, match="structured_outputs"):
            texts(llm, params(structured_outputs=asked))
    with pytest.raises(RequestError, match="exclude each other"):
        texts(llm, params(structured_outputs={"regex": "a"}, allowed_token_ids=[5]))
    llm.core.check_integrity()


def test_decode_loops(llm: LLM) -> None:
    loop = llm.decode_loop(llm.tokenizer.encode(PROMPT), params(structured_outputs={"regex": "[0-9]{5}"}, max_tokens=9))
    assert llm.tokenizer.decode(list(loop)).isdigit()


def test_a_preempted_answer_goes_on_under_its_grammar() -> None:
    asked = [params(structured_outputs={"regex": "[0-9]{60}"}, temperature=1.0, seed=i, max_tokens=100) for i in range(3)]
    options: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 192, "block_size": 16, "async_scheduling": True, "debug": True}
    with LLM(**options) as roomy, LLM(num_gpu_blocks_override=12, **options) as tight:
        tight.core.scheduler.forecast.share = 0.0
        assert texts(tight, *asked) == texts(roomy, *asked)
        assert tight.core.stats().preemptions > 0
