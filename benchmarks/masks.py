"""What it costs to fill the masks of answers that follow a grammar.

    python -m benchmarks.masks TOKENIZER [--vocab 248320] [--rows 1,8,64] [--threads 1,2,4]

TOKENIZER: a folder, such as `python -m tools.make_qwen35_tokenizer` writes. Every row writes the same JSON and is at another
place of it, as requests that came one after another are; a step is one token of each. What steps of a model cost with such rows
is measured by `python -m benchmarks.engine --masked`.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from sparkrt.text.grammar import Grammars, body_of, grammar_of
from sparkrt.text.tokenizer import Tokenizer

TEXT = {"type": "string", "maxLength": 60}
PLACE = {"type": "object", "properties": {"city": TEXT, "street": TEXT, "number": {"type": "integer"}}, "required": ["city"]}
PROPERTIES = {"name": TEXT, "tags": {"type": "array", "items": TEXT}, "at": PLACE, "size": {"enum": ["small", "large"]}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
ANSWER = {
    "name": "Café at the harbour",
    "tags": ["quiet", "fish & chips, please", "5 €", "海辺"],
    "at": {"city": "San Francisco", "street": "Pier 39", "number": 1204},
    "size": "large",
}


def steps(grammars: Grammars, rows: int, ids: list[int], words: int) -> list[float]:
    """Seconds of each step of `rows` answers."""
    grammar = grammar_of([body_of({"json": SCHEMA}, "json") or {}]), "json"
    table = np.zeros((rows, words), np.uint32)
    guides, places, seconds = [grammars.guide(grammar) for _ in range(rows)], [row % len(ids) for row in range(rows)], []
    for guide, place in zip(guides, places, strict=True):
        for token in ids[:place]:
            guide.advance(token)
    for _ in range(3 * len(ids)):
        began = perf_counter()
        for row, guide in enumerate(guides):
            if places[row] == len(ids):
                guides[row], places[row] = grammars.guide(grammar), 0
            else:
                guide.advance(ids[places[row]])
                places[row] += 1
        grammars.fill([*zip(guides, table, strict=True)])
        seconds.append(perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: Any = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("tokenizer")
    parser.add_argument("--vocab", type=int, help="ids of the model (default: the tokenizer's)")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    args = parser.parse_args()
    tokenizer = Tokenizer.from_folder(args.tokenizer)
    vocab = args.vocab or tokenizer.vocab_size
    ids, words = tokenizer.encode(json.dumps(ANSWER, ensure_ascii=False), False), -(-vocab // 32)
    print(f"{vocab} tokens, {len(ids)} of them in the answer")
    for threads in args.threads:
        grammars = Grammars(tokenizer, vocab, tokenizer.eos_token_ids, threads=threads)
        began = perf_counter()
        grammars.open()
        print(f"vocabulary prepared in {perf_counter() - began:.2f} s")
        for rows in args.rows:
            times = sorted(steps(grammars, rows, ids, words))
            shown = median(times), times[len(times) * 99 // 100]
            print(f"{rows:3} rows, {threads} threads: {shown[0] * 1e3:.3f} ms a step, 99th percentile {shown[1] * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
