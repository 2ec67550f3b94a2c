"""Grammars that answers must follow: built from what requests ask for, compiled and followed by `llguidance`.

A grammar travels as text, so it can be checked where requests arrive and compiled where tokens are drawn. `Grammars` compiles,
within limits on size and work, and remembers; for each answer it gives a `Guide`, and it fills their masks.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkrt.text.guide import Guide, one_line
from sparkrt.text.messages import bad
from sparkrt.text.reasoning import BEGIN, CLOSING, END, ThinkingBudget
from sparkrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

Body = dict[str, Any]
"""A grammar of llguidance: {"json_schema": ...} or {"lark_grammar": ...}."""

KINDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_CHARS, MAX_DEPTH = 256 * 1024, 64  # of a grammar; of JSON nested in it
_REMEMBERED = 128  # grammars
_MANY = 8  # masks, of some 35 µs each: fewer are filled before other threads would have begun
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


class Grammars:
    """Compiles grammars for one tokenizer. Safe to share between threads; slow things happen in the caller's."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        shown: Sequence[int] = (),
        threads: int = 1,
    ) -> None:
        """`vocab_size` may count ids without tokens, none of which is allowed. `shown`: special tokens that texts have all the
        same. So many `threads` fill masks.
        """
        self._tokenizer, self._vocab, self._eos, self._shown = tokenizer, vocab_size, list(eos_token_ids), frozenset(shown)
        self._lock, self._ready = threading.Lock(), OrderedDict[str, Any]()
        self._backend: LLTokenizer | None = None
        self._threads = threads
        self._executor: LLExecutor | None = None

    def guide(self, grammar: tuple[str, str] | None, thinking: tuple[int, bool | None] | None = None) -> Guide:
        """For one answer: a grammar and the field that asked for it, and what `ThinkingBudget` begins with. See `compile`."""
        matcher = None if grammar is None else self.compile(*grammar)
        if thinking is None:
            return Guide(matcher)
        return Guide(matcher, ThinkingBudget(*thinking, self._tokenizer.token_bytes, self._tokenizer.encode(CLOSING, False)))

    def fill(self, rows: Sequence[tuple[Guide, np.ndarray]]) -> None:
        """Write the masks of answers, rows of one table of uint32 [rows, ceil(vocab_size / 32)], many of them in parallel."""
        due = [(matcher, row.ctypes.data) for guide, row in rows if (matcher := guide.fill(row)) is not None]
        size = rows[0][1].nbytes if rows else 0
        if self._threads > 1 and len(due) >= _MANY:
            first = min(at for _, at in due)
            work = [(matcher, (at - first) // size) for matcher, at in due]
            self._workers().unsafe_compute_mask_ptr(work, first, size, max(row for _, row in work) + 1)
        else:
            for matcher, at in due:
                matcher.unsafe_compute_mask_ptr(at, size)
        for guide, _ in rows:
            guide.stale = False

    def compile(self, grammar: str, param: str = "structured_outputs") -> LLMatcher:
        """A matcher at the start of `grammar`. RequestError naming `param`: it is no grammar, too large, or not to be met."""
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if (found := self._ready.get(grammar)) is None:
                if len(grammar) > 2 * MAX_CHARS:
                    raise bad(param, "the grammar is too large")
                if not self._eos:
                    raise bad(param, "this model has no token that ends an answer")
                limits = LLParserLimits(**_LIMITS, verbose_errors=False)
                found = LLMatcher(self._open(), grammar, log_level=0, limits=limits)
                found.compute_bitmask()
                if found.is_stopped() and not found.is_accepting():
                    nothing = found.stop_reason().startswith("NoExtension")
                    why = "nothing can satisfy it" if nothing else one_line(found.get_error())
                    raise bad(param, f"cannot be enforced: {why}")
                self._ready[grammar] = found
            self._ready.move_to_end(grammar)
            if len(self._ready) > _REMEMBERED:
                self._ready.popitem(last=False)
            return found.deep_copy()

    def open(self) -> None:
        """Prepare the vocabulary now, not at the first use: of 248,000 tokens it takes 1.5 s, most of it holding the GIL."""
        with self._lock:
            if self._eos:
                self._open()

    def _workers(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._threads)
        return self._executor

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
