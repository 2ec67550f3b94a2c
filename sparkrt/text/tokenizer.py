"""`Tokenizer`: text to token ids and back, with the exact bytes of every token.

Decoding goes by bytes and not by strings, so that an answer cut anywhere, inside a character too, can be put together again
(`Detokenizer`). Two families of vocabularies have exact bytes: byte-level BPE (GPT-2, Qwen, Llama 3, SmolLM) and SentencePiece
pieces with byte fallback (Llama 2). Anything else is decoded by the `tokenizers` package as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from sparkrt.errors import LoadError, RequestError
from sparkrt.text.gguf_tokenizer import backend_from_gguf
from sparkrt.text.unicode import check_surrogates

_SPACE = "▁"  # how SentencePiece writes a blank


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class Tokenizer:
    """A tokenizer of one model. Immutable and safe to share between threads once built.

    `special_tokens` maps roles to token text (`bos_token`, `eos_token`, ...): what chat templates see under these names.
    `vocab_size` is one more than the largest real id; a model's logits may be padded beyond it.
    `add_bos` / `add_eos`: whether `encode` adds them; None leaves it to the tokenizer file's own post-processor.
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
        self.bos_token_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        added = backend.get_added_tokens_decoder()
        self._added = {i: t.content.encode() for i, t in added.items()}
        named = (self._id_of(name) for name in self.special_tokens)
        self.special_ids = frozenset(i for i, t in added.items() if t.special) | {i for i in named if i is not None}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._post_process = add_bos is None and add_eos is None
        self._prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        self._suffix = [eos] if add_eos and eos is not None else []
        self._kind, self._strips_blank = _decoder_kind(backend)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read `tokenizer.json` and, where present, `tokenizer_config.json` and `special_tokens_map.json`.

        LoadError names a file that is missing or cannot be read.
        """
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
        add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
        return cls(backend, _named_tokens(named), add_bos=add_bos, add_eos=add_eos)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer from the `tokenizer.ggml.*` values of a GGUF file (arrays as lists). LoadError names the key."""
        parts = backend_from_gguf(metadata)
        return cls(
            parts.backend,
            parts.special_tokens,
            add_bos=parts.add_bos,
            add_eos=parts.add_eos,
            eos_token_ids=parts.eos_token_ids,
        )

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str | None = None) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids.

        RequestError (naming `param`) if the text holds half of a surrogate pair, which is not Unicode text.
        """
        check_surrogates(text, param)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens and self._post_process).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, *, continuation: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        `continuation`: the ids follow others, so a leading blank that only SentencePiece's start of text would drop is kept.
        RequestError if an id is outside the vocabulary.
        """
        if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise RequestError(f"token id {wrong[0]} is out of vocabulary (0 to {self.vocab_size - 1})", param="tokens")
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        if not self.has_exact_bytes:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_blank and not continuation else text

    @property
    def has_exact_bytes(self) -> bool:
        """Whether text is the concatenation of `token_bytes`."""
        return self._kind != "opaque"

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; b"" for an id without a token (padding of the vocabulary)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._token_bytes(token_id)
        return found

    def token_str(self, token_id: int) -> str:
        """The token as readable text; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_to_id(self, token: str) -> int | None:
        """The id of a token given by its vocabulary entry, such as "<|im_end|>"; None if there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if piece is None:
            return b""
        if self._kind == "byte_level":
            codes = [_BYTE_OF.get(char, -1) for char in piece]
            return piece.encode() if -1 in codes else bytes(codes)
        if self._kind == "opaque":
            return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()


def _decoder_kind(backend: Backend) -> tuple[str, bool]:
    """("byte_level" | "pieces" | "opaque", whether decoding drops one blank at the start of a text)."""
    if backend.decoder is None:
        return "opaque", False
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if set(steps) <= {"ByteLevel", "Fuse"} and "ByteLevel" in steps:
        return "byte_level", False
    if set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "Replace" in steps:
        replace, strip = steps["Replace"], steps.get("Strip", {"content": " ", "start": 0, "stop": 0})
        plain = replace["pattern"] == {"String": _SPACE} and replace["content"] == " "
        if plain and strip["content"] == " " and strip["start"] <= 1 and strip["stop"] == 0:
            return "pieces", strip["start"] == 1
    if set(steps) == {"Metaspace"} and steps["Metaspace"]["replacement"] == _SPACE:
        return "pieces", steps["Metaspace"]["prepend_scheme"] != "never"
    return "opaque", False


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


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Every `*_token` entry, written as a string or as an added-token object."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _add_declared_tokens(backend: Backend, declared: Any, file: Path) -> None:
    """Add the tokens that only tokenizer_config.json knows, at the ids it says."""
    if not isinstance(declared, dict):
        return
    known = backend.get_added_tokens_decoder()
    for token_id, entry in sorted((int(i), entry) for i, entry in declared.items() if int(i) not in known):
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = AddedToken(entry["content"], **{flag: bool(entry.get(flag, False)) for flag in flags})
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if (actual := backend.token_to_id(token.content)) != token_id:
            raise LoadError(f"{file}: added token {token.content!r} should have id {token_id}, tokenizer.json makes it {actual}")
