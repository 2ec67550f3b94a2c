"""An answer's text: the same streamed or not, stop strings across tokens, and how many tokens belong to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkrt.text.assembler import Delta, TextAssembler
from tests.text.test_detokenizer import cut
from tests.text.vocabularies import tiny


def letters(text: str) -> list[int]:
    """One token per byte."""
    single = {tiny().token_bytes(i): i for i in range(256)}
    return [single[bytes([b])] for b in text.encode()]


@given(data=st.data(), include=st.booleans(), skip=st.booleans(), least=st.integers(0, 6))
def test_streamed_equals_whole(data: st.DataObject, include: bool, skip: bool, least: int) -> None:
    text = data.draw(st.text("ab é<", max_size=20))
    stops = data.draw(st.lists(st.text("ab é<|", min_size=1, max_size=4), max_size=4))
    ids = data.draw(st.sampled_from([letters(text), tiny().encode(text)])) + data.draw(st.sampled_from([[], [6130], [200]]))

    def run(pieces: list[list[int]]) -> tuple[str, bool, str | None, int]:
        assembler = TextAssembler(tiny(), stops, include_stop_str_in_output=include, skip_special_tokens=skip, min_tokens=least)
        deltas = [assembler.feed(piece) for piece in pieces]
        deltas.append(assembler.flush())
        last = deltas[-1]
        return "".join(delta.text for delta in deltas), last.finished, last.stop_reason, last.tokens_used

    whole = run([ids])
    assert run(cut(ids, data)) == run([[i] for i in ids]) == whole
    text, finished, reason, used = whole
    if not finished:
        assert (text, used) == (tiny().decode(ids, skip), len(ids))
    else:
        full = tiny().decode(ids, skip)
        assert reason in stops
        assert full.startswith(text)
        assert used > least or used == len(ids)
        assert text.endswith(reason or "") if include else full.startswith(text + (reason or ""))


def test_usage_counts_to_the_token_that_completes_the_stop_string() -> None:
    assembler = TextAssembler(tiny(), ["DEF"])
    assert assembler.feed(letters("abcDE")) == Delta("abc", False, None, 5)
    assert assembler.feed(letters("Fghi")) == Delta("", True, "DEF", 6)
    assert assembler.feed(letters("jkl")) == Delta("", True, "DEF", 6)
    assert assembler.flush() == Delta("", True, "DEF", 6)


def test_a_stop_token_counts_and_is_not_shown() -> None:
    for stop in ((), ("never",)):
        for ids, token in ((letters("ab."), letters(".")[0]), ([*letters("ab"), 6130], 6130)):
            assembler = TextAssembler(tiny(), stop, skip_special_tokens=False)
            assert assembler.feed(ids, stop_token=token) == Delta("ab", False, None, 3)
            shown = TextAssembler(tiny(), stop, skip_special_tokens=False, include_stop_str_in_output=True)
            assert shown.feed(ids, stop_token=token).text == tiny().decode(ids, False)


def test_a_stop_string_before_the_stop_token_wins() -> None:
    assembler = TextAssembler(tiny(), ["b"])
    assert assembler.feed([*letters("abc"), 6130], stop_token=6130) == Delta("a", True, "b", 2)


def test_held_text_is_released_at_the_end() -> None:
    assembler = TextAssembler(tiny(), ["DEFG"])
    assert assembler.feed(letters("abDEF")) == Delta("ab", False, None, 5)
    assert assembler.flush() == Delta("DEF", False, None, 5)


def test_stop_strings_wait_for_min_tokens() -> None:
    assembler = TextAssembler(tiny(), ["a"], min_tokens=2)
    assert assembler.feed(letters("aabab")) == Delta("aab", True, "a", 4)


def test_half_a_character_before_a_stop_string() -> None:
    ids = [*letters("é")[:1], *letters("x!y")]
    assembler = TextAssembler(tiny(), ["!"])
    assert assembler.feed(ids) == Delta("\N{REPLACEMENT CHARACTER}x", True, "!", 3)
