"""The supported architectures. A new one that uses known layers is one file and one line here."""

from __future__ import annotations

from sparkrt.errors import LoadError
from sparkrt.model.families import llama, qwen2, qwen3, qwen3_5, qwen3_next
from sparkrt.model.families.family import Family
from sparkrt.model.keys import ConfigKeys

FAMILIES = (qwen3_5.FAMILY, qwen3_next.FAMILY, qwen3.FAMILY, qwen2.FAMILY, llama.FAMILY)


def family_of(keys: ConfigKeys) -> Family:
    """The family of a configuration: by `architectures`, which tells a classifier from a decoder, else by `model_type`."""
    names = keys.texts("architectures")
    for family in FAMILIES:
        if (names and names[0] in family.architectures) or (not names and keys.values.get("model_type") in family.model_types):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    key = "architectures" if names else "model_type"
    raise keys.fault(key, f"is {keys.values.get(key)!r}, which cannot be served. Supported: {supported}")


def gguf_family_of(file: str, architecture: object) -> Family:
    """The family of a GGUF file by its `general.architecture`."""
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.gguf_architectures)
    raise LoadError(f"{file}: general.architecture is {architecture!r}, which cannot be served. Supported: {supported}")
