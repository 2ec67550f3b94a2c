"""LLM over the fake model and the real tokenizer: results, text, stop strings, order, and errors before anything runs."""

from __future__ import annotations

import pytest

import sparkrt
from sparkrt.engine import llm as llm_module
from sparkrt.engine.core import EngineCore
from sparkrt.errors import CapacityError, LoadError, RequestError, SparkrtError
from sparkrt.model.batch import SamplerParams
from sparkrt.model.checkpoint import bundled_model
from sparkrt.runtime.backend import OutOfMemory
from sparkrt.text.template import ChatTemplate
from sparkrt.text.tokenizer import Tokenizer
from tests.engine.fake_model import FakeModel, config, expected, info

LLM, SamplingParams = sparkrt.LLM, sparkrt.SamplingParams
TOKENIZER = Tokenizer.from_folder(bundled_model())
VOCAB = TOKENIZER.vocab_size
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(params=[False, True], ids=["depth0", "depth1"])
def llm(request, monkeypatch):
    model = FakeModel(slots=4, vocab=VOCAB, context=512)
    core = EngineCore(model, config(async_scheduling=request.param))
    about = info(model, eos_token_ids=list(TOKENIZER.eos_token_ids), sampling_defaults={"temperature": 0.7, "top_k": 20})
    loaded = core, TOKENIZER, ChatTemplate.from_folder(bundled_model(), TOKENIZER), about
    monkeypatch.setattr(llm_module, "load", lambda config, progress: loaded)
    with LLM() as llm:
        yield llm
        core.check_integrity()
        assert (model.free_slots, model.free_blocks) == (4, 64)


def answer(ids, max_tokens, **params):
    return expected(ids, SamplerParams(temperature=0.0, **params), max_tokens, VOCAB)


def test_every_form_of_prompt(llm):
    text = "Once upon a time"
    ids = TOKENIZER.encode(text)
    params = SamplingParams(**GREEDY)
    for prompt in (text, ids, {"prompt": text}, {"prompt_token_ids": ids}, [text], [ids], [{"prompt_token_ids": ids}]):
        (result,) = llm.generate(prompt, params, use_tqdm=False)
        assert result.prompt_token_ids == ids
        assert result.prompt == (text if text in (prompt, *prompt) or "prompt" in prompt else None)
        (out,) = result.outputs
        assert out.token_ids == answer(ids, 16)
        assert out.text == TOKENIZER.decode(out.token_ids)
        assert (out.index, out.finish_reason, out.stop_reason, out.logprobs) == (0, "length", None, None)
        assert result.finished
        assert 0 < result.metrics.first_token <= result.metrics.finished
    assert llm.generate([], params, use_tqdm=False) == []


def test_results_keep_the_order_of_prompts_and_answers(llm):
    # A08
    prompts = [[i, i + 1] for i in range(20)]
    results = llm.generate(prompts, SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert [r.prompt_token_ids for r in results] == prompts
    assert all([o.index for o in r.outputs] == [0, 1, 2] for r in results)
    assert all(o.finish_reason == "length" for r in results for o in r.outputs)
    assert len({tuple(o.token_ids) for r in results for o in r.outputs}) == 60


def test_each_prompt_may_have_its_own_parameters(llm):
    each = [SamplingParams(max_tokens=n, **GREEDY) for n in (1, 2, 3)]
    results = llm.generate([[1], [2], [3]], each, use_tqdm=False)
    assert [len(r.outputs[0].token_ids) for r in results] == [1, 2, 3]
    with pytest.raises(RequestError, match="3 prompts but 2"):
        llm.generate([[1], [2], [3]], each[:2])


def test_logprobs(llm):
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, **GREEDY)
    (result,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    (out,) = result.outputs
    assert len(out.logprobs) == 3
    for token, row in zip(out.token_ids, out.logprobs, strict=True):
        assert {token, 0, 1} == set(row)
        assert row[token].decoded_token == TOKENIZER.token_str(token)
        assert (row[token].rank, row[token].logprob) == (1, -0.5)
    assert out.cumulative_logprob == -1.5
    first, *rest = result.prompt_logprobs
    assert first is None
    assert [next(iter(row)) for row in rest] == [6, 7]


def test_a_stop_string_ends_the_answer(llm):
    full = llm.generate([[1, 2]], SamplingParams(max_tokens=40, **GREEDY), use_tqdm=False)[0].outputs[0]
    at = len(full.text) // 2
    stop = full.text[at : at + 6]
    end = full.text.index(stop)
    params = SamplingParams(max_tokens=40, stop=[stop], logprobs=0, **GREEDY)
    (out,) = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs
    assert (out.text, out.finish_reason, out.stop_reason) == (full.text[:end], "stop", stop)
    assert out.token_ids == full.token_ids[: len(out.token_ids)]
    assert len(out.logprobs) == len(out.token_ids)
    assert stop in TOKENIZER.decode(out.token_ids)
    included = SamplingParams(max_tokens=40, stop=[stop], include_stop_str_in_output=True, **GREEDY)
    assert llm.generate([[1, 2]], included, use_tqdm=False)[0].outputs[0].text == full.text[: end + len(stop)]


def test_a_stop_id_ends_the_answer(llm):
    full = answer([1, 2], 40)
    stop = full[10]
    (out,) = llm.generate([[1, 2]], SamplingParams(max_tokens=40, stop_token_ids=[stop], **GREEDY), use_tqdm=False)[0].outputs
    count = full.index(stop) + 1
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (full[:count], "stop", stop)
    assert out.text == TOKENIZER.decode(full[: count - 1])


def test_eos_is_no_stop_reason(llm):
    eos = llm.info.eos_token_ids[0]
    params = SamplingParams(temperature=0, logit_bias={}, min_tokens=0, max_tokens=400)
    llm.info.eos_token_ids.extend(answer([1, 2], 40)[5:6])
    (out,) = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs
    assert (out.finish_reason, out.stop_reason) == ("stop", None)
    assert eos in llm.info.eos_token_ids


def test_no_text_when_not_wanted(llm):
    params = SamplingParams(detokenize=False, max_tokens=3, **GREEDY)
    (out,) = llm.generate([[1]], params, use_tqdm=False)[0].outputs
    assert (out.text, len(out.token_ids)) == ("", 3)


def test_echo_scores_without_an_answer(llm):
    # A04
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=1)
    (result,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert len(result.prompt_logprobs) == 3
    assert (result.outputs[0].token_ids, result.outputs[0].finish_reason) == ([], "length")
    assert result.finished


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Hello!"}]
    (result,) = llm.chat(messages, SamplingParams(max_tokens=2, **GREEDY), use_tqdm=False)
    assert "Hello!" in result.prompt
    assert result.prompt_token_ids == TOKENIZER.encode(result.prompt, add_special_tokens=False)
    several = llm.chat([messages, [{"role": "user", "content": "Bye"}]], SamplingParams(max_tokens=2, **GREEDY), use_tqdm=False)
    assert [("Hello!" in r.prompt, "Bye" in r.prompt) for r in several] == [(True, False), (False, True)]
    with pytest.raises(RequestError, match="messages"):
        llm.chat([], use_tqdm=False)
    for name in ("messages", "tools", "chat_template"):
        with pytest.raises(RequestError, match=name) as caught:
            llm.chat(messages, chat_template_kwargs={name: []}, use_tqdm=False)
        assert caught.value.param == f"chat_template_kwargs.{name}"


def test_defaults_come_from_the_model(llm):
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (0.7, 20, 16)


def test_bad_input_runs_nothing(llm):
    good = SamplingParams(**GREEDY)
    for prompts in ([[1], []], [[1], [VOCAB]], [""], [5.5], [None], {"text": "x"}, [[True]]):
        with pytest.raises(RequestError):
            llm.generate(prompts, good, use_tqdm=False)
    assert not llm.core.has_work
    assert llm.core.stats().steps == 0


@pytest.mark.parametrize("wrong", [None, 5, (text for text in "ab")], ids=["none", "number", "generator"])
def test_what_is_no_list_is_named(llm, wrong):
    calls = {
        "prompts": lambda: llm.generate(wrong),
        "messages": lambda: llm.chat(wrong),
        "prompt_ids": lambda: llm.decode_loop(wrong),
        "priority": lambda: llm.generate([[1], [2]], SamplingParams(**GREEDY), priority=wrong if wrong is not None else 5),
        "sampling_params": lambda: llm.generate([[1]], wrong if wrong is not None else {"temperature": 0}),
    }
    for name, call in calls.items():
        with pytest.raises(RequestError, match=name) as caught:
            call()
        assert caught.value.param == name
    assert not llm.core.has_work


def test_a_failure_is_raised_and_leaves_nothing_behind(llm):
    llm.core.model.fail_launch = OutOfMemory("scratch")
    with pytest.raises(SparkrtError, match="request 0 failed: OutOfMemory: scratch"):
        llm.generate([[1], [2]], SamplingParams(**GREEDY), use_tqdm=False)
    llm.core.check_integrity()
    assert llm.core.stats().running == 0
    assert llm.generate([[1]], SamplingParams(**GREEDY), use_tqdm=False)[0].outputs[0].token_ids == answer([1], 16)


def test_an_interrupt_leaves_nothing_behind(llm):
    llm.core.model.fail_launch = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], SamplingParams(**GREEDY), use_tqdm=False)
    assert llm.core.stats().running == 0
    llm.core.check_integrity()


def test_the_progress_bar_counts_prompts(llm, capsys):
    llm.generate([[1], [2], [3]], SamplingParams(**GREEDY))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
    assert "tok/s" in shown.err


def test_decode_loops(llm):
    params = SamplingParams(max_tokens=6, **GREEDY)
    assert list(llm.decode_loop([1, 2], params)) == answer([1, 2], 6)
    steps = list(llm.decode_loop([[1, 2], [3]], params))
    assert [list(column) for column in zip(*steps, strict=True)] == [answer([1, 2], 6), answer([3], 6)]
    assert list(sparkrt.DecodeLoop(llm, [1, 2], params)) == answer([1, 2], 6)
    with llm.decode_loop([9]) as loop:
        assert isinstance(next(loop), int)
    for name, value in {"n": 2, "stop": "x", "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 0}.items():
        with pytest.raises(RequestError) as caught:
            llm.decode_loop([1], SamplingParams(**{name: value}))
        assert caught.value.param == name
    with pytest.raises(RequestError):
        llm.decode_loop([])
    with pytest.raises(RequestError):
        llm.decode_loop([[1], []])


def test_open_loops_that_hold_all_room_are_no_endless_wait(llm):
    loops = [llm.decode_loop([9]) for _ in range(4)]
    with pytest.raises(CapacityError, match="close them"):
        llm.generate([[1]], SamplingParams(**GREEDY), use_tqdm=False)
    loops.pop().close()
    assert len(llm.generate([[1], [2]], SamplingParams(**GREEDY), use_tqdm=False)) == 2
    for loop in loops:
        loop.close()


def test_closed_is_closed(llm):
    llm.close()
    with pytest.raises(SparkrtError, match="closed"):
        llm.generate([[1]], use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"colour": 1}, "unknown option 'colour'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is not supported"),
        ({"quantization": "fp8"}, "quantization"),
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"block_size": 48}, "block_size"),
        ({"max_model_len": "many"}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ],
)
def test_options_are_checked_by_name(options, text):
    with pytest.raises(LoadError, match=text):
        LLM(**options)


def test_options_of_other_engines_that_ask_for_nothing_are_taken():
    given = sparkrt.EngineConfig.from_options(tensor_parallel_size=1, quantization=None, max_model_len="32k", max_num_seqs="1K")
    assert (given.max_model_len, given.max_num_seqs) == (32_000, 1024)
    assert sparkrt.EngineConfig(max_model_len=-1).max_model_len == "auto"
