"""`Tokenizer`: text to token ids and back, with the exact bytes of every token.

Decoding goes by bytes, so that an answer cut inside a character can be put together again. Byte-level BPE (GPT-2, Qwen, Llama 3,
SmolLM) and SentencePiece pieces with byte fallback (Llama 2) have exact bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sparkrt.errors import LoadError, RequestError

_SPACE = "▁"  # how SentencePiece writes a blank
# the characters that stand for bytes in byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 on
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(b): b for b in _PRINTABLE} | {chr(0x100 + i): b for i, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}
_TO_LATIN1 = str.maketrans({chr(i): "\uffff" for i in range(256)} | {char: chr(byte) for char, byte in _BYTE_OF.items()})

# A GGUF file names one of two models: "gpt2" (byte-level BPE; `pre` says how text is cut before merging) and "llama"
# (SentencePiece). It says nothing of Unicode normalization: text is taken as it comes, as the golden vectors expect.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # values of tokenizer.ggml.token_type

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_PRE = {  # how text is cut: each pattern splits what the one before left
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (_LLAMA3,)),
}
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "cls": "cls", "mask": "mask"}


class Tokenizer:
    """A tokenizer of one model, safe to share between threads. `vocab_size` is one more than the largest real id.

    `special_tokens` maps roles to token text (`bos_token`, ...), as chat templates see them. `add_bos` / `add_eos`: whether
    `encode` adds them; None leaves it to the file's own post-processor.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        *,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()  # some files carry training-time limits: they must never cut a prompt silently
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        named = {name: i for name, token in special_tokens.items() if (i := backend.token_to_id(token)) is not None}
        self.bos_token_id, eos = named.get("bos_token"), named.get("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset({i for i, t in added.items() if t.special} | {*named.values()})
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._post_process = add_bos is None and add_eos is None
        self._prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        self._suffix = [eos] if add_eos and eos is not None else []
        self._byte_level, self._strips_blank = _decoder_kind(backend)
        self._bytes = {i: t.content.encode() for i, t in added.items()}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`. LoadError names the file at fault."""
        path = Path(folder)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise LoadError(f"{file}: no such file; a model folder needs its tokenizer in this format")
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            raise LoadError(f"{file}: not a tokenizer file: {error}") from None
        config = read_json(path / "tokenizer_config.json")
        _add_declared_tokens(backend, config.get("added_tokens_decoder"), path / "tokenizer_config.json")
        named = {**read_json(path / "special_tokens_map.json"), **config}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
        special = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
        return cls(backend, special, add_bos=config.get("add_bos_token"), add_eos=config.get("add_eos_token"))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer from the `tokenizer.ggml.*` values of a GGUF file (arrays as lists). LoadError names the key."""
        return cls(**_parts(metadata))

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str | None = None) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids. RequestError: see `check_surrogates`."""
        check_surrogates(text, param)
        # As a batch of one: `encode` holds the GIL (2 MB of text stalled the event loop for 2.5 s from a thread), this does not.
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens and self._post_process)[0].ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, *, continuation: bool = False) -> str:
        """The text of `ids`, with U+FFFD for what is not UTF-8. RequestError if an id is outside the vocabulary.

        `continuation`: the ids follow others, so a leading blank that only SentencePiece's start of text would drop is kept.
        """
        if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise RequestError(f"token id {wrong[0]} is out of vocabulary (0 to {self.vocab_size - 1})", param="tokens")
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_blank and not continuation else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; b"" for an id without a token (padding of the vocabulary)."""
        if token_id not in self._bytes:
            piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            self._bytes[token_id] = b"" if piece is None else self._bytes_of(piece)
        return self._bytes[token_id]

    def token_str(self, token_id: int) -> str:
        """The token as readable text; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _bytes_of(self, piece: str) -> bytes:
        if self._byte_level:
            try:
                return piece.translate(_TO_LATIN1).encode("latin-1")  # 248,000 of them in 0.1 s
            except UnicodeEncodeError:  # not by those characters
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()


def _decoder_kind(backend: Backend) -> tuple[bool, bool]:
    """(Whether it is byte-level and not pieces, whether decoding drops one blank at the start). LoadError if it is neither."""
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"decoders": []}
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if {"ByteLevel"} <= set(steps) <= {"ByteLevel", "Fuse"}:
        return True, False
    if {"Replace"} <= set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replace, strip = steps["Replace"], steps.get("Strip", {"content": " ", "start": 0, "stop": 0})
        plain = replace["pattern"] == {"String": _SPACE} and replace["content"] == strip["content"] == " "
        if plain and strip["start"] <= 1 and strip["stop"] == 0:
            return False, strip["start"] == 1
    if set(steps) == {"Metaspace"} and steps["Metaspace"]["replacement"] == _SPACE:
        return False, steps["Metaspace"]["prepend_scheme"] != "never"
    raise LoadError(f"the tokenizer's decoder ({', '.join(steps) or 'none'}) is neither byte-level nor SentencePiece's")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, {} if there is no such file. LoadError names a file that holds anything else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise LoadError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _add_declared_tokens(backend: Backend, declared: Any, file: Path) -> None:
    """Add the tokens that only tokenizer_config.json knows, at the ids it says."""
    known, given = backend.get_added_tokens_decoder(), declared if isinstance(declared, dict) else {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token_id, entry in sorted((int(i), entry) for i, entry in given.items() if int(i) not in known):
        token = AddedToken(entry["content"], **{flag: bool(entry.get(flag, False)) for flag in flags})
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if (actual := backend.token_to_id(token.content)) != token_id:
            raise LoadError(f"{file}: added token {token.content!r} should have id {token_id}, tokenizer.json makes it {actual}")


def check_surrogates(text: str, param: str | None) -> None:
    """RequestError naming `param` if `text` holds half of a surrogate pair, which JSON can spell and Unicode text cannot hold."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start} is U+{ord(text[error.start]):04X}, half of a surrogate pair"
        raise RequestError(f"{param or 'text'}: {what}; expected valid Unicode text", param=param) from None


def _parts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Tokenizer`, from `tokenizer.ggml.*`. LoadError names a key that is missing or says something unknown."""
    kind, tokens = _need(metadata, "model"), [str(token) for token in _need(metadata, "tokens")]
    types = [int(t) for t in metadata.get("tokenizer.ggml.token_type", [])] or [1] * len(tokens)
    if len(types) != len(tokens):
        raise LoadError(f"tokenizer.ggml.token_type has {len(types)} entries, tokenizer.ggml.tokens {len(tokens)}")
    if kind not in ("gpt2", "llama"):
        raise LoadError(f"tokenizer.ggml.model is {kind!r}; sparkrt reads 'gpt2' and 'llama'")
    named = {type_: [token for token, t in zip(tokens, types, strict=True) if t == type_] for type_ in range(_UNUSED)}
    # padding of the embedding table is never a token of a text; of equal tokens the first counts
    vocab = {tokens[i]: i for i in reversed(range(len(tokens))) if types[i] != _UNUSED}
    unknown = next(iter(named[_UNKNOWN]), None)
    backend, add_bos = _byte_level(metadata, vocab) if kind == "gpt2" else _sentencepiece(metadata, vocab, unknown)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named[_CONTROL]])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in named[_USER_DEFINED]])
    given = {role: metadata.get(f"tokenizer.ggml.{role}_token_id") for role in (*_ROLES, "eot", "eom")}
    roles = {role: int(token_id) for role, token_id in given.items() if token_id is not None}
    for role, token_id in roles.items():
        if not 0 <= token_id < len(tokens):
            raise LoadError(f"tokenizer.ggml.{role}_token_id is {token_id}, the vocabulary has {len(tokens)} tokens")
    special = {f"{_ROLES[role]}_token": tokens[i] for role, i in roles.items() if role in _ROLES}
    ends = [roles[role] for role in ("eos", "eot", "eom") if role in roles]  # all of them end a turn
    add_bos, add_eos = (bool(metadata.get(f"tokenizer.ggml.add_{x}_token", d)) for x, d in (("bos", add_bos), ("eos", False)))
    return {"backend": backend, "special_tokens": special, "add_bos": add_bos, "add_eos": add_eos, "eos_token_ids": ends}


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    if (name := f"tokenizer.ggml.{key}") not in metadata:
        raise LoadError(f"{name} is missing: the GGUF file carries no complete tokenizer")
    return metadata[name]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # the package raises bare Exception
        raise LoadError(f"tokenizer.ggml.merges: {error}") from None


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Backend, bool]:
    """The backend, and whether a text begins with bos where the metadata does not say."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE:
        raise LoadError(f"tokenizer.ggml.pre is {name!r}; sparkrt knows {', '.join(sorted(_PRE))}")
    llama3 = _PRE[name] == (_LLAMA3,)
    merges = [tuple(merge.split(" ", 1)) for merge in _need(metadata, "merges")]
    backend = Backend(_bpe(vocab, merges, ignore_merges=llama3))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend, llama3


def _sentencepiece(metadata: Mapping[str, Any], vocab: dict[str, int], unknown: str | None) -> tuple[Backend, bool]:
    scores = _need(metadata, "scores")
    # every way to join two pieces into a third is a merge; the better the joined piece scores, the earlier it is made
    ranked = []
    for piece, token_id in vocab.items():
        splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        known = sorted((vocab[left], vocab[right], left, right) for left, right in splits if left in vocab and right in vocab)
        ranked += [(-scores[token_id], token_id, order, *pair[2:]) for order, pair in enumerate(known)]
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    backend = Backend(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prepend, strip = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if prefixed else ([], [])
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend, True
