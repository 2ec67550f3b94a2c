"""The golden files of tests/goldens: what the reference implementation answered, in NumPy arrays.

One npz per model; tools/make_goldens.py writes them, tests compare. Log-probabilities are over the tokenizer's ids alone (the
padded tail of the vocabulary is never offered), float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "goldens"
TOP = 20


@dataclass(frozen=True, slots=True)
class Golden:
    """A prompt of P tokens, its N greedy tokens (end-of-turn ignored), and what was predicted at each of P + N − 1 positions.

    Row j of `top_ids` and `top_logprobs` ([P + N − 1, TOP], best first) is the distribution of token j + 1 of prompt + tokens, so
    the last N rows are the generated ones. `request` is how the prompt came about (messages and tools, or text), if it did.
    """

    label: str
    prompt: np.ndarray  # int32 [P]
    tokens: np.ndarray  # int32 [N]
    top_ids: np.ndarray  # int32
    top_logprobs: np.ndarray  # float32
    request: dict[str, Any] = field(default_factory=dict)

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and answer, int32 [P + N]."""
        return np.concatenate([self.prompt, self.tokens])


@dataclass(frozen=True, slots=True)
class GoldenFile:
    """All goldens of a model. `digest` names the weights they were made with, `reference` the implementation and its version."""

    model: str
    digest: str
    reference: str
    goldens: tuple[Golden, ...]


def save(file: GoldenFile, folder: Path = FOLDER) -> Path:
    """Writes `<model>.npz`; ids as uint16."""
    arrays: dict[str, np.ndarray] = {}
    labels = []
    for i, golden in enumerate(file.goldens):
        labels.append({"label": golden.label, **({"request": golden.request} if golden.request else {})})
        arrays[f"{i}.prompt"], arrays[f"{i}.tokens"] = golden.prompt.astype(np.uint16), golden.tokens.astype(np.uint16)
        arrays[f"{i}.top_ids"] = golden.top_ids.astype(np.uint16)
        arrays[f"{i}.top_logprobs"] = golden.top_logprobs.astype(np.float32)
    about = {"model": file.model, "digest": file.digest, "reference": file.reference, "goldens": labels}
    arrays["about"] = np.frombuffer(json.dumps(about, ensure_ascii=False).encode(), np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file.model}.npz"
    np.savez_compressed(path, **arrays)
    return path


def load(model: str, folder: Path = FOLDER) -> GoldenFile:
    """Reads `<model>.npz`; ids come back as int32."""
    with np.load(folder / f"{model}.npz") as arrays:
        about = json.loads(arrays["about"].tobytes())
        goldens = tuple(
            Golden(
                label=entry["label"],
                prompt=arrays[f"{i}.prompt"].astype(np.int32),
                tokens=arrays[f"{i}.tokens"].astype(np.int32),
                top_ids=arrays[f"{i}.top_ids"].astype(np.int32),
                top_logprobs=arrays[f"{i}.top_logprobs"],
                request=entry.get("request", {}),
            )
            for i, entry in enumerate(about["goldens"])
        )
    return GoldenFile(about["model"], about["digest"], about["reference"], goldens)


def worst_difference(ids: np.ndarray, logprobs: np.ndarray, golden_ids: np.ndarray, golden_logprobs: np.ndarray) -> float:
    """The largest difference between two top lists [rows, TOP], rank by rank and id by id.

    An id in one list only was at the edge of the other; its rank's difference, counted anyway, bounds it.
    """
    worst = float(np.abs(np.sort(logprobs, axis=1) - np.sort(golden_logprobs, axis=1)).max(initial=0.0))
    for row in range(len(ids)):
        got = dict(zip(ids[row].tolist(), logprobs[row].tolist(), strict=True))
        expected = dict(zip(golden_ids[row].tolist(), golden_logprobs[row].tolist(), strict=True))
        worst = max([worst, *(abs(got[token] - expected[token]) for token in got.keys() & expected.keys())])
    return worst
