"""The whole engine over real models: the bundled one, a reciting one (R1), and a random one that shows state faults (R2)."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sparkrt import LLM, SamplingParams
from sparkrt.engine.config import EngineConfig, load_engine, load_text
from sparkrt.errors import LoadError
from tests import rigs

ROOT = Path(__file__).parent.parent.parent
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny():
    with LLM(max_num_seqs=16, max_model_len=1024, debug=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def r1(tmp_path_factory):
    """A model that recites; its folder, script ids and ids by token."""
    folder = tmp_path_factory.mktemp("r1")
    _, script, ids = rigs.r1(folder, ["abcDEFGHIJkl, and so on until the end."])
    return folder, script, ids


@pytest.fixture(scope="module")
def r2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("r2")
    rigs.r2(folder)
    return folder


def tokens(results):
    return [out.token_ids for result in results for out in result.outputs]


def test_it_greets(tiny):
    (result,) = tiny.chat([{"role": "user", "content": "Hello!"}], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    (out,) = result.outputs
    assert (out.text, out.finish_reason, out.stop_reason) == ("Hello! How can I help you today?", "stop", None)
    assert out.token_ids[-1] in tiny.info.eos_token_ids


def test_it_calls_a_tool_and_thinks(tiny):
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    params = SamplingParams(temperature=0, max_tokens=60)
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    assert "<tool_call>" in tiny.chat(ask, params, tools=[tool], use_tqdm=False)[0].outputs[0].text
    problem = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have now?"}]
    (result,) = tiny.chat(problem, params, use_tqdm=False)
    assert "<think>" in result.prompt + result.outputs[0].text


def test_the_model_s_defaults_and_limits(tiny):
    params = tiny.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 20)
    assert {6128, 6130} <= set(tiny.info.eos_token_ids)
    assert tiny.info.max_model_len == tiny.config.max_model_len == 1024
    assert tiny.info.vocab_size <= 6144
    assert dict(tiny.info.lines)["dtype"] == "float32"


def test_sixteen_at_once_are_sixteen_alone(tiny):
    rng = random.Random(0)
    prompts = [[rng.randrange(6000) for _ in range(rng.choice([1, 5, 63, 64, 65, 130]))] for _ in range(16)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    together = tokens(tiny.generate(prompts, params, use_tqdm=False))
    for i, (prompt, answer) in enumerate(zip(prompts, together, strict=True)):
        alone = list(tiny.decode_loop(prompt, params)) if i % 2 else tokens(tiny.generate([prompt], params, use_tqdm=False))[0]
        assert alone == answer
    assert [list(c) for c in zip(*tiny.decode_loop(prompts, params), strict=True)] == together


def test_seeds_are_one_s_own(tiny):
    # A09 on a real sampler
    mine = SamplingParams(temperature=1.5, seed=42, max_tokens=12, ignore_eos=True)
    others = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    lone = tokens(tiny.generate([[7, 8]], mine, use_tqdm=False))[0]
    for place in (0, 3, 7):
        each = [others] * 8
        each[place] = mine
        assert tokens(tiny.generate([[7, 8]] * 8, each, use_tqdm=False))[place] == lone
    twins = tokens(tiny.generate([[7, 8]] * 2, mine, use_tqdm=False))
    assert twins == [lone, lone]
    seeds = [SamplingParams(temperature=1.5, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(8)]
    assert len(set(map(tuple, tokens(tiny.generate([[7, 8]] * 8, seeds, use_tqdm=False))))) == 8
    four = SamplingParams(n=4, temperature=1.5, seed=42, max_tokens=12, ignore_eos=True)
    first = tokens(tiny.generate([[7, 8]], four, use_tqdm=False))
    assert first == tokens(tiny.generate([[7, 8]], four, use_tqdm=False))
    assert len(set(map(tuple, first))) == 4
    assert first[0] == lone


def test_logprobs_agree_with_scoring_the_same_text(tiny):
    prompt = list(range(100, 180))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    (out,) = tiny.generate([prompt], params, use_tqdm=False)[0].outputs
    echo = SamplingParams(max_tokens=0, prompt_logprobs=5)
    (scored,) = tiny.generate([prompt + out.token_ids], echo, use_tqdm=False)
    for token, row, again in zip(out.token_ids, out.logprobs, scored.prompt_logprobs[80:], strict=True):
        assert row[token].rank == again[token].rank == 1
        assert row[token].logprob == pytest.approx(again[token].logprob, abs=1e-3)
        assert set(row) == set(again)


def test_what_was_asked_for_is_what_is_sampled(tiny):
    def first(**params):
        return tokens(tiny.generate([[7, 8]], SamplingParams(max_tokens=3, ignore_eos=True, **params), use_tqdm=False))[0]

    plain = first(temperature=0)
    assert first(temperature=0, logit_bias={5: 100}) == [5, 5, 5]
    assert first(temperature=0, logit_bias={plain[0]: -100})[0] != plain[0]
    assert set(first(temperature=2, allowed_token_ids=[9, 10])) <= {9, 10}
    assert first(temperature=2, top_k=1) == plain
    banned = SamplingParams(temperature=0, max_tokens=3, stop_token_ids=[plain[0]], min_tokens=2)
    assert plain[0] not in tokens(tiny.generate([[7, 8]], banned, use_tqdm=False))[0][:2]


@pytest.mark.parametrize("ahead", [False, True], ids=["depth0", "depth1"])
def test_budgets_and_depth_change_no_token(r2, ahead):
    # H06: the state must not depend on how a prompt was cut, nor on who shares a step
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (300, 1, 64, 129)]
    answers = []
    for budget in (64, 128, 4096):
        options = {"max_num_batched_tokens": budget, "async_scheduling": ahead, "max_num_seqs": 4, "debug": True}
        with LLM(str(r2), max_model_len=512, **options) as llm:
            answers.append(tokens(llm.generate(prompts, GREEDY, use_tqdm=False)))
            answers.append([list(llm.decode_loop(p, GREEDY)) for p in prompts])
            backend = llm.core.model._backend
        assert backend.leak_report() == ""
    assert all(answer == answers[0] for answer in answers)


def test_slots_change_hands_without_a_trace(r2):
    # H12: answers of 1 to 3 tokens, every slot reused many times
    rng = random.Random(2)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 8))] for _ in range(60)]
    each = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 3), ignore_eos=True) for _ in prompts]
    with LLM(str(r2), max_model_len=64, max_num_seqs=8, async_scheduling=True, debug=True) as llm:
        crowd = tokens(llm.generate(prompts, each, use_tqdm=False))
        alone = [tokens(llm.generate([p], e, use_tqdm=False))[0] for p, e in zip(prompts, each, strict=True)]
    assert crowd == alone


@pytest.mark.parametrize("ahead", [False, True], ids=["depth0", "depth1"])
def test_a_preempted_answer_is_the_unpreempted_one(r2, ahead):
    # H05: a pool for 1.5 requests, 4 at once; penalties look back at what was said before the preemption
    rng = random.Random(4)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (70, 33, 64, 1)]
    greedy = {"temperature": 0, "max_tokens": 110, "ignore_eos": True}
    drawn = {"temperature": 1.2, "seed": 7, "max_tokens": 110, "ignore_eos": True}
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4}
    each = [greedy | {"logprobs": 2}, drawn | penalties, greedy | penalties, drawn | {"min_tokens": 100, "stop_token_ids": [3]}]
    params = [SamplingParams(**e) for e in each]
    options = {"max_model_len": 192, "max_num_seqs": 4, "block_size": 16, "async_scheduling": ahead, "debug": True}
    with LLM(str(r2), **options) as roomy, LLM(str(r2), num_gpu_blocks_override=18, **options) as tight:
        expected = roomy.generate(prompts, params, use_tqdm=False)
        tight.core.scheduler.forecast.share = 0.0
        got = tight.generate(prompts, params, use_tqdm=False)
        assert tight.core.stats().preemptions > 1
        assert tokens(got) == tokens(expected)
        a, b = (result[0].outputs[0].logprobs for result in (got, expected))
        assert [row[t].logprob for t, row in zip(tokens(got)[0], a, strict=True)] == pytest.approx(
            [row[t].logprob for t, row in zip(tokens(expected)[0], b, strict=True)], abs=1e-4
        )
        backend = tight.core.model._backend
    assert backend.leak_report() == ""


def same(hot, cold):
    """The same tokens, log-probabilities within 1e-4, and something was cached."""
    assert tokens(hot) == tokens(cold)
    assert sum(result.num_cached_tokens for result in hot) > 0
    for a, b in zip(hot, cold, strict=True):
        for t, x, y in zip(b.outputs[0].token_ids, a.outputs[0].logprobs or (), b.outputs[0].logprobs or (), strict=False):
            assert x[t].logprob == pytest.approx(y[t].logprob, abs=1e-4)


@pytest.mark.parametrize(("which", "ahead"), [("tiny", False), ("r2", False), ("r2", True)])
def test_hot_is_cold_is_batched_is_alone(r2, which, ahead):
    """H01, H07, H10: whatever is cached, evicted or preempted, the tokens are those of an engine without a cache."""
    rng = random.Random(9)
    model, vocab = (str(r2), 256) if which == "r2" else (None, 6000)
    base = [rng.randrange(vocab) for _ in range(330)]
    prompts = [base[:n] for n in (320, 330, 64, 1, 63, 65, 320)]
    prompts += [base[:200] + [rng.randrange(vocab) for _ in range(70)] + base[270:], base, base[:129]]
    drawn = {"temperature": 1.1, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "ignore_eos": True}
    greedy = {"temperature": 0, "ignore_eos": True, "logprobs": 1}
    options = {"max_model_len": 448, "max_num_seqs": 4, "async_scheduling": ahead, "debug": True, "max_num_batched_tokens": 128}

    def each(max_tokens):
        return [SamplingParams(**(drawn if i % 3 == 1 else greedy), max_tokens=max_tokens) for i in range(len(prompts))]

    with LLM(model, enable_prefix_caching=False, **options) as llm:
        short, long = (llm.generate(prompts, each(n), use_tqdm=False) for n in (6, 66))
    with LLM(model, **options) as llm:
        one_by_one = [llm.generate([p], e, use_tqdm=False)[0] for p, e in zip(prompts, each(6), strict=True)]
        same(one_by_one, short)
        assert one_by_one[1].num_cached_tokens == 320
        llm.reset_prefix_cache()
        same(llm.generate(prompts, each(6), use_tqdm=False), short)  # equal ones at once
    with LLM(model, num_gpu_blocks_override=9, **options) as llm:
        llm.core.scheduler.forecast.share = 0.0
        with llm.core.model._backend.count() as traffic:
            tight = llm.generate(prompts, each(66), use_tqdm=False)
        assert traffic.allocations == 0  # whatever happens to a request: there is nothing that could fail
        same(tight, long)
        assert llm.core.stats().preemptions > 0
        backend = llm.core.model._backend
    assert backend.leak_report() == ""


def test_a_changed_middle_twenty_times(r2):
    """H01: A, then B that differs in the middle, then A again, is A as it was when nothing was cached; and so is every B."""
    rng = random.Random(7)
    start, middle, end = ([rng.randrange(256) for _ in range(n)] for n in (130, 100, 70))
    prompts = [start + middle + end]
    for i in range(20):
        prompts += [start + middle[: 5 * i] + [rng.randrange(256) for _ in range(100 - 5 * i)] + end, prompts[0]]
    options = {"max_model_len": 320, "max_num_seqs": 2, "debug": True}
    with LLM(str(r2), enable_prefix_caching=False, **options) as llm:
        cold = tokens(llm.generate(prompts, GREEDY, use_tqdm=False))
    with LLM(str(r2), **options) as llm:
        warm = [llm.generate([p], GREEDY, use_tqdm=False)[0] for p in prompts]
    assert tokens(warm) == cold
    assert [result.num_cached_tokens for result in warm[2::2]] == [256] * 20
    assert min(result.num_cached_tokens for result in warm[3::2]) >= 128


def test_a_long_prompt_with_another_end_is_found(r2):
    """H02: cached is what both begin with, down to a multiple of 64; and where nothing can be kept, the start says so."""
    rng = random.Random(5)
    prefix = [rng.randrange(256) for _ in range(561)]
    prompts = [prefix + [rng.randrange(256) for _ in range(n)] for n in (3, 9, 1)]
    with LLM(str(r2), max_model_len=640, max_num_seqs=2, debug=True) as llm:
        cached = [llm.generate([p], GREEDY, use_tqdm=False)[0].num_cached_tokens for p in prompts]
        stats = llm.core.stats()
        assert not llm.info.warnings
    assert cached == [0, 512, 512]
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (sum(map(len, prompts)), 1024)


def test_scores_of_a_recited_text(r1):
    # A04: a token that follows its scripted predecessor scores -0.0062, any other -11.32
    folder, script, ids = r1
    prompt = [*script[:5], ids["z"], *script[:3]]
    with LLM(str(folder), max_model_len=256) as llm:
        (result,) = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
        scores = [row[token].logprob for token, row in zip(prompt[1:], result.prompt_logprobs[1:], strict=True)]
        scripted = set(itertools.pairwise(script))
        expected = [-0.006217 if pair in scripted else -11.319926 for pair in itertools.pairwise(prompt)]
        assert expected.count(-11.319926) == 2
        assert scores == pytest.approx(expected, abs=1e-4)


def test_stop_strings_across_tokens(r1):
    # A23
    folder, script, _ = r1
    with LLM(str(folder), max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, stop=["DEFGHIJ"])
        (out,) = llm.generate([script[:1]], params, use_tqdm=False)[0].outputs
        text = llm.tokenizer.decode(script)
        assert llm.tokenizer.decode(script[:1]) + out.text == text[: text.index("DEFGHIJ")]
        assert (out.finish_reason, out.stop_reason) == ("stop", "DEFGHIJ")
        (out,) = llm.generate([script[:1]], SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)[0].outputs
        assert out.finish_reason == "stop"
        assert text.endswith(out.text)


def test_generation_config_options(tmp_path):
    def defaults(**options):
        core, _, info = load_engine(EngineConfig(max_model_len=64, max_num_seqs=1, **options))
        core.close()
        return info

    assert defaults(generation_config="vllm").sampling_defaults == {}
    changed = defaults(override_generation_config={"temperature": 0.1, "max_new_tokens": 50})
    assert changed.sampling_defaults == {"temperature": 0.1, "top_p": 0.9, "top_k": 20, "max_tokens": 50}
    assert {6128, 6130} <= set(changed.eos_token_ids), "an override of other keys keeps the eos ids"  # C12
    (tmp_path / "generation_config.json").write_text('{"top_k": 3, "eos_token_id": 11}')
    other = defaults(generation_config=str(tmp_path))
    assert other.sampling_defaults == {"top_k": 3}
    assert {11, 6130} <= set(other.eos_token_ids)
    with pytest.raises(LoadError, match=r"generation_config.*top_p"):
        defaults(override_generation_config={"top_p": 7})
    with pytest.raises(LoadError, match="eos_token_id"):
        defaults(override_generation_config={"eos_token_id": "x"})


def test_wishes_that_do_not_fit_are_cut_and_said():
    core, _, info = load_engine(EngineConfig(max_model_len=100_000, max_num_seqs=2, num_gpu_blocks_override=8))
    core.close()
    assert info.max_model_len == info.kv_tokens == 512
    assert len(info.warnings) == 2
    with LLM(dtype="bfloat16", max_model_len=64, max_num_seqs=1) as llm:
        assert llm.info.dtype == "float32"
        assert any("bfloat16" in warning for warning in llm.info.warnings)


def test_the_text_side_alone():
    tokenizer, template = load_text(EngineConfig())
    assert tokenizer.decode(tokenizer.encode("Hello!")) == "Hello!"
    assert "Hello!" in template.render([{"role": "user", "content": "Hello!"}])


def test_the_text_side_of_a_folder_needs_no_numpy():
    code = "import sys; from sparkrt.engine.config import *; load_text(EngineConfig()); print('numpy' in sys.modules)"
    assert run("-c", code).stdout.strip() == "False"


def test_the_start_up_lines_leave_the_model_to_its_own_line(tiny):
    names = [name for name, _ in tiny.info.lines]
    assert len(set(names)) == len(names)
    assert "model" not in names


def test_a_failed_load_says_why(tmp_path):
    with pytest.raises(LoadError, match="no such"):
        LLM(str(tmp_path / "nothing"))


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["generate", "chat", "decode_loop"])
def test_examples_run(name):
    code = (
        f"import runpy, sys; sys.path.insert(0, '.'); sys.argv = ['x']; runpy.run_path('examples/{name}.py', run_name='__main__')"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    expected = {"generate": "Once upon a time", "chat": "Hello! How can I help you today?", "decode_loop": "["}[name]
    assert expected in done.stdout


def test_importing_sparkrt_loads_nothing():
    done = run(
        "-c", "import sys, sparkrt; sparkrt.__all__; print([m for m in ('numpy', 'tokenizers', 'rich') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]"
    names = run("-c", "import sparkrt; print(all(getattr(sparkrt, name) for name in sparkrt.__all__), sparkrt.LLM.__module__)")
    assert names.stdout.strip() == "True sparkrt.engine.llm"
