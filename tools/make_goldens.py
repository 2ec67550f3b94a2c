"""Writes tests/goldens with the reference implementation: sparkrt-tiny and a miniature of every family, float32.

Runs in an environment of its own (tools/goldens.txt): `make goldens`, or `python -m tools.make_goldens [MODEL ...]`.
Each answer is made twice, token by token from the cache and in one forward over the whole; they must agree, and every greedy
choice must have a margin that rounding cannot cross. As a check of the recipes, the recurrent state is wiped in mid-prompt once:
the column `wiped` counts the greedy tokens that survive it (few, or the goldens would not see a state fault).
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from tests import golden, miniatures
from tools.golden_prompts import PROMPTS

TINY = Path(__file__).parent.parent / "sparkrt" / "assets" / "sparkrt-tiny"
MARGIN = 1e-3  # least distance of the first two log-probabilities of a greedy choice
AGREE = 2e-4  # cached and uncached log-probabilities


def load(folder: Path) -> Any:
    """The reference model in float32, eager attention. Raises if it left a text tensor at its random initialization."""
    wrapped = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    auto = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    missing = [key for key in report["missing_keys"] if "visual" not in key]
    if missing or report["mismatched_keys"] or [k for k in report["unexpected_keys"] if not k.startswith("mtp.")]:
        raise SystemExit(f"{folder.name} was not loaded whole: {report}")
    return model.eval()


def batch(ids: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(ids, np.int64))[None]


def logprobs(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """Over every row of the head, padding included; only the tokenizer's ids are named."""
    return torch.log_softmax(logits.float(), dim=-1)[..., :vocab]


@torch.inference_mode()
def greedy(model: Any, prompt: np.ndarray, count: int, vocab: int, wipe_at: int = 0) -> tuple[list[int], torch.Tensor]:
    """`count` greedy tokens from the cache and their distributions [count, vocab]; the state is wiped before token `wipe_at`."""
    tokens, rows, cache = list[int](), list[torch.Tensor](), None
    if wipe_at:
        cache = model(input_ids=batch(prompt[:wipe_at]), use_cache=True).past_key_values
        for layer in cache.layers:
            for state in getattr(layer, "recurrent_states", {}).values():
                state.zero_()
    piece = batch(prompt[wipe_at:])
    for _ in range(count):
        out = model(input_ids=piece, cache=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(logprobs(out.logits[0, -1], vocab))
        tokens.append(int(rows[-1].argmax()))
        piece = batch(tokens[-1:])
    return tokens, torch.stack(rows)


@torch.inference_mode()
def answer(model: Any, label: str, prompt: np.ndarray, count: int, vocab: int, request: dict[str, Any]) -> golden.Golden:
    tokens, rows = greedy(model, prompt, count, vocab)
    whole = logprobs(model(input_ids=batch([*prompt, *tokens[:-1]]), use_cache=False).logits[0], vocab)
    difference = float((whole[len(prompt) - 1 :] - rows).abs().max())
    best = whole.topk(golden.TOP, dim=-1)
    margin = float((best.values[len(prompt) - 1 :, 0] - best.values[len(prompt) - 1 :, 1]).min())
    wiped = "-"
    if len(prompt) > 100 and "linear_attention" in getattr(model.config.get_text_config(), "layer_types", ()):
        again, _ = greedy(model, prompt, count, vocab, wipe_at=64)
        wiped = f"{sum(a == b for a, b in zip(tokens, again, strict=True))}/{count}"
    print(f"  {label:<24} {len(prompt):>4} tokens  cached vs whole {difference:.1e}  least margin {margin:.1e}  wiped {wiped}")
    if difference > AGREE or margin < MARGIN:
        raise SystemExit(f"{label}: not a steady golden; choose another prompt")
    top_ids, top_logprobs = best.indices.numpy().astype(np.int32), best.values.numpy()
    return golden.Golden(label, prompt, np.asarray(tokens, np.int32), top_ids, top_logprobs, request)


def tiny_goldens() -> golden.GoldenFile:
    """12 prompts × 64 tokens of the bundled model."""
    model, tokenizer = load(TINY), AutoTokenizer.from_pretrained(TINY)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(TINY.glob("*.safetensors")))).hexdigest()[:16]
    goldens = []
    for label, request in PROMPTS.items():
        if "messages" in request:
            options = {"tools": request.get("tools"), "add_generation_prompt": True}
            text = tokenizer.apply_chat_template(request["messages"], tokenize=False, **options)
        else:
            text = request["text"]
        ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        goldens.append(answer(model, label, ids, 64, len(tokenizer), {**request, "text": text}))
        print("   ", repr(tokenizer.decode(goldens[-1].tokens.tolist()))[:150])
    return golden.GoldenFile("sparkrt-tiny", digest, REFERENCE, tuple(goldens))


def miniature_goldens(name: str) -> golden.GoldenFile:
    """3 prompts × 32 tokens of a miniature."""
    with tempfile.TemporaryDirectory() as folder:
        model = load(miniatures.write(name, Path(folder) / name))
    prompts = miniatures.prompts(name)
    goldens = [answer(model, f"{len(p)} tokens", p, 32, miniatures.VOCAB, {}) for p in prompts]
    return golden.GoldenFile(name, miniatures.digest(name), REFERENCE, tuple(goldens))


REFERENCE = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, float32, eager"

if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or ["sparkrt-tiny", *miniatures.NAMES]:
        print(name)
        path = golden.save(tiny_goldens() if name == "sparkrt-tiny" else miniature_goldens(name))
        print(f"  {path.stat().st_size / 1000:.0f} kB")
