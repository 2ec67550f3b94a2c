"""Deltas joined are the whole text, however tokens are cut; no half characters on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkrt.text.assembler import Detokenizer
from sparkrt.text.tokenizer import Tokenizer
from tests.text.vocabularies import sentencepiece, tiny

HALF = "\N{REPLACEMENT CHARACTER}"
EXACT = {"byte level": tiny(), "pieces": sentencepiece()}
PIECES_OF_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def cut(ids: list[int], data: st.DataObject) -> list[list[int]]:
    """`ids` in consecutive pieces of any size, empty ones included."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stream(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.flush()]


@pytest.mark.parametrize("name", EXACT)
@given(text=PIECES_OF_TEXT, data=st.data())
def test_text_in_any_pieces(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = EXACT[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, continuation=True)
    deltas = stream(tokenizer, cut(ids, data))
    assert "".join(deltas) == whole
    assert deltas[-1] == ""
    assert all(HALF not in delta for delta in deltas) or HALF in whole


@given(text=PIECES_OF_TEXT, data=st.data())
def test_one_byte_per_token(text: str, data: st.DataObject) -> None:
    tokenizer = tiny()
    single = {tokenizer.token_bytes(i): i for i in range(256)}
    deltas = stream(tokenizer, cut([single[bytes([b])] for b in text.encode()], data))
    assert "".join(deltas) == text
    assert HALF in text or all(HALF not in delta for delta in deltas)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_any_ids_at_all(name: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = EXACT[name]
    few = st.integers(0, 258) | st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(few, max_size=30))
    assert "".join(stream(tokenizer, cut(ids, data), skip)) == tokenizer.decode(ids, skip, continuation=True)


def test_an_unfinished_character_waits_and_is_flushed_as_in_the_whole_text() -> None:
    tokenizer = tiny()
    single = {tokenizer.token_bytes(i): i for i in range(256)}
    ids = [single[bytes([b])] for b in "é👩".encode()[:-1]]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.feed([i]) for i in ids] == ["", "é", "", "", ""]
    assert detokenizer.flush() == HALF
    assert tokenizer.decode(ids) == "é" + HALF


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = tiny()
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>")
    assert "".join(stream(tokenizer, [ids])) == "a<think>b"
    assert "".join(stream(tokenizer, [ids], skip=False)) == "<|im_start|>a<think>b<|im_end|>"


def test_padding_ids_of_the_vocabulary_add_nothing() -> None:
    assert "".join(stream(tiny(), [[6143, 64, 6140]])) == tiny().decode([64])
