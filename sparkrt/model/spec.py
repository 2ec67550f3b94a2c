"""The canonical tensors of a model: what layers ask a `WeightSource` for, and where either kind of checkpoint keeps it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from sparkrt.model.config import GdnConfig, LayerConfig, ModelConfig

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Change = Callable[[np.ndarray], np.ndarray]

# Canonical name within a layer: names in safetensors and in GGUF files. " | " parts names of which one is there, " + " those of
# tensors that lie one after another along axis 1; {e} is the number of an expert.
_LAYER = {
    "input_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "post_norm": ("post_attention_layernorm.weight", "ffn_norm.weight | post_attention_norm.weight"),
    "attn.o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "attn.o_bias": ("self_attn.o_proj.bias", "attn_output.bias"),
    **{f"attn.{x}": (f"self_attn.{x}_proj.weight", f"attn_{x}.weight") for x in ("q", "k", "v")},
    **{f"attn.{x}_bias": (f"self_attn.{x}_proj.bias", f"attn_{x}.bias") for x in ("q", "k", "v")},
    **{f"attn.{x}_norm": (f"self_attn.{x}_norm.weight", f"attn_{x}_norm.weight") for x in ("q", "k")},
    "gdn.qkv": ("linear_attn.in_proj_qkvz.weight | linear_attn.in_proj_qkv.weight", "ssm_in.weight | attn_qkv.weight"),
    "gdn.z": ("linear_attn.in_proj_qkvz.weight | linear_attn.in_proj_z.weight", "ssm_in.weight | attn_gate.weight"),
    "gdn.b": ("linear_attn.in_proj_ba.weight | linear_attn.in_proj_b.weight", "ssm_ba.weight | ssm_beta.weight"),
    "gdn.a": ("linear_attn.in_proj_ba.weight | linear_attn.in_proj_a.weight", "ssm_ba.weight | ssm_alpha.weight"),
    "gdn.conv": ("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
    "gdn.A_log": ("linear_attn.A_log", "ssm_a"),
    "gdn.dt_bias": ("linear_attn.dt_bias", "ssm_dt.bias"),
    "gdn.norm": ("linear_attn.norm.weight", "ssm_norm.weight"),
    "gdn.out": ("linear_attn.out_proj.weight", "ssm_out.weight"),
    **{f"mlp.{x}": (f"mlp.{x}_proj.weight", f"ffn_{x}.weight") for x in ("gate", "up", "down")},
    "moe.router": ("mlp.gate.weight", "ffn_gate_inp.weight"),
    "moe.gate_up": (
        "mlp.experts.gate_up_proj | mlp.experts.{e}.gate_proj.weight + mlp.experts.{e}.up_proj.weight",
        "ffn_gate_up_exps.weight | ffn_gate_exps.weight + ffn_up_exps.weight",
    ),
    "moe.down": ("mlp.experts.down_proj | mlp.experts.{e}.down_proj.weight", "ffn_down_exps.weight"),
    "moe.shared_gate": ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    **{f"moe.shared_{x}_proj": (f"mlp.shared_expert.{x}_proj.weight", f"ffn_{x}_shexp.weight") for x in ("gate", "up", "down")},
}
_TOP = ("embed", "norm", "lm_head", "layers.", "mtp.layers.", "mtp.fc", "mtp.norm", "mtp.embed_norm", "mtp.hidden_norm")
_FUSED = ("in_proj_qkvz.weight", "in_proj_ba.weight", "ssm_in.weight", "ssm_ba.weight")  # what Qwen3-Next groups by key head
_KNOWN = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")


def expected_tensors(config: ModelConfig) -> Shapes:
    """Canonical name to shape of everything a model of `config` computes with, in the order of the forward pass."""
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"embed": table}
    for i, layer in enumerate(config.layers):
        shapes |= _layer(config, layer, f"layers.{i}.")
    shapes["norm"] = (config.hidden_size,)
    return shapes if config.tie_word_embeddings else shapes | {"lm_head": table}


def mtp_tensors(config: ModelConfig) -> Shapes:
    """The multi-token-prediction module's tensors: one attention layer of the model's own MLP kind. Empty without one."""
    hidden, layer = config.hidden_size, LayerConfig("attention", "dense" if config.moe is None else "moe")
    own: Shapes = {"mtp.fc": (hidden, 2 * hidden)} | {f"mtp.{name}": (hidden,) for name in ("embed_norm", "hidden_norm", "norm")}
    return own | _layer(config, layer, "mtp.layers.0.") if config.mtp_layers else {}


def _layer(config: ModelConfig, layer: LayerConfig, prefix: str) -> Shapes:
    hidden, inner, a, g, m = config.hidden_size, config.intermediate_size, config.attention, config.gdn, config.moe
    shapes: Shapes = {"input_norm": (hidden,), "post_norm": (hidden,)}
    if layer.mixer == "gdn" and g is not None:
        heads, channels, values = g.num_v_heads, g.conv_channels, g.value_size
        shapes |= {"gdn.qkv": (channels, hidden), "gdn.z": (values, hidden), "gdn.b": (heads, hidden), "gdn.a": (heads, hidden)}
        shapes |= {"gdn.conv": (channels, 4), "gdn.A_log": (heads,), "gdn.dt_bias": (heads,), "gdn.norm": (g.v_dim,)}
        shapes["gdn.out"] = (hidden, values)
    else:
        out, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        q = 2 * out if a.gated else out
        shapes |= {"attn.q": (q, hidden), "attn.k": (kv, hidden), "attn.v": (kv, hidden), "attn.o": (hidden, out)}
        shapes |= {"attn.q_norm": (a.head_dim,), "attn.k_norm": (a.head_dim,)} if a.qk_norm else {}
        shapes |= {"attn.q_bias": (q,), "attn.k_bias": (kv,), "attn.v_bias": (kv,)} if a.qkv_bias else {}
        shapes |= {"attn.o_bias": (hidden,)} if a.o_bias else {}
    if layer.mlp == "moe" and m is not None:
        e, width, shared = m.num_experts, m.intermediate_size, m.shared_intermediate_size
        shapes |= {"moe.router": (e, hidden), "moe.gate_up": (e, 2 * width, hidden), "moe.down": (e, hidden, width)}
        if shared:
            shapes |= {"moe.shared_gate_proj": (shared, hidden), "moe.shared_up_proj": (shared, hidden)}
            shapes |= {"moe.shared_down_proj": (hidden, shared), "moe.shared_gate": (1, hidden)}
    else:
        shapes |= {"mlp.gate": (inner, hidden), "mlp.up": (inner, hidden), "mlp.down": (hidden, inner)}
    return {prefix + name: shape for name, shape in shapes.items()}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a canonical tensor of `shape` is made of the tensors `names`, each of the shape `stored`.

    One is taken as it is or with a `change`. Several lie one after another along axis 1, expert by expert if they have no axis 0.
    """

    shape: Shape
    names: tuple[str, ...]
    stored: Shape
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one checkpoint has the parts of a model. `known` matches what may be there without being served."""

    gguf: bool
    places: Mapping[str, str]  # full names outside the layers, and the prefix of "layers.", "mtp.layers." with {i}
    known: re.Pattern[str]


def safetensors_layout(stored: Collection[str]) -> Layout:
    """The layout of a checkpoint with these tensor names; `model.` where they tell nothing."""
    found = Counter(m[1] for name in stored if not _KNOWN.search(name) and (m := re.match(r"(.*?)layers\.\d+\.", name)))
    prefix = found.most_common(1)[0][0] if found else "model."
    head = next((name for name in stored if name.endswith("lm_head.weight") and not _KNOWN.search(name)), "lm_head.weight")
    mtp = next((name.removesuffix("fc.weight") for name in stored if re.search(r"(^|\.)mtp\.fc\.weight$", name)), "mtp.")
    own = (f"{mtp}{part}.weight" for part in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"))
    top = (f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", head, f"{prefix}layers.{{i}}.", f"{mtp}layers.{{i}}.", *own)
    return Layout(False, dict(zip(_TOP, top, strict=True)), _KNOWN)


def gguf_layout(num_layers: int) -> Layout:
    """Block `num_layers` is the multi-token-prediction module's layer; it carries the module's own norms, too."""
    mtp = f"blk.{num_layers}."
    own = (f"{mtp}nextn.{part}.weight" for part in ("eh_proj", "shared_head_norm", "enorm", "hnorm"))
    top = ("token_embd.weight", "output_norm.weight", "output.weight", "blk.{i}.", mtp, *own)
    return Layout(True, dict(zip(_TOP, top, strict=True)), re.compile(rf"^rope_freqs\.weight$|^(v|mm)\.|^{re.escape(mtp)}"))


def recipes(shapes: Mapping[str, Shape], config: ModelConfig, layout: Layout, stored: Collection[str]) -> dict[str, Recipe]:
    """One recipe for every canonical name in `shapes`."""
    made, changes = {}, _changes(config, layout.gguf)
    for name, shape in shapes.items():
        if name in layout.places:
            made[name] = Recipe(shape, (layout.places[name],), shape)
            continue
        module, number, part = re.split(r"(?<=layers\.)(\d+)\.", name)
        prefix = layout.places[module].replace("{i}", number)
        forms = [[prefix + one for one in form.split(" + ")] for form in _LAYER[part][layout.gguf].split(" | ")]
        # where none is there, a name that says so
        names = next((form for form in forms if form[0].replace("{e}", "0") in stored), [" or ".join(form[0] for form in forms)])
        change, found = changes.get(f"{part} fused" if names[0].endswith(_FUSED) else part, (None, shape))
        if len(names) > 1 or "{e}" in names[0]:
            found = (shape[0], shape[1] // len(names), *shape[2:])
        if "{e}" in names[0]:
            found, names = found[1:], [one.replace("{e}", str(e)) for e in range(shape[0]) for one in names]
        made[name] = Recipe(shape, tuple(names), found or shape, change)
    return made


def _changes(config: ModelConfig, gguf: bool) -> dict[str, tuple[Change, Shape]]:
    """By canonical name: what makes the tensor of the stored one, and the stored shape, () where it is the same."""
    a, g, hidden = config.attention, config.gdn, config.hidden_size
    changes: dict[str, tuple[Change, Shape]] = {"moe.shared_gate": (lambda row: row[None], (hidden,))} if gguf else {}
    if gguf and config.family == "llama":
        changes |= {f"attn.{x}": (partial(_unpair, a.num_heads), ()) for x in ("q", "q_bias")}
        changes |= {f"attn.{x}": (partial(_unpair, a.num_kv_heads), ()) for x in ("k", "k_bias")}
    if g is None:
        return changes
    ratio, qkvz, ba = g.num_v_heads // g.num_k_heads, (g.conv_channels + g.value_size, hidden), (2 * g.num_v_heads, hidden)
    cuts = (g.k_dim, 2 * g.k_dim, 2 * g.k_dim + ratio * g.v_dim)
    changes["gdn.qkv fused"] = lambda rows: np.concatenate(_ungroup(g, cuts, rows)[:3]), qkvz
    changes["gdn.z fused"] = lambda rows: _ungroup(g, cuts, rows)[3], qkvz
    changes["gdn.b fused"] = lambda rows: _ungroup(g, (ratio,), rows)[0], ba
    changes["gdn.a fused"] = lambda rows: _ungroup(g, (ratio,), rows)[1], ba
    if not gguf:
        return changes | {"gdn.conv": (lambda taps: taps[:, 0], (g.conv_channels, 1, 4))}
    heads: Change = partial(_untile, g) if config.family == "qwen3_5" else np.asarray
    changes["gdn.A_log"] = lambda decay: np.log(-heads(decay).astype(np.float32)), ()  # stored is -exp(A_log)
    if config.family == "qwen3_5":
        changes |= {f"gdn.{x}": (heads, ()) for x in ("z", "b", "a", "dt_bias")}
        changes |= {f"gdn.{x}": (partial(_untile, g, first=g.conv_channels - g.value_size), ()) for x in ("qkv", "conv")}
        changes["gdn.out"] = lambda rows: heads(rows.T).T, ()
    return changes


def _unpair(heads: int, rows: np.ndarray) -> np.ndarray:
    """Llama's GGUF files hold each head's q and k rows for a rotation of neighbours (2i, 2i + 1); ours rotates (i, i + D/2)."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _untile(g: GdnConfig, rows: np.ndarray, first: int = 0) -> np.ndarray:
    """Qwen3.5's GGUF files tile the value heads, which are the rows from `first` on: our head g·r + j lies at j·HK + g."""
    tiled = rows[first:]
    heads = tiled.reshape(-1, g.num_k_heads, len(tiled) // g.num_v_heads, *rows.shape[1:]).swapaxes(0, 1)
    return np.concatenate([rows[:first], heads.reshape(tiled.shape)])


def _ungroup(g: GdnConfig, cuts: tuple[int, ...], rows: np.ndarray) -> list[np.ndarray]:
    """Qwen3-Next's rows are grouped by key head, q(DK) k(DK) v(r·DV) z(r·DV) or b(r) a(r): the parts, of all groups together."""
    groups = rows.reshape(g.num_k_heads, -1, rows.shape[-1])
    return [part.reshape(-1, rows.shape[-1]) for part in np.split(groups, cuts, axis=1)]
