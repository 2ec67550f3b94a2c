"""Stop strings: found across any cuts, minimal hold-back, false starts released. Judged against a naive search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkrt.errors import RequestError
from sparkrt.text.assembler import StopMatcher

LETTERS = st.text("abé", max_size=30)
STOPS = st.lists(st.text("abé", min_size=1, max_size=5), max_size=6)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first stop string to be complete, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text.endswith(stop, 0, end)]:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(text=LETTERS, stops=STOPS, include=st.booleans(), data=st.data())
def test_same_as_a_naive_search_for_any_cuts(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    expected, matched = naive(text, stops, include)
    matcher = StopMatcher(stops, include)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    out = ""
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        out += matcher.feed(text[a:b])
        if matcher.matched is None:
            seen = text[:b]
            held = seen[len(out) :]
            # held back is exactly the longest end of the text that begins a stop string
            waiting = [seen[i:] for i in range(len(seen)) if any(stop.startswith(seen[i:]) for stop in stops)]
            assert held == (waiting[0] if waiting else "")
    assert out + matcher.flush() == expected
    assert matcher.matched == matched


@pytest.mark.parametrize("cut", range(13))
def test_the_scripted_case(cut: int) -> None:
    text = "abcDEFGHIJkl"
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.feed(text[:cut]) + matcher.feed(text[cut:]) + matcher.flush() == "abc"
    assert matcher.matched == "DEFGHIJ"
    matcher = StopMatcher(["DEFGHx"])
    assert matcher.feed(text[:cut]) + matcher.feed(text[cut:]) + matcher.flush() == text
    assert matcher.matched is None


def test_letter_by_letter_a_false_start_is_released_as_soon_as_it_fails() -> None:
    matcher = StopMatcher(["DEFG", "EFH"])
    assert [matcher.feed(c) for c in "aDEFHb"] == ["a", "", "", "", "D", ""]
    assert matcher.matched == "EFH"
    matcher = StopMatcher(["DEFG"])
    assert [matcher.feed(c) for c in "aDEDEx"] == ["a", "", "", "DE", "", "DEx"]


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["."], include_stop=True)
    assert matcher.feed("One. Two.") == "One."
    assert matcher.feed("Three") == matcher.flush() == ""


def test_unarmed_pieces_pass() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab", armed=False) + matcher.feed("a", armed=False) + matcher.feed("b!") == "ab"
    assert matcher.matched == "ab"


def test_ten_thousand_stop_strings() -> None:
    matcher = StopMatcher([f"stop-{i:05d}!" for i in range(10_000)])
    assert matcher.feed("x stop-0777") == "x "
    assert matcher.feed("7!") == ""
    assert matcher.matched == "stop-07777!"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"
