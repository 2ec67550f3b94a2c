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
    """Beside a row under a grammar, others take as many steps as alone and say the same; nor does that row lose any."""
    plain, steps = params(max_tokens=40, ignore_eos=True), llm.core.stats().steps
    alone = texts(llm, plain)
    needed, steps = llm.core.stats().steps - steps, llm.core.stats().steps
    beside = texts(llm, plain, params(structured_outputs={"regex": "[a-z]{10}"}), plain)
    assert [beside[0], beside[2]] == alone * 2
    assert len(beside[1]) == 10
    assert llm.core.stats().steps - steps == needed
    steps = llm.core.stats().steps
    texts(llm, params(max_tokens=1), params(structured_outputs={"regex": "[a-z]{30}"}, max_tokens=30))
    under = llm.core.stats().steps - steps
    assert under <= 30 + llm.config.async_scheduling


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


WORD_PROBLEM = [{"role": "user", "content": "How many apples are left if I eat 2 of 5?"}]


def test_thinking_within_a_budget(llm: LLM) -> None:
    """The answer is the same up to there, then the tag is closed and it goes on."""

    def think(budget: int | None, **more: Any) -> list[tuple[list[int], str]]:
        asked = params(thinking_token_budget=budget, max_tokens=60, **more)
        found = llm.chat([WORD_PROBLEM], asked, use_tqdm=False)[0].outputs
        return [(output.token_ids, output.text) for output in found]

    [(free, text)] = think(None)
    whole = len(llm.tokenizer.encode(text.split("</think>")[0], False))
    closing = llm.tokenizer.encode("\n</think>", False)
    for budget in (1, 9):
        [(ids, text)] = think(budget)
        assert ids[:budget] == free[:budget]
        assert ids[budget : budget + len(closing)] == closing
        assert text.count("</think>") == 1
        assert text.split("</think>")[1].strip()
    assert think(whole + 1) == think(None)
    for ids, text in think(5, n=3, temperature=1.0, seed=3, logprobs=1):
        assert "<think>" not in text or ids[5 : 5 + len(closing)] == closing
    loop = llm.decode_loop(llm.tokenizer.encode("<think>\n"), params(thinking_token_budget=3, max_tokens=12))
    assert list(loop)[3 : 3 + len(closing)] == closing


def test_a_preempted_answer_goes_on_under_its_budget() -> None:
    prompts = [f"{i} apples and then\n<think>\n" for i in range(3)]
    asked = [params(thinking_token_budget=40 + i, temperature=1.0, seed=i, max_tokens=110, ignore_eos=True) for i in range(3)]
    options: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 192, "block_size": 16, "async_scheduling": True, "debug": True}
    with LLM(**options) as roomy, LLM(num_gpu_blocks_override=13, **options) as tight:
        tight.core.scheduler.forecast.share = 0.0
        found = [llm.generate(prompts, asked, use_tqdm=False) for llm in (tight, roomy)]
        assert [o.outputs[0].token_ids for o in found[0]] == [o.outputs[0].token_ids for o in found[1]]
        assert tight.core.stats().preemptions > 0
        closing = roomy.tokenizer.encode("\n</think>", False)
        for budget, output in enumerate(found[0], 40):
            thought = output.outputs[0].token_ids[: budget + len(closing)]
            assert thought[budget:] == closing or "</think>" in roomy.tokenizer.decode(thought[:budget])


def test_a_preempted_answer_goes_on_under_its_grammar() -> None:
    asked = [params(structured_outputs={"regex": "[0-9]{60}"}, temperature=1.0, seed=i, max_tokens=100) for i in range(3)]
    options: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 192, "block_size": 16, "async_scheduling": True, "debug": True}
    with LLM(**options) as roomy, LLM(num_gpu_blocks_override=12, **options) as tight:
        tight.core.scheduler.forecast.share = 0.0
        assert texts(tight, *asked) == texts(roomy, *asked)
        assert tight.core.stats().preemptions > 0
