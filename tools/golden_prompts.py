"""The twelve prompts of the sparkrt-tiny goldens: chats (system, tools, several turns, a word problem) and plain text."""

from __future__ import annotations

from typing import Any


def _function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _chat(*turns: tuple[str, str], tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


WEATHER = _function("GetWeather", "Get the weather of a certain location on a date", city="Name of the city", date="Date")
RESTAURANT = _function("FindRestaurants", "Find a restaurant of a particular cuisine in a city", city="City", cuisine="Cuisine")
CALL = {"type": "function", "id": "call_1", "function": {"name": "GetWeather", "arguments": {"city": "Oslo", "date": "tomorrow"}}}
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "What will the weather be like in Oslo tomorrow?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"temperature": "54", "precipitation": "20", "wind": "9"}'},
]
STORY = (
    "Once upon a time there was an old miller who lived by the river with his three sons. The eldest was strong, the second "
    "was clever, and the youngest was kind to every creature that came to the door. One winter the river froze so hard that "
    "the wheel stood still, and there was no more bread in the house. "
)

PROMPTS: dict[str, dict[str, Any]] = {
    "hello": _chat(("user", "Hello!")),
    "system": _chat(("system", "You are a helpful assistant."), ("user", "Can you help me find a place to eat tonight?")),
    "weather tool": _chat(("user", "What is the weather like in Paris today?"), tools=[WEATHER]),
    "word problem": _chat(("user", "Tom has 12 apples. He gives 4 to Anna and buys 7 more. How many apples does Tom have now?")),
    "booking": _chat(
        ("user", "I want to book a table at a restaurant."),
        ("assistant", "In which city should I look, and what kind of food would you like?"),
        ("user", "Something Italian in San Jose, please."),
        tools=[RESTAURANT, WEATHER],
    ),
    "tool result": {"messages": TOOL_TURNS, "tools": [WEATHER]},
    "story": {"text": "Once upon a time"},
    "unicode": {"text": "Café naïve – “quotes” … 東京 は 日本 の 首都 です。 Привет, мир! 🙂👩‍🚀 ﷽ ß"},
    "one token": {"text": "The"},
    "list": {"text": "1. First, wash the rice.\n2. Then,"},
    "long": {"text": STORY * 4 + "Then the youngest said:"},
    "long chat": _chat(("system", "Answer briefly."), ("user", "Please tell me what happens in this tale.\n\n" + STORY * 2)),
}
