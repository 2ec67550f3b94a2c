"""Ask, then let it call a tool: `python examples/chat.py [MODEL]`."""

from __future__ import annotations

import sys

from sparkrt import LLM, SamplingParams

weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
params = SamplingParams(temperature=0, max_tokens=80)

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for question, tools in (("Hello!", None), ("What is the weather in Paris?", [weather])):
        (result,) = llm.chat([{"role": "user", "content": question}], params, tools=tools, use_tqdm=False)
        print(f"> {question}\n{result.outputs[0].text}\n")
