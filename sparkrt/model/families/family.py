"""What a family of models is: how its configuration keys and its tensor names map to ours.

A family file has one table a file format, from the canonical name of a tensor within its layer to the name in the checkpoint
(or to a function that makes a recipe, where rows must be picked or tensors joined). Prefixes are found in the tensor names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from sparkrt.model.config import ModelConfig
from sparkrt.model.families.reading import ConfigLevels
from sparkrt.model.loading.recipes import Recipe, Shape, Stored


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The tensors of one layer in a checkpoint: what an entry of a table that is a function is called with."""

    prefix: str
    config: ModelConfig
    stored: Collection[str]

    def __call__(self, suffix: str) -> str:
        return self.prefix + suffix

    def has(self, suffix: str) -> bool:
        return self.prefix + suffix in self.stored


Entry = str | Callable[[LayerNames], Recipe]
Table = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model, under the names that configurations give it."""

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    read_config: Callable[[ConfigLevels], ModelConfig]
    tensors: Table
    gguf_architectures: tuple[str, ...] = ()
    gguf_tensors: Table = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a model lie in one checkpoint. `known` matches what may be there without being served."""

    top: Mapping[str, str]  # canonical names outside the layers
    layer: str  # with {i}
    mtp_layer: str
    known: re.Pattern[str]


_LAYER = re.compile(r"(mtp\.)?layers\.(\d+)\.(.+)")
_MTP_NORMS = {"mtp.embed_norm": "pre_fc_norm_embedding.weight", "mtp.hidden_norm": "pre_fc_norm_hidden.weight"}
_KNOWN = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model|multi_modal_projector)\.|\.rotary_emb\.inv_freq$")


def huggingface_layout(stored: Collection[str]) -> Layout:
    """The layout of a checkpoint with these tensor names; `model.` where they tell nothing."""
    found = Counter(m[1] for name in stored if not _KNOWN.search(name) and (m := re.match(r"(.*?)layers\.\d+\.", name)))
    prefix = found.most_common(1)[0][0] if found else "model."
    head = next((name for name in stored if name.endswith("lm_head.weight") and not _KNOWN.search(name)), "lm_head.weight")
    mtp = next((name.removesuffix("fc.weight") for name in stored if re.search(r"(^|\.)mtp\.fc\.weight$", name)), "mtp.")
    top = {"embed": f"{prefix}embed_tokens.weight", "norm": f"{prefix}norm.weight", "lm_head": head}
    top |= {"mtp.fc": f"{mtp}fc.weight", "mtp.norm": f"{mtp}norm.weight"}
    top |= {name: mtp + suffix for name, suffix in _MTP_NORMS.items()}
    return Layout(top, f"{prefix}layers.{{i}}.", f"{mtp}layers.{{i}}.", _KNOWN)


def gguf_layout(num_layers: int) -> Layout:
    """Blocks from `num_layers` on are the multi-token-prediction module's; they carry its own norms, too."""
    nextn = f"blk.{num_layers}.nextn."
    top = {"embed": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}
    top |= {"mtp.fc": f"{nextn}eh_proj.weight", "mtp.norm": f"{nextn}shared_head_norm.weight"}
    top |= {"mtp.embed_norm": f"{nextn}enorm.weight", "mtp.hidden_norm": f"{nextn}hnorm.weight"}
    known = re.compile(rf"^rope_freqs\.weight$|^(v|mm)\.|^blk\.{num_layers}\.")
    return Layout(top, "blk.{i}.", f"blk.{num_layers}.", known)


def recipes(
    shapes: Mapping[str, Shape], table: Table, layout: Layout, config: ModelConfig, stored: Collection[str]
) -> dict[str, Recipe]:
    """One recipe for every canonical name in `shapes`."""
    made: dict[str, Recipe] = {}
    for name in shapes:
        if name in layout.top:
            made[name] = Stored(layout.top[name])
            continue
        match = _LAYER.fullmatch(name)
        assert match is not None, name
        prefix = layout.mtp_layer if match[1] else layout.layer
        entry = table[match[3]]
        names = LayerNames(prefix.replace("{i}", match[2]), config, stored)
        made[name] = Stored(names(entry)) if isinstance(entry, str) else entry(names)
    return made
