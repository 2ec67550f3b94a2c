"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` package from plain metadata values.

Two models of tokenizer are known: "gpt2" (byte-level BPE with merges; `tokenizer.ggml.pre` names how text is cut before merging)
and "llama" (SentencePiece BPE: the pair whose joined piece scores best is merged first; bytes are the fallback). The file says
nothing of Unicode normalization, so text is taken as it comes, which is what the golden vectors of these vocabularies expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sparkrt.errors import LoadError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # values of tokenizer.ggml.token_type

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """How text is cut: each pattern splits what the one before left. `add_bos` where the metadata does not say."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DEFAULT = _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_PRE = {
    "default": _DEFAULT,
    "gpt-2": _Pre((_GPT2,)),
    "mpt": _Pre((_GPT2,)),
    "olmo": _Pre((_GPT2,)),
    "llama-bpe": _Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "qwen2": _Pre((_QWEN2,)),
    "qwen35": _Pre((_QWEN35,)),
    "smollm": _Pre((r"\p{N}", _GPT2)),
}
_PRE |= dict.fromkeys(("llama3", "llama-v3"), _PRE["llama-bpe"])
_PRE |= dict.fromkeys(("deepseek-r1-qwen",), _PRE["qwen2"])
_PRE |= dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), _PRE["smollm"])

_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "cls": "cls", "mask": "mask"}
_END_ROLES = ("eot", "eom")  # further tokens that end a turn


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What a GGUF file says about its tokenizer, ready for `Tokenizer`."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    add_bos: bool
    add_eos: bool
    eos_token_ids: tuple[int, ...]


def backend_from_gguf(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Build from `tokenizer.ggml.*`. LoadError names a key that is missing or says something unknown."""
    kind = _need(metadata, "model")
    tokens = [str(token) for token in _need(metadata, "tokens")]
    types = [int(t) for t in metadata.get("tokenizer.ggml.token_type", [])] or [1] * len(tokens)
    if len(types) != len(tokens):
        raise LoadError(f"tokenizer.ggml.token_type has {len(types)} entries, tokenizer.ggml.tokens {len(tokens)}")
    vocab: dict[str, int] = {}
    for token_id, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if type_ != _UNUSED:  # padding of the embedding table: never a token of a text
            vocab.setdefault(token, token_id)
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata, vocab)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(metadata, vocab, tokens, types)
    else:
        raise LoadError(f"tokenizer.ggml.model is {kind!r}; sparkrt reads 'gpt2' and 'llama'")
    added = [(t, type_ == _CONTROL) for t, type_ in zip(tokens, types, strict=True) if type_ in (_CONTROL, _USER_DEFINED)]
    for special in (True, False):
        chosen = [AddedToken(token, special=special, normalized=False) for token, control in added if control == special]
        (backend.add_special_tokens if special else backend.add_tokens)(chosen)

    def token_at(role: str) -> int | None:
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is None:
            return None
        if not 0 <= int(token_id) < len(tokens):
            raise LoadError(f"tokenizer.ggml.{role}_token_id is {token_id}, the vocabulary has {len(tokens)} tokens")
        return int(token_id)

    roles = {f"{name}_token": token_at(role) for role, name in _ROLES.items()}
    return GgufTokenizer(
        backend,
        special_tokens={name: tokens[i] for name, i in roles.items() if i is not None},
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        eos_token_ids=tuple(i for role in ("eos", *_END_ROLES) if (i := token_at(role)) is not None),
    )


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    try:
        return metadata[f"tokenizer.ggml.{key}"]
    except KeyError:
        raise LoadError(f"tokenizer.ggml.{key} is missing: the GGUF file carries no complete tokenizer") from None


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # the package raises bare Exception
        raise LoadError(f"tokenizer.ggml.merges: {error}") from None


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE:
        raise LoadError(f"tokenizer.ggml.pre is {name!r}; sparkrt knows {', '.join(sorted(_PRE))}")
    pre = _PRE[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _need(metadata, "merges")]
    backend = Tokenizer(_bpe(vocab, merges, ignore_merges=pre.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(
    metadata: Mapping[str, Any], vocab: dict[str, int], tokens: list[str], types: list[int]
) -> tuple[Tokenizer, bool]:
    scores = _need(metadata, "scores")
    # every way to join two pieces into a third is a merge; the better the joined piece scores, the earlier it is made
    ranked = []
    for piece, token_id in vocab.items():
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(vocab[left], vocab[right], left, right) for left, right in splits if left in vocab and right in vocab]
        ranked += [(-scores[token_id], token_id, order, *pair[2:]) for order, pair in enumerate(sorted(known))]
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), None)
    backend = Tokenizer(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend, True
