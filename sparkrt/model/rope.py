"""Rotary embedding settings out of the many places and spellings that configurations use."""

from __future__ import annotations

from sparkrt.model.config import RopeConfig
from sparkrt.model.keys import ConfigKeys

_KINDS = {"default": "default", "mrope": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


def read_rope(keys: ConfigKeys, head_dim: int, default_fraction: float = 1.0) -> tuple[RopeConfig, int]:
    """`(settings, context limit in tokens)`; a scaling factor raises the limit above `max_position_embeddings`.

    `rope_scaling` is merged over `rope_parameters`: replacing it, as elsewhere, loses a theta that is named only there.
    Inside, keys win over the same keys beside it. Raises LoadError on a kind of scaling that is not known.
    """
    rope = _merged(keys)
    max_position = keys.integer("max_position_embeddings")
    stated = rope.text("rope_type", "default")
    if stated not in _KINDS:
        raise rope.fault("rope_type", f"is {stated!r}, which cannot be served; known are {', '.join(_KINDS)}")
    kind = _KINDS[stated]
    fraction = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", default_fraction))
    rotary_dim = int(head_dim * fraction)
    if fraction > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise rope.fault("partial_rotary_factor", f"of {fraction} rotates {rotary_dim} of {head_dim} channels, not an even part")
    factor = rope.number("factor") if kind != "default" else 1.0
    original = rope.integer("original_max_position_embeddings", keys.integer("original_max_position_embeddings", max_position))
    settings = RopeConfig(
        theta=rope.number("rope_theta", keys.number("rope_theta", 1e4)),
        rotary_dim=rotary_dim,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        mrope_section=rope.integers("mrope_section"),
    )
    if kind == "llama3" and settings.high_freq_factor <= settings.low_freq_factor:
        raise rope.fault("high_freq_factor", f"must be above low_freq_factor ({settings.low_freq_factor})")
    return settings, max(max_position, int(original * factor)) if kind != "default" else max_position


def _merged(keys: ConfigKeys) -> ConfigKeys:
    merged: dict[str, object] = {}
    for key in ("rope_parameters", "rope_scaling"):
        if (section := keys.section(key)) is not None:
            values = dict(section.values)
            if "type" in values:  # the older spelling
                values.setdefault("rope_type", values.pop("type"))
            merged |= values
    return ConfigKeys(merged, keys.file, "rope_scaling." if "rope_scaling" in keys else "rope_parameters.")
