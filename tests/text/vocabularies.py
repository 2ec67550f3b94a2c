"""Two small tokenizers, one of each way of decoding: byte-level, and pieces with byte fallback."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from sparkrt.text.tokenizer import Tokenizer

TINY = Path(__file__).parent.parent.parent / "sparkrt" / "assets" / "sparkrt-tiny"


@cache
def tiny() -> Tokenizer:
    """The bundled tokenizer: byte-level BPE."""
    return Tokenizer.from_folder(TINY)


def pieces_metadata() -> dict[str, Any]:
    """GGUF metadata of a SentencePiece vocabulary: <unk> <s> </s>, 256 bytes, a few pieces."""
    word = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *word]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(word)],
        "tokenizer.ggml.scores": [*[0.0] * 259, *(-float(i) for i in range(len(word)))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@cache
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(pieces_metadata())
