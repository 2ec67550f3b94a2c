"""Small synthetic checkpoints, written to disk in the Qwen3.5-MoE text layout (float32, fused experts).

`r1` recites a fixed script with known log-probabilities whatever the prompt (the residual stream stays the last token's
embedding, `lm_head` maps each token to its successor). `r2` is random but *state-sensitive*: on default random weights a
lost or shifted recurrent state changes almost no greedy token, so cache, chunking and padding are tested on `r2`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # special: skipped when decoding
CONTROL = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that stay visible

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 64
GDN_K_HEADS, GDN_V_HEADS, GDN_K_DIM, GDN_V_DIM, CONV = 1, 2, 128, 128, 4
EXPERTS, TOP_K, FFN = 8, 2, 32
KEY_SIZE, VALUE_SIZE = GDN_K_HEADS * GDN_K_DIM, GDN_V_HEADS * GDN_V_DIM

Tensors = dict[str, np.ndarray]


def _byte_alphabet() -> tuple[str, ...]:
    """The byte-level BPE character of each byte: itself where printable, else the next code point from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return tuple(chr(b if b in printable else next(spare)) for b in range(256))


BYTE_CHARS = _byte_alphabet()


def _spell(raw: bytes) -> str:
    return "".join(BYTE_CHARS[b] for b in raw)


def split_unique(raw: bytes, used: set[str], cuts: Iterable[int] = ()) -> list[str]:
    """Cuts `raw` into pieces none of which is in `used` (which grows), with a piece ending at every offset of `cuts`.

    Depth first, shortest piece first; ValueError if there is no such cut.
    """
    ends = sorted({*cuts, len(raw)})
    taken: list[tuple[int, int]] = []  # (start, length)
    start, length = 0, 1
    while start < len(raw):
        limit = next(end for end in ends if end > start)
        while start + length <= limit and _spell(raw[start : start + length]) in used:
            length += 1
        if start + length <= limit:
            used.add(_spell(raw[start : start + length]))
            taken.append((start, length))
            start, length = start + length, 1
        elif taken:  # dead end: lengthen the piece before
            start, length = taken.pop()
            used.discard(_spell(raw[start : start + length]))
            length += 1
        else:
            raise ValueError("cannot cut uniquely")
    return [_spell(raw[start : start + length]) for start, length in taken]


def hybrid_tensors(vocab: int, hidden: int, rng: np.random.Generator) -> Tensors:
    """Random weights of standard deviation 1/sqrt(columns), checkpoint names; layers are gdn, gdn, gdn, attention."""

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden) * math.sqrt(hidden),
        "lm_head.weight": normal(vocab, hidden),
        "model.norm.weight": zeros(hidden),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        tensors[layer + "input_layernorm.weight"] = zeros(hidden)  # zero-centred: the effective weight is 1 + w
        tensors[layer + "post_attention_layernorm.weight"] = zeros(hidden)
        if (i + 1) % 4:
            mixer, channels = layer + "linear_attn.", 2 * KEY_SIZE + VALUE_SIZE
            tensors |= {
                mixer + "in_proj_qkv.weight": normal(channels, hidden),
                mixer + "in_proj_z.weight": normal(VALUE_SIZE, hidden),
                mixer + "in_proj_b.weight": normal(GDN_V_HEADS, hidden),
                mixer + "in_proj_a.weight": normal(GDN_V_HEADS, hidden),
                mixer + "conv1d.weight": (rng.standard_normal((channels, 1, CONV)) * 0.5).astype(np.float32),
                mixer + "A_log": zeros(GDN_V_HEADS) - 5,  # slow decay: the state matters for long
                mixer + "dt_bias": zeros(GDN_V_HEADS) - 1,
                mixer + "norm.weight": zeros(GDN_V_DIM) + 1,  # the gated norm is plain w
                mixer + "out_proj.weight": normal(hidden, VALUE_SIZE),
            }
        else:
            mixer = layer + "self_attn."
            tensors |= {
                mixer + "q_proj.weight": normal(2 * HEADS * HEAD_DIM, hidden),
                mixer + "k_proj.weight": normal(KV_HEADS * HEAD_DIM, hidden),
                mixer + "v_proj.weight": normal(KV_HEADS * HEAD_DIM, hidden),
                mixer + "o_proj.weight": normal(hidden, HEADS * HEAD_DIM),
                mixer + "q_norm.weight": zeros(HEAD_DIM),
                mixer + "k_norm.weight": zeros(HEAD_DIM),
            }
        mlp = layer + "mlp."
        tensors |= {
            mlp + "gate.weight": normal(EXPERTS, hidden),
            mlp + "experts.gate_up_proj": normal(EXPERTS, 2 * FFN, hidden),
            mlp + "experts.down_proj": normal(EXPERTS, hidden, FFN),
            mlp + "shared_expert.gate_proj.weight": normal(FFN, hidden),
            mlp + "shared_expert.up_proj.weight": normal(FFN, hidden),
            mlp + "shared_expert.down_proj.weight": normal(hidden, FFN),
            mlp + "shared_expert_gate.weight": normal(1, hidden),
        }
    return tensors


def hybrid_config(vocab: int, hidden: int, eos: int) -> dict[str, Any]:
    """The config.json of `hybrid_tensors`."""
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "linear_num_key_heads": GDN_K_HEADS,
        "linear_num_value_heads": GDN_V_HEADS,
        "linear_key_head_dim": GDN_K_DIM,
        "linear_value_head_dim": GDN_V_DIM,
        "linear_conv_kernel_dim": CONV,
        "moe_intermediate_size": FFN,
        "shared_expert_intermediate_size": FFN,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        "dtype": "float32",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }


def save(
    path: str | Path, tensors: Tensors, config: dict[str, Any], pieces: Sequence[str] = (), template: str | None = None
) -> Tokenizer:
    """Writes a model folder: config, weights, and a tokenizer of 256 bytes, `pieces`, `SPECIAL` and `CONTROL` in id order."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate([*BYTE_CHARS, *pieces])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template or TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return tokenizer


def r1(
    path: str | Path,
    script: Sequence[str | bytes],
    V: int = 512,
    alpha: float = 0.5,
    after: str = "\n",
    end: str = "<|im_end|>",
    cuts: Collection[int] = (),
) -> tuple[Tokenizer, list[int], dict[str, int]]:
    """Writes a model that recites `script` after the token `after`, then `end`; `(tokenizer, script ids, ids by token)`.

    A part of the script that is in `SPECIAL` or `CONTROL` becomes that token; in others a token ends at every byte offset
    of `cuts`. With 512 tokens and `alpha` 0.5 a scripted token has log-probability -0.006217 and any other -11.319926;
    `alpha` 0 samples uniformly.
    """
    markers = (*SPECIAL, *CONTROL)
    used, sequence = {BYTE_CHARS[ord(after)]}, list[str]()
    for part in script:
        if isinstance(part, str) and part in markers:
            sequence.append(part)
        else:
            sequence += split_unique(part.encode() if isinstance(part, str) else part, used, cuts)
    pieces = [token for token in sequence if len(token) > 1 and token not in markers]
    ids = {token: i for i, token in enumerate([*BYTE_CHARS, *pieces, *markers])}
    assert len(ids) <= V, f"the script needs a vocabulary of {len(ids)}"

    tensors = hybrid_tensors(V, V, np.random.default_rng(0))
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensor[:] = 0
    chain = [ids[token] for token in (BYTE_CHARS[ord(after)], *sequence, end)]
    successor = dict(itertools.pairwise(chain))
    assert len(successor) == len(chain) - 1, "a token has two successors"
    head = np.zeros((V, V), np.float32)
    for token in range(V):
        head[successor.get(token, ids[end]), token] = alpha
    tensors["model.embed_tokens.weight"] = np.eye(V, dtype=np.float32) * np.float32(math.sqrt(V))
    tensors["lm_head.weight"] = head
    tokenizer = save(path, tensors, hybrid_config(V, V, ids[end]), pieces)
    return tokenizer, [ids[token] for token in sequence], ids


def r2(path: str | Path, seed: int = 1, V: int = 512, H: int = 256) -> Tokenizer:
    """Writes the random state-sensitive model: gdn outputs ×8 and `lm_head` ×6 make a state fault change greedy tokens."""
    tensors = hybrid_tensors(V, H, np.random.default_rng(seed))
    for name, tensor in tensors.items():
        if "out_proj" in name:
            tensor *= 8
    tensors["lm_head.weight"] *= 6
    return save(path, tensors, hybrid_config(V, H, eos=258))
