"""Token ids straight from the model, one prompt and several in step: `python examples/decode_loop.py [MODEL]`."""

from __future__ import annotations

import sys
from time import perf_counter

from sparkrt import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    prompts = [llm.tokenizer.encode(text) for text in ("Once upon a time", "The king said", "Hello")]

    began = perf_counter()
    ids = list(llm.decode_loop(prompts[0], params))
    print(llm.tokenizer.decode(ids))
    print(f"{len(ids) / (perf_counter() - began):.0f} tokens/s\n", file=sys.stderr)

    with llm.decode_loop(prompts, params) as steps:
        for step, tokens in enumerate(steps):
            print(tokens)
            if step == 4:
                break  # what the loop held is given back here
