"""`StopMatcher`: finds stop strings in a stream of text and holds back only what may yet become one."""

from __future__ import annotations

from collections.abc import Sequence

from sparkrt.errors import RequestError


class StopMatcher:
    """Watches a text for the first stop string to be complete, the longest one if several end at the same character.

    The outcome depends on the text alone, not on how it was cut into pieces. An automaton over all stop strings (Aho-Corasick)
    does constant work per character however many there are, and its depth is exactly the number of characters that must wait.
    RequestError if a stop string is empty.
    """

    __slots__ = ("_depth", "_ends", "_fall", "_held", "_include", "_next", "_state", "matched")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._include = include_stop
        self.matched: str | None = None
        self._held = ""
        self._state = 0
        # state 0 is the root; a state stands for the beginning of a stop string of `_depth` characters
        self._next: list[dict[str, int]] = [{}]
        self._depth, self._ends, self._fall = [0], [0], [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def feed(self, text: str, armed: bool = True) -> str:
        """The part of the text so far that can be given out now. After a match: up to it, then nothing more.

        `armed=False` lets stop strings that end in this piece pass.
        """
        if self.matched is not None:
            return ""
        state, following, fall, ends = self._state, self._next, self._fall, self._ends
        for at, char in enumerate(text, 1):
            while state and char not in following[state]:
                state = fall[state]
            state = following[state].get(char, 0)
            if ends[state] and armed:
                whole, length = self._held + text[:at], ends[state]
                self.matched, self._held = whole[-length:], ""
                return whole if self._include else whole[:-length]
        self._state = state
        whole = self._held + text
        cut = len(whole) - self._depth[state]
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """At the end of the text: what was held back for nothing."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        if not stop:
            raise RequestError("stop: a stop string may not be empty", param="stop")
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._ends.append(0)
                self._fall.append(0)
            state = self._next[state][char]
        self._ends[state] = len(stop)

    def _link(self) -> None:
        """Where to fall back from each state: the longest shorter beginning it ends with. Breadth first, so that it is known."""
        queue = list(self._next[0].values())
        for state in queue:
            for char, child in self._next[state].items():
                queue.append(child)
                back = self._fall[state]
                while back and char not in self._next[back]:
                    back = self._fall[back]
                self._fall[child] = self._next[back].get(char, 0)
                self._ends[child] = self._ends[child] or self._ends[self._fall[child]]
