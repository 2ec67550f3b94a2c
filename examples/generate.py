"""Complete some prompts with the bundled model: `python examples/generate.py [MODEL]`."""

from __future__ import annotations

import sys

from sparkrt import LLM, SamplingParams

prompts = ["Once upon a time", "The king said to his daughter", "In the middle of the night"]
params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=40, seed=1)

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for result in llm.generate(prompts, params):
        answer = result.outputs[0]
        print(f"{result.prompt}{answer.text} [{answer.finish_reason}]\n")
