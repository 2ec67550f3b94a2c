"""`Guide`: what decides, token by token, what may come next in one answer: a grammar, a budget of thinking, or both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkrt.text.reasoning import ThinkingBudget

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher


class Guide:
    """One answer on its way. Its mask is written by `Grammars.fill`, and is `stale` when it has to be written again."""

    def __init__(self, matcher: LLMatcher | None, budget: ThinkingBudget | None = None) -> None:
        self.matcher, self.stale = matcher, True
        self._budget = budget

    @property
    def stopped(self) -> tuple[str, str | None] | None:
        """(finish_reason, error) when nothing can follow: the answer is complete, or something went wrong."""
        if self.matcher is None or not self.matcher.is_stopped():
            return None
        error = one_line(self.matcher.get_error())
        return ("error", error) if error else ("stop", None)

    def depends(self, place: int) -> bool:
        """Whether what may be the token at `place` in the answer depends on the one before."""
        return self.matcher is not None or (self._budget is not None and self._budget.depends(place))

    def advance(self, token_id: int) -> None:
        """The answer goes on with this token."""
        forced = self.forced
        if self._budget is not None:
            self._budget.advance(token_id)
        if self.matcher is not None:
            self.matcher.consume_token(token_id)
        self.stale = self.matcher is not None or forced != self.forced

    @property
    def forced(self) -> int | None:
        """The only token that may come next, whatever the grammar says; None: no such thing."""
        return None if self._budget is None else self._budget.forced

    def fill(self, bits: np.ndarray) -> LLMatcher | None:
        """Write `bits` (uint32, lowest bit first, 1 for a token that may come next), or return the grammar which decides that."""
        if (forced := self.forced) is not None:
            bits[:] = 0
            bits[forced // 32] = 1 << (forced % 32)
            return None
        if self.matcher is None:
            bits[:] = 0xFFFFFFFF
        return self.matcher


def one_line(text: str) -> str:
    """What a message says, in one short line: its first and, of a list of faults, the last; not the states that follow."""
    lines = [" ".join(line.split()) for line in text.split("<state>")[0].splitlines() if line.strip()]
    faults = [line for line in lines[1:] if line.startswith("error:")]
    return "; ".join(line if len(line) <= 200 else f"{line[:197]}..." for line in lines[:1] + faults[-1:])
