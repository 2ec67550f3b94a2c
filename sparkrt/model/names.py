"""Where a checkpoint keeps each canonical tensor: names by file format, and what must be done to its rows.

The tables map the canonical name of a tensor within its layer to a name in the checkpoint, to a `Form` where tensors must be
joined or rows moved, or to several of these: the first that is there is taken. Prefixes are found in the tensor names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from sparkrt.model.config import GdnConfig, ModelConfig

Shape = tuple[int, ...]
Change = Callable[[np.ndarray, ModelConfig], np.ndarray]


@dataclass(frozen=True, slots=True)
class Form:
    """Stored names after the layer's prefix: several lie one after another along axis 1, `{e}` is the number of the expert.

    `change` makes the canonical tensor of the stored one, whose shape `stored` makes of the canonical where it is another.
    """

    names: tuple[str, ...]
    change: Change | None = None
    stored: Callable[[Shape, ModelConfig], Shape] = lambda shape, config: shape


@dataclass(frozen=True, slots=True)
class Recipe:
    """One canonical tensor: `names` of stored tensors of `shape`, `parts` of them along axis 1; `stacked`: for each expert."""

    names: tuple[str, ...]
    shape: Shape
    parts: int = 1
    stacked: bool = False
    change: Change | None = None


Entry = str | Form | tuple[str | Form, ...]
Table = Mapping[str, Entry]


def _gdn(config: ModelConfig) -> GdnConfig:
    assert config.gdn is not None
    return config.gdn


def _unpair(rows: np.ndarray, heads: int) -> np.ndarray:
    """Llama's GGUF files hold each head's q and k rows for a rotation of neighbours (2i, 2i + 1); ours rotates (i, i + D/2)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _untile(rows: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Qwen3.5's GGUF files tile the value heads: our head g·r + j lies at j·HK + g."""
    c = _gdn(config)
    return rows.reshape(-1, c.num_k_heads, len(rows) // c.num_v_heads, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def _untile_values(rows: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The same where q and k rows come first."""
    keys = 2 * _gdn(config).key_size
    return np.concatenate([rows[:keys], _untile(rows[keys:], config)])


def _log_decay(a: np.ndarray, config: ModelConfig) -> np.ndarray:
    """GGUF's `ssm_a` is -exp(A_log)."""
    return np.log(-a.astype(np.float32))


def _ungroup(rows: np.ndarray, config: ModelConfig, *cuts: int) -> list[np.ndarray]:
    """The parts of rows grouped by key head, cut at `cuts` within a group; all groups' rows of a part together."""
    groups = rows.reshape(_gdn(config).num_k_heads, -1, rows.shape[-1])
    return [part.reshape(-1, rows.shape[-1]) for part in np.split(groups, cuts, axis=1)]


def _split_qkvz(rows: np.ndarray, config: ModelConfig) -> list[np.ndarray]:
    c = _gdn(config)
    return _ungroup(rows, config, c.k_dim, 2 * c.k_dim, 2 * c.k_dim + c.value_size // c.num_k_heads)


def _split_ba(rows: np.ndarray, config: ModelConfig) -> list[np.ndarray]:
    return _ungroup(rows, config, _gdn(config).num_v_heads // _gdn(config).num_k_heads)


def _qkvz_shape(shape: Shape, config: ModelConfig) -> Shape:
    return (_gdn(config).conv_channels + _gdn(config).value_size, *shape[1:])


def _grouped(qkvz: str, ba: str) -> dict[str, Form]:
    """Qwen3-Next's fused projections: q(DK) k(DK) v(r·DV) z(r·DV) a key head, which has r value heads, and b(r) a(r)."""
    return {
        "gdn.qkv": Form((qkvz,), lambda rows, c: np.concatenate(_split_qkvz(rows, c)[:3]), _qkvz_shape),
        "gdn.z": Form((qkvz,), lambda rows, c: _split_qkvz(rows, c)[3], _qkvz_shape),
        "gdn.b": Form((ba,), lambda rows, c: _split_ba(rows, c)[0], lambda shape, c: (2 * shape[0], *shape[1:])),
        "gdn.a": Form((ba,), lambda rows, c: _split_ba(rows, c)[1], lambda shape, c: (2 * shape[0], *shape[1:])),
    }


_BOTH: dict[str, tuple[str, str]] = {  # (safetensors, GGUF)
    "input_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "post_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "attn.q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "attn.k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "attn.v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "attn.o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "attn.q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "attn.k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "attn.q_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "attn.k_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "attn.v_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "attn.o_bias": ("self_attn.o_proj.bias", "attn_output.bias"),
    "gdn.qkv": ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight"),
    "gdn.z": ("linear_attn.in_proj_z.weight", "attn_gate.weight"),
    "gdn.b": ("linear_attn.in_proj_b.weight", "ssm_beta.weight"),
    "gdn.a": ("linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
    "gdn.conv": ("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
    "gdn.A_log": ("linear_attn.A_log", "ssm_a"),
    "gdn.dt_bias": ("linear_attn.dt_bias", "ssm_dt.bias"),
    "gdn.norm": ("linear_attn.norm.weight", "ssm_norm.weight"),
    "gdn.out": ("linear_attn.out_proj.weight", "ssm_out.weight"),
    "mlp.gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "mlp.up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "mlp.down": ("mlp.down_proj.weight", "ffn_down.weight"),
    "moe.router": ("mlp.gate.weight", "ffn_gate_inp.weight"),
    "moe.shared_gate_proj": ("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"),
    "moe.shared_up_proj": ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"),
    "moe.shared_down_proj": ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"),
}
_EXPERT = "mlp.experts.{e}."
_SAFETENSORS: Table = {
    **{name: pair[0] for name, pair in _BOTH.items()},
    "gdn.conv": Form(("linear_attn.conv1d.weight",), lambda taps, c: taps[:, 0], lambda shape, c: (shape[0], 1, shape[1])),
    "moe.gate_up": ("mlp.experts.gate_up_proj", Form((f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight"))),
    "moe.down": ("mlp.experts.down_proj", Form((f"{_EXPERT}down_proj.weight",))),
    "moe.shared_gate": "mlp.shared_expert_gate.weight",
}
_GGUF: Table = {
    **{name: pair[1] for name, pair in _BOTH.items()},
    "gdn.A_log": Form(("ssm_a",), _log_decay),
    "moe.gate_up": ("ffn_gate_up_exps.weight", Form(("ffn_gate_exps.weight", "ffn_up_exps.weight"))),
    "moe.down": "ffn_down_exps.weight",
    "moe.shared_gate": Form(("ffn_gate_inp_shexp.weight",), lambda row, c: row[None], lambda shape, c: shape[1:]),
}


def _changed(change: Change, *names: str) -> Table:
    """Forms of GGUF's plain names with a change to them."""
    return {name: Form((_BOTH[name][1],), change) for name in names}


_NEXT_GGUF = _grouped("ssm_in.weight", "ssm_ba.weight")
_HYBRID_GGUF: Table = {"post_norm": "post_attention_norm.weight"}
_OWN: dict[tuple[str, bool], Table] = {  # by family and whether it is GGUF: what differs from the tables above
    ("llama", True): {
        **_changed(lambda rows, c: _unpair(rows, c.attention.num_heads), "attn.q", "attn.q_bias"),
        **_changed(lambda rows, c: _unpair(rows, c.attention.num_kv_heads), "attn.k", "attn.k_bias"),
    },
    ("qwen3_next", False): _grouped("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
    ("qwen3_next", True): {  # newer files have q | k | v and z apart
        **_HYBRID_GGUF,
        **_NEXT_GGUF,
        "gdn.qkv": (_NEXT_GGUF["gdn.qkv"], "attn_qkv.weight"),
        "gdn.z": (_NEXT_GGUF["gdn.z"], "attn_gate.weight"),
    },
    ("qwen3_5", True): {
        **_HYBRID_GGUF,
        **_changed(_untile, "gdn.z", "gdn.b", "gdn.a", "gdn.dt_bias"),
        **_changed(_untile_values, "gdn.qkv", "gdn.conv"),
        **_changed(lambda a, c: _log_decay(_untile(a, c), c), "gdn.A_log"),
        **_changed(lambda rows, c: _untile(rows.T, c).T, "gdn.out"),
    },
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a model lie in one checkpoint. `known` matches what may be there without being served."""

    top: Mapping[str, str]  # canonical names outside the layers
    layer: str  # with {i}
    mtp_layer: str
    known: re.Pattern[str]
    gguf: bool


_KNOWN = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")


def huggingface_layout(stored: Collection[str]) -> Layout:
    """The layout of a checkpoint with these tensor names; `model.` where they tell nothing."""
    found = Counter(m[1] for name in stored if not _KNOWN.search(name) and (m := re.match(r"(.*?)layers\.\d+\.", name)))
    prefix = found.most_common(1)[0][0] if found else "model."
    head = next((name for name in stored if name.endswith("lm_head.weight") and not _KNOWN.search(name)), "lm_head.weight")
    mtp = next((name.removesuffix("fc.weight") for name in stored if re.search(r"(^|\.)mtp\.fc\.weight$", name)), "mtp.")
    top = {"embed": f"{prefix}embed_tokens.weight", "norm": f"{prefix}norm.weight", "lm_head": head}
    top |= {"mtp.fc": f"{mtp}fc.weight", "mtp.norm": f"{mtp}norm.weight"}
    top |= {
        f"mtp.{ours}_norm": f"{mtp}pre_fc_norm_{theirs}.weight" for ours, theirs in (("embed", "embedding"), ("hidden", "hidden"))
    }
    return Layout(top, f"{prefix}layers.{{i}}.", f"{mtp}layers.{{i}}.", _KNOWN, gguf=False)


def gguf_layout(num_layers: int) -> Layout:
    """Blocks from `num_layers` on are the multi-token-prediction module's; they carry its own norms, too."""
    last = f"blk.{num_layers}."
    top = {"embed": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}
    parts = {"fc": "eh_proj", "norm": "shared_head_norm", "embed_norm": "enorm", "hidden_norm": "hnorm"}
    top |= {f"mtp.{ours}": f"{last}nextn.{theirs}.weight" for ours, theirs in parts.items()}
    return Layout(top, "blk.{i}.", last, re.compile(rf"^rope_freqs\.weight$|^(v|mm)\.|^blk\.{num_layers}\."), gguf=True)


def recipes(shapes: Mapping[str, Shape], config: ModelConfig, layout: Layout, stored: Collection[str]) -> dict[str, Recipe]:
    """One recipe for every canonical name in `shapes`."""
    table = {**(_GGUF if layout.gguf else _SAFETENSORS), **_OWN.get((config.family, layout.gguf), {})}
    made: dict[str, Recipe] = {}
    for name, shape in shapes.items():
        if name in layout.top:
            made[name] = Recipe((layout.top[name],), shape)
            continue
        match = re.fullmatch(r"(mtp\.)?layers\.(\d+)\.(.+)", name)
        assert match is not None, name
        prefix = (layout.mtp_layer if match[1] else layout.layer).replace("{i}", match[2])
        made[name] = _recipe(table[match[3]], prefix, shape, config, stored)
    return made


def _recipe(forms: Entry, prefix: str, shape: Shape, config: ModelConfig, stored: Collection[str]) -> Recipe:
    choices = [Form((f,)) if isinstance(f, str) else f for f in (forms if isinstance(forms, tuple) else (forms,))]
    form = next((f for f in choices if prefix + f.names[0] in stored), choices[-1])
    names, parts = [prefix + name for name in form.names], len(form.names)
    part = (shape[0], shape[1] // parts, *shape[2:]) if parts > 1 else form.stored(shape, config)
    if "{e}" not in form.names[0]:
        return Recipe(tuple(names), part, parts, change=form.change)
    return Recipe(tuple(n.replace("{e}", str(e)) for e in range(shape[0]) for n in names), part[1:], parts, stacked=True)
