"""/v1/responses through the `openai` client: against the bundled model, and an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from sparkrt.serve import protocol as p
from tests.serve.harness import PATIENCE, Server, running
from tests.serve.test_disconnects import LONG, send, wait_running
from tests.serve.test_openai_client import HELLO, MODEL
from tests.serve.test_replies import SCRIPT, THOUGHT

RESPONSES = "/v1/responses"
WEATHER: Any = {
    "type": "function",
    "name": "GetWeather",
    "description": "Get the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
TOOLS: Any = [
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    {"type": "function", "name": "g", "parameters": None},
]
ALL = SCRIPT + " So it is."  # thinking, text, two calls, and text again


@pytest.fixture
def teller(echo: Server) -> Iterator[OpenAI]:
    """A client of the engine that says what it is told to."""
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def shape(response: Any) -> list[tuple[str, str, str | None]]:
    """(type, what it says, status) of each item."""
    found = []
    for item in response.output:
        said = item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)
        found.append((item.type, said, item.status))
    return found


def ask(client: OpenAI, **body: Any) -> Any:
    """The response, the same whole and streamed, with events that put it together exactly."""
    body = {"model": MODEL, "temperature": 0, **body}
    whole = client.responses.create(**body)
    events: list[Any] = list(client.responses.create(**body, stream=True))
    check_events(events)
    streamed = events[-1].response
    assert shape(streamed) == shape(whole)
    assert (streamed.status, streamed.incomplete_details) == (whole.status, whole.incomplete_details)
    first, second = ({**r.usage.to_dict(), "input_tokens_details": 0} for r in (whole, streamed))
    assert first == second  # where its prompt came from may differ
    return whole


def check_events(events: list[Any]) -> None:
    """Every item begins, grows and ends before the next one, and what is told at the end is what was told on the way."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all((e.response.status, e.response.output, e.response.usage) == ("in_progress", [], None) for e in events[:2])
    final, items, at = events[-1].response, [], 2
    assert events[-1].type == f"response.{final.status}"
    while at < len(events) - 1:
        added, index = events[at], len(items)
        assert (added.type, added.output_index, added.item.status) == ("response.output_item.added", index, "in_progress")
        kind = {"reasoning": "reasoning_text", "message": "output_text"}.get(added.item.type, "function_call_arguments")
        end = next(i for i in range(at, len(events)) if events[i].type == "response.output_item.done")
        inner = events[at + 1 : end]
        assert {(event.item_id, event.output_index) for event in inner} == {(added.item.id, index)}
        if added.item.type != "function_call":
            assert [inner[0].type, inner[-1].type] == ["response.content_part.added", "response.content_part.done"]
            assert added.item.content == []
            assert inner[-1].part.to_dict() == events[end].item.content[0].to_dict()
            inner = inner[1:-1]
        *deltas, done = inner
        assert {event.type for event in deltas} <= {f"response.{kind}.delta"}
        assert done.type == f"response.{kind}.done"
        said = "".join(event.delta for event in deltas)
        assert said == (done.arguments if kind == "function_call_arguments" else done.text)
        if kind == "output_text":
            told = [row for event in deltas for row in event.logprobs]
            assert [row.to_dict() for row in told] == [row.to_dict() for row in done.logprobs]
        items.append(events[end].item)
        at = end + 1
    assert [item.to_dict() for item in items] == [item.to_dict() for item in final.output]


def test_text(client: OpenAI) -> None:
    response = ask(client, input="Hello!")
    assert response.output_text == HELLO
    assert (response.object, response.status, response.error, response.incomplete_details) == (
        "response",
        "completed",
        None,
        None,
    )
    assert response.id.startswith("resp_")
    [item] = response.output
    assert item.id.startswith("msg_")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    count = client.responses.input_tokens.count(model=MODEL, input="Hello!")
    assert (count.object, count.input_tokens) == ("response.input_tokens", response.usage.input_tokens)


def test_what_was_asked_for_is_told(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 2,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "none",
        "tools": [WEATHER],
        "top_p": 0.5,
        "truncation": "disabled",
        "user": "somebody",
        "prompt_cache_key": "key",
        "safety_identifier": "id",
    }
    response = client.responses.create(model=MODEL, input="Hello!", **asked).to_dict()
    assert {name: response[name] for name in asked} == {**asked, "reasoning": {"effort": "low", "summary": None}}
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_each_way_to_say_the_same(client: OpenAI) -> None:
    """Strings, parts, roles and instructions; an answer that is sent back, whole or by its id."""

    def count(given: Any, **more: Any) -> int:
        return client.responses.input_tokens.count(model=MODEL, input=given, **more).input_tokens

    text = "Hello!"
    same: list[Any] = [
        text,
        [{"role": "user", "content": text}],
        [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo!"}],
            }
        ],
    ]
    assert len({count(given) for given in same}) == 1
    system = [[{"role": role, "content": "Be brief.\n\nBe kind."}, *same[1]] for role in ("system", "developer")]
    told = [count(given) for given in system]
    told.append(count([{"role": "developer", "content": "Be kind."}, *same[1]], instructions="Be brief."))
    told.append(count([{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}, *same[1]]))
    assert len(set(told)) == 1
    assert told[0] > count(text)
    first = client.responses.create(model=MODEL, input=text, temperature=0)
    again = {"role": "user", "content": "And now?"}
    by_id = {"type": "item_reference", "id": first.output[0].id}
    told = [
        count([*same[1], item, again]) for item in (first.output[0].to_dict(), by_id, {"role": "assistant", "content": HELLO})
    ]
    told.append(count([again], previous_response_id=first.id))
    assert len(set(told)) == 1


def test_a_conversation(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hello!", temperature=0, instructions="Be brief.")
    asked: Any = {"model": MODEL, "input": "I want to book a table at a restaurant.", "temperature": 0}
    second = client.responses.create(**asked, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0 or second.usage.input_tokens < 64
    turns = [item.to_dict() for item in client.responses.input_items.list(second.id, order="asc")]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]  # instructions are not carried over
    assert turns[1]["content"][0]["text"] == first.output_text
    for turn in turns:
        turn.pop("id")
    whole = client.responses.create(model=MODEL, input=turns, temperature=0, store=False)
    assert whole.output_text == second.output_text
    pages = client.responses.input_items.list(second.id, limit=2)
    ids = [item.id for item in pages]  # the client asks for the next page by itself
    assert ids == [item.id for item in client.responses.input_items.list(second.id, order="asc")][::-1]
    assert len(ids) == 3


def test_stored_and_forgotten(client: OpenAI, tiny: Server) -> None:
    response = client.responses.create(model=MODEL, input="Hello!", temperature=0)
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    child = client.responses.create(model=MODEL, input="Hello!", previous_response_id=response.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(response.id)
    assert tiny.http.delete(f"{RESPONSES}/{response.id}").json() == {"id": response.id, "object": "response", "deleted": True}
    assert len(list(client.responses.input_items.list(child.id))) == 3  # they belong to the child, too
    unstored = client.responses.create(model=MODEL, input="Hello!", store=False)
    for name in (response.id, unstored.id, "resp_unheard_of"):
        use = client.responses
        for lost in (use.retrieve, use.delete, use.cancel, use.input_items.list):
            with pytest.raises(openai.NotFoundError) as missing:
                lost(name)
            assert missing.value.param == "response_id"
        with pytest.raises(openai.BadRequestError) as previous:
            client.responses.create(model=MODEL, input="a", previous_response_id=name)
        assert (previous.value.param, previous.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": response.output[0].id}])
    for query in ("limit=0", "limit=x", "limit=101", "order=up", "after=nobody"):
        answer = tiny.http.get(f"{RESPONSES}/{child.id}/input_items?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=")[0])
    assert tiny.http.get(f"{RESPONSES}/{child.id}?stream=true").status_code == 400


def test_tools(client: OpenAI) -> None:
    """A call, its output, and the answer: with the earlier turns sent again, and with them remembered."""
    asked: Any = {"input": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": [WEATHER]}
    response = ask(client, **asked)
    [call] = [item for item in response.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("GetWeather", {"city": "Paris"})
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'}
    sent = ask(client, **{**asked, "input": [*asked["input"], *(item.to_dict() for item in response.output), output]})
    kept = ask(client, **{**asked, "input": [output]}, previous_response_id=response.id)
    assert sent.output_text == kept.output_text != ""
    assert "function_call" not in {item.type for item in sent.output}
    hello = {"input": "Hello!", "tools": [WEATHER]}
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "GetWeather"}]}
    for choice in ("required", {"type": "function", "name": "GetWeather"}, some):
        forced = ask(client, **hello, tool_choice=choice, parallel_tool_calls=False)
        assert [(item.type, item.name) for item in forced.output] == [("function_call", "GetWeather")]
        jsonschema.validate(json.loads(forced.output[0].arguments), WEATHER["parameters"])
        assert forced.status == "completed"
    assert ask(client, **hello, tool_choice="none").output_text


class Booking(BaseModel):
    seats: Literal[2, 4]
    name: Literal["Ann", "Bob"]


def test_structured_outputs(client: OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="I want to book a table.", text_format=Booking, temperature=0)
    assert isinstance(parsed.output_parsed, Booking)
    with client.responses.stream(model=MODEL, input="I want to book a table.", text_format=Booking, temperature=0) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    schema = Booking.model_json_schema()
    text: Any = {"format": {"type": "json_schema", "name": "booking", "schema": schema, "strict": True}}
    response = ask(client, input="Hello!", text=text)
    jsonschema.validate(json.loads(response.output_text), schema)
    assert response.text.format.to_dict() == text["format"]
    assert ask(client, input="Hello!", text={"format": {"type": "json_object"}}, max_output_tokens=1).output_text.startswith("{")


def test_other_ways_to_ask_for_a_structure(client: OpenAI) -> None:
    for more, said in (({"guided_choice": ["left"]}, "left"), ({"structured_outputs": {"regex": "a{3}"}}, "aaa")):
        assert ask(client, input="Hello!", extra_body=more).output_text == said
    text: Any = {"format": {"type": "json_object"}}
    with pytest.raises(openai.BadRequestError) as both:
        client.responses.create(model=MODEL, input="Hello!", text=text, extra_body={"guided_choice": ["left"]})
    assert both.value.param == "text.format"


def test_log_probabilities(client: OpenAI) -> None:
    include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    [item] = ask(client, input="Hello!", include=include, top_logprobs=2).output
    rows = item.content[0].logprobs
    assert "".join(row.token for row in rows) == HELLO
    assert b"".join(bytes(row.bytes) for row in rows) == HELLO.encode()
    assert all(len(row.top_logprobs) == 2 and row.top_logprobs[0].logprob == row.logprob for row in rows)
    [without] = ask(client, input="Hello!", top_logprobs=2).output
    assert without.content[0].logprobs == []


def test_every_kind_of_item(teller: OpenAI) -> None:
    """In the order they come, also text after calls; thinking counts, and has no log-probabilities."""
    for text in (f"⟪{ALL}⟫", f"⟦{ALL}⟧"):
        response = ask(teller, input=text, tools=TOOLS, include=["message.output_text.logprobs"])
        assert shape(response) == [
            ("reasoning", "Is 🎉 < 5? <tool_call>", "completed"),
            ("message", "I'll see.", "completed"),
            ("function_call", '{"n": 5, "s": "It\'s 你好 \\""}', "completed"),
            ("function_call", "{}", "completed"),
            ("message", " So it is.", "completed"),
        ]
        assert len({item.id for item in response.output}) == 5
        assert "".join(row.token for row in response.output[1].content[0].logprobs).strip() == "I'll see."
    spent = ask(teller, input=f"⟪{ALL}⟫").usage
    assert spent.output_tokens == len(ALL.encode()) + 1
    assert spent.output_tokens_details.reasoning_tokens == len(THOUGHT.strip().encode())


def test_answers_that_are_cut(teller: OpenAI) -> None:
    """At every few tokens: the item that was cut says so, what was complete before stays complete, and the talk can go on."""
    for limit in range(1, len(ALL.encode()), 29):
        response = ask(teller, input=f"⟪{ALL}⟫", tools=TOOLS, max_output_tokens=limit)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.usage.output_tokens == limit
        assert {item.status for item in response.output[:-1]} <= {"completed"}
        on = teller.responses.create(model=MODEL, input="⟪Yes.⟫", previous_response_id=response.id, tools=TOOLS)
        assert on.output_text == "Yes."
    stopped = ask(teller, input=f"⟪{ALL}⟫", tools=TOOLS, extra_body={"stop": "你"})  # in the middle of an argument
    assert shape(stopped)[-1] == ("function_call", '{"n": 5, "s": "It\'s ', "incomplete")
    assert stopped.status == "completed"
    nothing = ask(teller, input="⟪⟫")
    assert shape(nothing) == [("message", "", "completed")]


def test_thinking_is_given_back(teller: OpenAI, echo: Server) -> None:
    """In full, also where clients ask for less; earlier thinking reaches the template whether it is remembered or sent."""
    first = teller.responses.create(model=MODEL, input=f"⟪{THOUGHT}Yes.⟫", reasoning={"effort": "high", "summary": "auto"})
    assert [item.type for item in first.output] == ["reasoning", "message"]
    off = teller.responses.create(model=MODEL, input="⟪Yes.⟫", reasoning={"effort": "none"})
    assert shape(off) == [("message", "Yes.", "completed")]
    told = [item.to_dict() for item in first.output]
    summary = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": told[0]["content"][0]["text"]}]}
    for thought in (told[0], summary):
        items: Any = [{"role": "user", "content": "a"}, thought, told[1], {"role": "user", "content": "b"}]
        assert teller.responses.input_tokens.count(model=MODEL, input=items).input_tokens > 0
    echo.check_alive()


def test_async_clients(tiny: Server) -> None:
    async def talk() -> None:
        async with AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
            many = [client.responses.create(model=MODEL, input="Hello!", temperature=0) for _ in range(8)]
            answers = await asyncio.gather(*many)
            assert {answer.output_text for answer in answers} == {HELLO}
            assert len({answer.id for answer in answers}) == 8
            async with client.responses.stream(model=MODEL, input="Hello!", temperature=0) as stream:
                assert (await stream.get_final_response()).output_text == HELLO
            await asyncio.gather(*(client.responses.delete(answer.id) for answer in answers))

    asyncio.run(talk())
    tiny.wait_idle()


def test_going_away(tiny: Server) -> None:
    """Streamed or not: the engine forgets the request, and nothing is stored of it."""
    body = {"input": LONG["prompt"], **{name: LONG[name] for name in ("ignore_eos", "temperature")}}
    for stream in (False, True):
        with closing(send(tiny, {**body, "stream": stream}, RESPONSES)) as connection:
            wait_running(tiny, 1)
            if stream:
                while b"output_text.delta" not in connection.recv(65536):
                    pass
        tiny.wait_idle()
    tiny.check_alive()


def test_ended_from_outside(tiny: Server, client: OpenAI) -> None:
    """The id is known before there is a token, and what was said until the end is kept."""
    events: Any = client.responses.create(model=MODEL, input="Tell me a story.", stream=True, extra_body={"ignore_eos": True})
    first = next(events)
    assert first.type == "response.created"
    next(event for event in events if event.type == "response.output_item.added")
    assert tiny.post("/abort_request", {"rid": first.response.id}) == {"aborted": 1}
    *_, last = events
    assert (last.type, last.response.status, last.response.incomplete_details.reason) == (
        "response.incomplete",
        "incomplete",
        "abort",
    )
    assert client.responses.retrieve(first.response.id).output_text == last.response.output_text
    tiny.wait_idle()


def test_faults_of_the_engine(fake: Server) -> None:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model=MODEL, input="FAIL")
        *_, last = client.responses.create(model=MODEL, input="FAIL", stream=True)
        assert last.type == "response.failed"
        assert (last.response.status, last.response.error.code) == ("failed", "server_error")  # type: ignore[union-attr]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model=MODEL, input="REFUSE", stream=True)


def test_null_equals_absent(fake: Server) -> None:
    nulls = dict.fromkeys([*p.ResponsesBody.__struct_fields__, *p.REFUSED[p.ResponsesBody], "max_tool_calls", "unheard_of"])
    answers = [fake.post(RESPONSES, body) for body in ({**nulls, "input": "⟪Yes.⟫"}, {"input": "⟪Yes.⟫"})]
    for answer in answers:
        for name in ("id", "created_at", "completed_at"):
            del answer[name]
        del answer["output"][0]["id"]
    assert answers[0] == answers[1]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "message", "role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": ["a", {"role": "user", "content": "a"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{bad"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "summary": 5}]}, "input[0].summary"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": "x " * 5000}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"include": ["everything"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "many"}, "max_output_tokens"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format"),
    ({"text": {"format": 5}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no-type"}}}}, "text.format"),
]


def test_refusals(tiny: Server) -> None:
    for body, param in REFUSED:
        for stream in (False, True):
            error = tiny.post(RESPONSES, {"input": "hi", **body, "stream": stream}, 400)
            assert error["param"] == param
            assert (param.split("[")[0] in error["message"]) or error["code"] == "context_length_exceeded"
    assert tiny.post(RESPONSES, {"input": "hi", "stream_options": {}}, 400)["param"] == "stream_options"
    tiny.check_alive()


def test_a_limit_and_a_file(tmp_path: Path) -> None:
    """The oldest go, what is too large is answered all the same, and what is left is there after a restart."""
    flags = ["--response-store", str(tmp_path / "responses.db"), "--response-store-bytes"]
    with running(*flags, "8K", module="tests.serve.fake_engine") as server:
        names = [server.post(RESPONSES, {"input": f"⟪{i}⟫"})["id"] for i in range(12)]
        found = [server.http.get(f"{RESPONSES}/{name}").status_code == 200 for name in names]
        assert found == sorted(found)
        assert 0 < sum(found) < 12
        huge = server.post(RESPONSES, {"input": "⟪" + "word " * 2000 + "⟫", "max_output_tokens": 1})
        assert huge["store"] is False
        assert server.stop() == 0
    with running(*flags, "8K", module="tests.serve.fake_engine") as server:
        answer = server.post(RESPONSES, {"input": "⟪a⟫", "previous_response_id": names[-1]})
        assert answer["output"][0]["content"][0]["text"] == "a"
