"""Inputs that nobody would think of, for everything that reads what strangers send: no crash, no hang, only our own errors.

    python -m tools.fuzz [--minutes 10] [--only TARGET,...] [--seed N]

The minutes are shared by the targets. What fails is shrunk by hypothesis and printed, and the exit status is 1. A single example
may take PATIENCE seconds, and the process so much memory; beyond that it has failed, too.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sparkrt.engine.messages import ModelInfo
from sparkrt.engine.params import SamplingParams, to_requests
from sparkrt.errors import LoadError, RequestError
from sparkrt.model.loading.gguf import GgufStore
from sparkrt.model.loading.safetensors import read_header
from sparkrt.serve import protocol as p
from sparkrt.serve.chat import tool_choice
from sparkrt.serve.http import decode
from sparkrt.serve.structured import asked_structure
from sparkrt.text.assembler import TextAssembler
from sparkrt.text.grammar import Grammars, body_of, grammar_of
from sparkrt.text.reasoning import ReasoningFormat, ThoughtCounter
from sparkrt.text.reply import ReplyParser
from sparkrt.text.template import ChatTemplate, check_kwargs
from sparkrt.text.tokenizer import Tokenizer
from sparkrt.text.tools import FORMATS, tool_format
from sparkrt.text.tools.calls import Tool, read_tools

PATIENCE, MEMORY = 30, 6 * 2**30  # s, bytes
TINY = Path(__file__).parent.parent / "sparkrt" / "assets" / "sparkrt-tiny"
TOKENIZER = Tokenizer.from_folder(TINY)
BUNDLED = ChatTemplate.from_folder(TINY, TOKENIZER)
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_token_ids)
INFO = ModelInfo(
    name="x", architecture="X", dtype="float32", device="host", max_model_len=512, vocab_size=6137, eos_token_ids=[1]
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["\ud800", "a" * 5000])
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)
TAGS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=a>", "<|"),
    *("<parameter=", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}", '{"name": "f", "arguments": {'),
    *('{"name": "f", "parameters": {', '"a": ', '"a\\n\\u00e9"', '"\\', "\\ud83d", "\\u12", "}}", ",", ":", '"', "\n", " ", "<"),
    *("1.0", "-1e999", "true", "null", "None", "é", "🎉", "word", "f", "<|python_tag|>", ";", '"name": "f"', "\x00", "\u2028"),
]
TEXTS = st.lists(st.sampled_from(TAGS) | st.text(max_size=5), max_size=30).map("".join)
SCHEMA = {"type": "object", "properties": {"a": {"type": ["integer", "null"]}, "b": {"type": "string"}, "c": {}}}


def cut(text: Any, places: set[int]) -> list[Any]:
    ends = sorted(min(place, len(text)) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def parsers(data: st.DataObject) -> None:
    """Thinking, content and calls do not depend on how a text was cut, and arguments of whole calls are JSON."""
    text, places = data.draw(TEXTS), data.draw(st.sets(st.integers(0, 200), max_size=12))
    name, thinks = data.draw(st.sampled_from(list(FORMATS))), data.draw(st.sampled_from([None, True, False]))
    ended = data.draw(st.booleans())

    def read(pieces: list[str]) -> tuple[str, str, list[tuple[int, str]]]:
        parser = ReplyParser(ReasoningFormat(), thinks, tool_format(name, ""), [Tool("f", SCHEMA)])
        deltas = [*map(parser.feed, pieces), parser.flush(cut=not ended)]
        calls: dict[int, str] = {}
        for call in [call for delta in deltas for call in delta.calls]:
            calls[call.index] = calls.get(call.index, "") + call.arguments
        return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), sorted(calls.items())

    whole = read([text])
    assert read(cut(text, places)) == whole
    assert read(list(text)) == whole
    for _, arguments in whole[2] if ended else ():
        assert isinstance(json.loads(arguments), dict)


def detokenizer(data: st.DataObject) -> None:
    """A stream of tokens gives the text of the whole, stop strings or not, and no half characters on the way."""
    ids = data.draw(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
    ids += TOKENIZER.encode(data.draw(TEXTS), False)
    stops = data.draw(st.lists(st.text(min_size=1, max_size=4) | st.sampled_from(TAGS), max_size=4))
    more = {"include_stop_str_in_output": data.draw(st.booleans()), "skip_special_tokens": data.draw(st.booleans())}
    places = data.draw(st.sets(st.integers(0, 80), max_size=20))

    def read(pieces: list[list[int]]) -> tuple[str, str | None, int]:
        assembler = TextAssembler(TOKENIZER, stops, min_tokens=0, **more)
        deltas = [*map(assembler.feed, pieces), assembler.flush()]
        return "".join(d.text for d in deltas), deltas[-1].stop_reason, deltas[-1].tokens_used

    assert read(cut(ids, places)) == read([ids]) == read([[token] for token in ids])
    counter = ThoughtCounter(data.draw(st.sampled_from([None, True, False])), TOKENIZER.token_bytes)
    assert sum(counter.count(ids[:n]) >= 0 for n in range(len(ids))) == len(ids)


SNIPPETS = [
    *(
        "{{ messages }}",
        "{{ messages[0].content",
        "}}",
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if tools %}",
        "{% endif %}",
    ),
    *("{{ m.role ~ m.content }}", "{% set ns = namespace(x='a') %}", "{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x = ns.x * 9 %}"),
    *("{% for i in range(50) %}", "{{ ns.x | replace('a', 'aa' * 99) }}", "{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x | tojson }}"),
    *(
        "{% macro f(n) %}",
        "{{ f(1) }}",
        "{% endmacro %}",
        "{{ '%99d' % 5 }}",
        "{{ ''.__class__ }}",
        "{{ (''|attr('__class__')) }}",
    ),
    *("{{ 'x'.center(9 ** 9) }}", "{{ ns.x | batch(99999) | list }}", "{{ '{0.x}'.format(ns) }}", "{{ ns }}", "{{ self }}"),
    *(
        "{% set x %}",
        "{% endset %}",
        "{{ x | map('upper') | join(ns.x) }}",
        "{{ 7 ** 7 ** 7 }}",
        "{{ loop.__init__ }}",
        "{%- endif -%}",
    ),
    *("{% else %}", "{% break %}", "{{ raise_exception('no') }}", "{{ strftime_now('%Y' * 9) }}", "{# ", " #}", "{{", "{%", "%}"),
    *("{{ messages | sort(attribute='role') }}", "{{ cycler(1, 2).__init__.__globals__ }}", "{{ dict(a=ns.x) | items | list }}"),
    *("{% generation %}", "{% endgeneration %}", "{{ ns.x | indent(900) | wordwrap(1) }}", "{{ joiner }}", "{{ ns.x[::-1] }}"),
]
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES | JSON, "content": TEXTS | JSON}, optional={"tool_calls": JSON}), max_size=4
)


def templates(data: st.DataObject) -> None:
    """Any template over any messages is rendered or refused."""
    text = "\n".join(data.draw(st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=9), max_size=14)))
    messages, more = data.draw(MESSAGES), data.draw(st.dictionaries(st.text(max_size=9), JSON, max_size=3))
    with suppress(RequestError, LoadError):
        assert "<class" not in ChatTemplate({"default": text}, {"bos_token": "<s>"}).render(messages)
    with suppress(RequestError):
        check_kwargs(more)
        BUNDLED.render(messages, data.draw(JSON), **more)


KINDS = [p.ChatBody, p.CompletionBody, p.MessagesBody, p.TokenizeBody, p.DetokenizeBody, p.CountTokensBody]
FIELDS = sorted({name for kind in KINDS for name in kind.__struct_fields__} | {"suffix", "audio", "echo", "x"})


def requests(data: st.DataObject) -> None:
    """Any bytes become a request or an error of ours: decoded, checked, with what it asks for in tools and structure read."""
    kind = data.draw(st.sampled_from(KINDS))
    values = JSON | st.integers(-3, 300) | st.lists(st.integers(-3, 7000), max_size=5) | MESSAGES
    body = data.draw(st.dictionaries(st.sampled_from(FIELDS), values, max_size=6))
    body |= data.draw(st.sampled_from([{}, {"messages": [{"role": "user", "content": "x"}]}, {"prompt": "x", "tokens": [5]}]))
    raw = json.dumps(body).encode()
    if data.draw(st.booleans()):
        raw = mutated(data, raw)
    with suppress(RequestError):
        found = decode(raw, kind)
        if kind is p.ChatBody or kind is p.CompletionBody:
            asked_structure(found)
            if kind is p.ChatBody:
                tool_choice(found)
            given = {name: getattr(found, name) for name in p.SAMPLING_FIELDS}
            to_requests([5], SamplingParams.from_optional({}, **given), INFO, "x", priority=found.priority, thinks=None)


def mutated(data: st.DataObject, raw: bytes) -> bytes:
    """With some bytes changed, removed and put in."""
    content = bytearray(raw)
    for place, new in data.draw(st.lists(st.tuples(st.integers(0, 2**16), st.binary(max_size=9)), max_size=6)):
        at = place % (len(content) + 1)
        content[at : at + len(new) * (place & 1)] = new
    return bytes(content)


def _gguf() -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama"), text("a.b") + struct.pack("<Ii", 5, -7)]
    keys += [text("list") + struct.pack("<IIQ3B", 9, 0, 3, 1, 2, 3), text("names") + struct.pack("<IIQ", 9, 8, 1) + text("x")]
    tensors = [text(f"t{i}") + struct.pack("<I2QIQ", 2, 32, 2, kind, 64 * 8 * i) for i, kind in enumerate((0, 8))]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    return header + bytes(-len(header) % 32) + bytes(64 * 4 + 64 * 4 + 68)


def _safetensors() -> bytes:
    tensors = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "b": {"dtype": "BF16", "shape": [3]}}
    tensors["b"]["data_offsets"] = [16, 22]
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(22)


FILES: list[tuple[bytes, Callable[[Path], Any]]] = [(_gguf(), GgufStore), (_safetensors(), read_header)]


def headers(data: st.DataObject) -> None:
    """A damaged GGUF or safetensors file is read or refused."""
    content, read = data.draw(st.sampled_from(FILES))
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(mutated(data, content)[: data.draw(st.integers(0, 2 * len(content)))])
        file.flush()
        with suppress(LoadError):
            found = read(Path(file.name))
            if isinstance(found, GgufStore):
                Tokenizer.from_gguf(found.metadata)


ATOMS = st.sampled_from(
    ["a", "[a-z]", r"\d", ".", "(", ")", "|", "*", "+", "?", "{2,9}", "{0,99999}", "(?:", "^", "$", r"\b", "[^", "é"]
)
TYPES = st.sampled_from(["string", "integer", "number", "object", "array", "boolean", "null", "x"])
SCHEMAS = st.recursive(
    st.fixed_dictionaries(
        {}, optional={"type": TYPES, "pattern": st.lists(ATOMS, max_size=8).map("".join), "enum": st.lists(JSON)}
    ),
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(["object", "array"])},
        optional={
            "properties": st.dictionaries(st.text(max_size=4), inner, max_size=3),
            "items": inner,
            "anyOf": st.lists(inner, max_size=3),
            "$ref": st.sampled_from(["#", "#/$defs/a", "x"]),
            "$defs": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
            "required": st.lists(st.text(max_size=4), max_size=2),
            "minItems": st.integers(-1, 10**9),
            "maxLength": st.integers(-1, 10**9),
        },
    ),
    max_leaves=6,
)


def grammars(data: st.DataObject) -> None:
    """Any schema or expression is compiled or refused, soon; what tools ask for, too, and the first masks are filled."""
    kind = data.draw(st.sampled_from(["json", "regex", "grammar", "choice", "tools"]))
    if kind == "tools":
        tools = [{"function": {"name": "f", "parameters": data.draw(SCHEMAS | JSON), "strict": data.draw(st.booleans())}}]
    value = data.draw(
        {
            "json": SCHEMAS | JSON,
            "regex": st.lists(ATOMS, max_size=14).map("".join),
            "grammar": st.lists(
                st.sampled_from(["start: ", "a", ":", "|", "/x/", '"y"', "\n", "%json {}", "root ::= ", "(", ")*"])
            ).map("".join),
            "choice": st.lists(st.text(max_size=5), max_size=4),
            "tools": st.sampled_from(list(FORMATS)),
        }[kind]
    )
    with suppress(RequestError):
        if kind == "tools":
            found, form = read_tools(tools), FORMATS[value]("")
            body = {"lark_grammar": form.free_grammar(found, True, True) if found[0].strict else form.grammar(found, True)}
        else:
            body = body_of({kind: value}, "x") or {}
        guide = GRAMMARS.guide((grammar_of([body]), "x"))
        rng, row = random.Random(0), np.zeros(-(-TOKENIZER.vocab_size // 32), np.uint32)
        for _ in range(8):
            GRAMMARS.fill([(guide, row)])
            allowed = [i for i in rng.sample(range(TOKENIZER.vocab_size), 2000) if row[i // 32] >> (i % 32) & 1]
            if guide.stopped or not allowed:
                break
            guide.advance(allowed[0])


TARGETS: dict[str, Callable[[st.DataObject], None]] = {
    target.__name__: target for target in (parsers, detokenizer, templates, requests, headers, grammars)
}


def run(name: str, examples: int, start: int) -> None:
    """Try so many inputs on a target. Raises what it fails with, after hypothesis has printed the smallest input that does."""
    quick = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )

    def test(data: st.DataObject) -> None:
        signal.alarm(PATIENCE)
        try:
            TARGETS[name](data)
        finally:
            signal.alarm(0)

    seed(start)(quick(given(st.data())(test)))()


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"an example took more than {PATIENCE} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default=",".join(TARGETS))
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    names, rng, failed = args.only.split(","), random.Random(args.seed), list[str]()
    for name in names:
        began, tried = time.monotonic(), 0
        while time.monotonic() - began < args.minutes * 60 / len(names):
            try:
                run(name, 200, rng.randrange(2**32))
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                failed.append(name)
                break
            tried += 200
        print(f"{name}: {tried} inputs in {time.monotonic() - began:.0f} s{', FAILED' if name in failed else ''}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
