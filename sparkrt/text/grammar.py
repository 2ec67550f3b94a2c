"""Grammars that answers must follow: built from what requests ask for, compiled and followed by `llguidance`.

A grammar travels as text, so it can be checked where requests arrive and compiled where tokens are drawn. `Grammars` compiles,
within limits on size and work, and remembers; `Matcher` says which tokens may come next.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkrt.text.messages import bad
from sparkrt.text.reasoning import BEGIN, END
from sparkrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

Body = dict[str, Any]
"""A grammar of llguidance: {"json_schema": ...} or {"lark_grammar": ...}."""

KINDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_CHARS, MAX_DEPTH = 256 * 1024, 64  # of a grammar; of JSON nested in it
_REMEMBERED = 128  # grammars
# On one line, with a blank after commas and colons or without: where any blanks may come, small models never come to their end.
_SPACE = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
# llguidance measures work in "fuel"; these bound compiling and a mask to some 20 ms each, ten times what real schemas take
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
}


def body_of(asked: Any, param: str) -> Body | None:
    """The grammar of a `structured_outputs` object: one of `KINDS` with its value. RequestError names the field at fault."""
    if asked is None:
        return None
    if not isinstance(asked, Mapping):
        raise bad(param, f"expected an object with one of {', '.join(KINDS)}")
    given = {kind: value for kind, value in asked.items() if value is not None and (kind, value) != ("json_object", False)}
    if unknown := sorted(given.keys() - {*KINDS}):
        raise bad(f"{param}.{unknown[0]}", f"not supported; expected one of {', '.join(KINDS)}")
    if len(given) > 1:
        raise bad(param, f"{' and '.join(given)} exclude each other")
    for kind, value in given.items():
        return structure(kind, value, f"{param}.{kind}")
    return None


def structure(kind: str, value: Any, param: str) -> Body:
    """The grammar of one of `KINDS`."""
    if kind == "json_object":
        return {"json_schema": json_schema({"type": "object"}, param)}
    if kind == "json":
        return {"json_schema": json_schema(value, param)}
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise bad(param, "expected a list of strings that are not empty")
        return {"lark_grammar": f"start: {' | '.join(map(quote, value))}"}
    if not isinstance(value, str) or not value:
        raise bad(param, "expected a string that is not empty")
    if len(value) > MAX_CHARS:
        raise bad(param, f"longer than {MAX_CHARS} characters")
    if kind == "regex":
        return {"lark_grammar": f"start: /{escape_regex(value)}/"}
    if "::=" in value:  # GBNF
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            value = any_to_lark(value)
        except Exception as error:  # the converter raises whatever comes to it
            raise bad(param, f"not a GBNF grammar: {error}") from None
    return {"lark_grammar": value}


def json_schema(schema: Any, param: str) -> Any:
    """A JSON schema, or its text, with our rules for blanks."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise bad(param, f"not valid JSON: {error if isinstance(error, ValueError) else 'nested too deep'}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise bad(param, "expected a JSON schema")
    if _depth(schema) > MAX_DEPTH:
        raise bad(param, f"nested deeper than {MAX_DEPTH} levels")
    return {**schema, "x-guidance": _SPACE}


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        parts = (v.values() if isinstance(v, Mapping) else v if isinstance(v, list) else () for v in level)
        level, depth = [item for part in parts for item in part], depth + 1
    return depth


def grammar_of(bodies: Sequence[Body], thinks: bool | None = False) -> str:
    """The text of a grammar: one of `bodies`, after thinking that the prompt has opened (True) or that may come (None)."""
    names = [f"body{index}" for index in range(len(bodies))]
    think = {True: "thought", None: "think?", False: ""}[thinks]
    start = f"start: {think} ({' | '.join(f'@{name}' for name in names)})"
    if thinks is not False:
        start += f"\nthink: BLANK {quote(BEGIN)} thought\nthought: until BLANK\nuntil[lazy]: /(?s:.*){escape_regex(END)}/"
        start += "\nBLANK: /[ \\n]{0,4}/"
    named = [{"name": name, **body} for name, body in zip(names, bodies, strict=True)]
    return json.dumps({"grammars": [{"lark_grammar": start}, *named]})


def quote(text: str) -> str:
    """As a literal of Lark, which is one of JSON."""
    return json.dumps(text)


def escape_regex(pattern: str) -> str:
    """A regular expression between slashes."""
    from llguidance import regex_to_lark

    return str(regex_to_lark(pattern))


class Matcher:
    """One answer on its way through a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        """What went wrong, in one line; empty while nothing has."""
        return _line(self._matcher.get_error())

    @property
    def stopped(self) -> bool:
        """Whether nothing can follow: the answer is complete, or there is an error."""
        return bool(self._matcher.is_stopped())

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def fill(self, bits: np.ndarray) -> None:
        """Which tokens may come next: bit i of `bits`, uint32, lowest bit first, for token i; ids beyond the vocabulary: none."""
        mask = self._matcher.compute_bitmask()
        row = bits.view("uint8")
        row[: len(mask)] = bytearray(mask)
        row[len(mask) :] = 0


class Grammars:
    """Compiles grammars for one tokenizer. Safe to share between threads; slow things happen in the caller's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], shown: Sequence[int] = ()) -> None:
        """`shown`: special tokens that are part of a text all the same."""
        self._tokenizer, self._vocab, self._eos, self._shown = tokenizer, vocab_size, list(eos_token_ids), frozenset(shown)
        self._lock, self._ready = threading.Lock(), OrderedDict[str, Any]()
        self._backend: LLTokenizer | None = None

    def compile(self, grammar: str, param: str = "structured_outputs") -> Matcher:
        """A matcher at the start of `grammar`. RequestError naming `param`: it is no grammar, too large, or not to be met."""
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if (found := self._ready.get(grammar)) is None:
                if len(grammar) > 2 * MAX_CHARS:
                    raise bad(param, "the grammar is too large")
                limits = LLParserLimits(**_LIMITS, verbose_errors=False)
                found = LLMatcher(self._open(), grammar, log_level=0, limits=limits)
                found.compute_bitmask()
                if found.is_stopped() and not found.is_accepting():
                    nothing = found.stop_reason().startswith("NoExtension")
                    raise bad(param, f"cannot be enforced: {'nothing can satisfy it' if nothing else _line(found.get_error())}")
                self._ready[grammar] = found
            self._ready.move_to_end(grammar)
            if len(self._ready) > _REMEMBERED:
                self._ready.popitem(last=False)
            return Matcher(found.deep_copy())

    def open(self) -> None:
        """Prepare the vocabulary now, not at the first use."""
        with self._lock:
            self._open()

    def _open(self) -> LLTokenizer:
        if self._backend is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            words = _Vocabulary(self._tokenizer, self._vocab, self._eos, self._shown)
            self._backend = LLTokenizer(TokenizerWrapper(words), self._vocab, self._eos)
        return self._backend


class _Vocabulary:
    """A tokenizer as llguidance wants one."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int], shown: frozenset[int]) -> None:
        self.eos_token_id = eos[0]
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted({i for i in {*tokenizer.special_ids, *eos} - shown if i < vocab_size})
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"), False)


def _line(text: str) -> str:
    """What a message says, in one short line: its first and, of a list of faults, the last; not the states that follow."""
    lines = [" ".join(line.split()) for line in text.split("<state>")[0].splitlines() if line.strip()]
    faults = [line for line in lines[1:] if line.startswith("error:")]
    return "; ".join(line if len(line) <= 200 else f"{line[:197]}..." for line in lines[:1] + faults[-1:])
