"""The model against the reference implementation: sparkrt-tiny and a miniature of every family, float32.

Teacher-forced log-probabilities agree within 1e-3 at every position, whether computed by prefill in one piece, by prefill in
chunks beside other sequences, or token by token; greedy tokens are identical.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparkrt.engine.config import EngineConfig, load_engine, load_text
from sparkrt.engine.core import EngineCore
from sparkrt.engine.messages import EngineOutput, EngineRequest, Logprob
from tests import golden, miniatures

TINY = "sparkrt-tiny"
TOLERANCE = 1e-3
Subject = tuple[EngineCore, golden.GoldenFile]


def open_engine(name: str, folder: Path, **options: object) -> EngineCore:
    model = None if name == TINY else str(miniatures.write(name, folder / name))
    core, _, _ = load_engine(EngineConfig.from_options(model=model, dtype="float32", device="host", debug=True, **options))
    return core


@pytest.fixture(scope="module", params=[TINY, *miniatures.NAMES])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    core = open_engine(request.param, tmp_path_factory.mktemp("models"))
    yield core, golden.load(request.param)
    core.close()


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, list[EngineOutput]]:
    """All outputs of `requests`, which run together."""
    outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            outputs[output.request_id].append(output)
    return outputs


def greedy(core: EngineCore, goldens: tuple[golden.Golden, ...], scored: bool = True) -> dict[str, list[EngineOutput]]:
    top = golden.TOP if scored else None
    return run(
        core,
        [
            EngineRequest(
                request_id=g.label,
                prompt_ids=g.prompt.tolist(),
                max_tokens=len(g.tokens),
                temperature=0.0,
                logprobs=top,
                prompt_logprobs=top,
            )
            for g in goldens
        ],
    )


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def difference(rows: list[Logprob], g: golden.Golden, start: int) -> float:
    """The worst difference of top log-probabilities, `rows[0]` being the prediction at position `start` of the golden."""
    stop = start + len(rows)
    ids, values = np.array([row.top_ids for row in rows]), np.array([row.top_logprobs for row in rows])
    return golden.worst_difference(ids, values, g.top_ids[start:stop], g.top_logprobs[start:stop])


def test_goldens_are_of_these_weights() -> None:
    for name in miniatures.NAMES:
        assert golden.load(name).digest == miniatures.digest(name), f"{name}: the recipe changed, `make goldens` writes them anew"
    assets = Path(__file__).parents[2] / "sparkrt" / "assets" / TINY
    weights = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(assets.glob("*.safetensors"))))
    assert golden.load(TINY).digest == weights.hexdigest()[:16]


def test_prompts_are_rendered_and_encoded_as_by_the_reference() -> None:
    tokenizer, template = load_text(EngineConfig())
    for g in golden.load(TINY).goldens:
        if "messages" in g.request:
            assert template.render(g.request["messages"], tools=g.request.get("tools")) == g.request["text"], g.label
        assert tokenizer.encode(g.request["text"], add_special_tokens=False) == g.prompt.tolist(), g.label


def test_greedy_answers_and_their_log_probabilities(subject: Subject) -> None:
    """All prompts of a model at once: prefill of several sequences, then decode rows; each position of each is compared."""
    core, file = subject
    answers = greedy(core, file.goldens)
    for g in file.goldens:
        outputs = answers[g.label]
        assert tokens(outputs) == g.tokens.tolist(), g.label
        assert [o.finish_reason for o in outputs if o.finish_reason] == ["length"], g.label
        decoded = [row for output in outputs for row in output.logprobs or []]
        assert difference(decoded, g, len(g.prompt) - 1) < TOLERANCE, f"{g.label}: decode"
        first, *scored = outputs[0].prompt_logprobs or []
        assert first is None, "nothing precedes the first token"
        prompt = [row for row in scored if row is not None]
        assert [row.token_id for row in prompt] == g.prompt[1:].tolist()
        if prompt:
            assert difference(prompt, g, 0) < TOLERANCE, f"{g.label}: prompt"


def test_prefill_of_the_whole_sequence(subject: Subject) -> None:
    """The golden's tokens fed as a prompt: chunked prefill where the test above decoded."""
    core, file = subject
    requests = [
        EngineRequest(
            request_id=g.label, prompt_ids=g.sequence.tolist(), max_tokens=0, temperature=0.0, prompt_logprobs=golden.TOP
        )
        for g in file.goldens
    ]
    answers = run(core, requests)
    for g in file.goldens:
        rows = [row for output in answers[g.label] for row in output.prompt_logprobs or [] if row is not None]
        assert [row.token_id for row in rows] == g.sequence[1:].tolist(), g.label
        assert difference(rows, g, 0) < TOLERANCE, g.label


@pytest.mark.parametrize("budget", [64, 128])
@pytest.mark.parametrize("name", ["qwen3_next_uneven", "qwen3_5_moe", "qwen3"])
def test_token_budgets_change_nothing(name: str, budget: int, tmp_path: Path) -> None:
    core = open_engine(name, tmp_path, max_num_batched_tokens=budget, max_num_seqs=2)
    try:
        goldens = golden.load(name).goldens
        answers = greedy(core, goldens, scored=False)
        assert {g.label: tokens(answers[g.label]) for g in goldens} == {g.label: g.tokens.tolist() for g in goldens}
    finally:
        core.close()
