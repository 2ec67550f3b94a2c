"""Budgets of thinking: the tag is closed in time, whatever an answer says and however its tokens spell the tag."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkrt.text.guide import Guide
from sparkrt.text.reasoning import BEGIN, CLOSING, END, ThinkingBudget

PIECES = [b"a", b"<", b"/think>", b"</think", b">", b"<think>", b"\n", b"\n</think>", b" ", b"thi", b"nk>", b"</"]


def budget_of(budget: int, thinks: bool | None, closing: list[int]) -> ThinkingBudget:
    return ThinkingBudget(budget, thinks, PIECES.__getitem__, closing)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 6),
    st.sampled_from([True, False, None]),
    st.sampled_from([[6, 3, 4], [7], [6, 11, 9, 10]]),
    st.lists(st.integers(0, len(PIECES) - 1), min_size=20, max_size=20),
)
def test_thinking_ends_within_its_budget(budget: int, thinks: bool | None, closing: list[int], wants: list[int]) -> None:
    guide, answer, bits = Guide(None, budget_of(budget, thinks, closing)), list[int](), np.zeros(1, np.uint32)
    for place, wanted in enumerate(wants):
        if guide.stale:
            assert guide.fill(bits) is None
            guide.stale = False
        options = [i for i in range(len(PIECES)) if int(bits[0]) >> i & 1]
        assert len(options) in (1, len(PIECES))
        if guide.forced is not None:
            assert options == [guide.forced]
            assert guide.depends(place)  # or nobody would have read the token before it in time
        answer.append(wanted if wanted in options else options[0])
        guide.advance(answer[-1])
    so_far = ["".join(PIECES[i].decode() for i in answer[:n]) for n in range(len(answer) + 1)]
    if not thinks and (thinks is False or not so_far[-1].lstrip().startswith(BEGIN)):
        assert answer == wants
        return
    opened = 0 if thinks else next(n for n, text in enumerate(so_far) if BEGIN in text)
    closed = next(n for n, text in enumerate(so_far) if END in text)
    assert closed <= max(budget, opened) + len(closing)
    assert answer == wants or CLOSING in so_far[-1]
