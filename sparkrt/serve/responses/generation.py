"""A response while it comes: the items of an answer, and the events that tell of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from sparkrt.serve import protocol as p
from sparkrt.serve.chat import ChatGeneration, chat_logprobs
from sparkrt.serve.generation import Piece
from sparkrt.serve.http import describe, encode
from sparkrt.serve.responses.items import PREFIXES, Item

_ENDS = ("stop", "tool_calls")  # of an answer that is complete
_TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}  # the one part of such an item; a call has arguments instead
_EMPTY: dict[str, Item] = {"reasoning": {"summary": [], "content": []}, "message": {"role": "assistant", "content": []}}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its body, the items in it, and those that came before."""

    body: Any
    given: list[Item]
    history: list[Item]


@dataclass(slots=True)
class _Open:
    """The item that grows: as it was when it began, and the text it has gained."""

    head: Item
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ResponsesGeneration(ChatGeneration):
    kind = "resp_"
    named_events = True

    def __init__(self, asked: Asked, *details: Any) -> None:
        self._asked, self._output, self._open, self._sent = asked, list[Item](), _Open({}), 0
        self._reason = ""  # it finished for
        self._scored = list[Any]()  # log-probabilities of tokens whose text is still to come
        self._tokens = 0  # that were read
        self._store = asked.body.store is not False
        super().__init__(*details)

    async def _whole(self, request: Request) -> Any:
        """What the events would have told: the same items whether they are streamed or not. To know which log-probabilities
        belong to which text it has to come in pieces here, too.
        """
        async with self._watched(request):
            async for pieces in self._pieces(self._serving.args.stream_interval if self.body.logprobs else None):
                for piece in pieces:
                    self.chunks(self._read(piece))
        return (await self.closing())[0]["response"]

    def opening(self) -> list[Any]:
        begun = self._response("in_progress")
        return [self._event("created", response=begun), self._event("in_progress", response=begun)]

    async def closing(self) -> list[Any]:
        """The response is kept before anybody hears that it is complete."""
        response = self._response("completed" if self._reason in _ENDS else "incomplete")
        if self._store:
            for index, item in enumerate(self._asked.given):
                item.setdefault("id", self._id(item["type"], f"in{index}"))
            details = self._asked.given, self._asked.body.previous_response_id, self._asked.history
            keep = self._serving.responses.put
            response.store = await asyncio.to_thread(lambda: keep(response.id, encode(response), *details))
        return [self._event(response.status, response=response)]

    def failure(self, error: Exception) -> list[Any]:
        response = self._response("failed")
        response.error = {"code": "server_error", "message": describe(error)[0].error.message}
        return [self._event("failed", response=response)]

    def parts(self, piece: Piece) -> list[Piece]:
        return [self._read(piece)]

    def chunks(self, piece: Piece) -> list[Any]:
        reply, reason = piece.reply, piece.finish_reason
        assert reply is not None
        if self.body.logprobs:
            self._score(piece)
        events = self._grow("reasoning", reply.reasoning) if reply.reasoning else []
        for part in reply.parts:
            if isinstance(part, str):
                events += self._grow("message", part)
                continue
            if part.id is not None:
                events += self._begin("function_call", call_id=part.id, name=part.name, arguments="")
            if part.arguments:
                events += self._grow("function_call", part.arguments)
        if reason is not None:
            self._reason = reason
            if not self._open.head and not self._output:
                events += self._begin("message", **_EMPTY["message"])
            cut = reason not in _ENDS or self._parsers[0].in_call  # by a stop string, too
            events += self._end("incomplete" if cut else "completed")
        return events

    def _score(self, piece: Piece) -> None:
        """Only text before any call has log-probabilities, and the token that ended the answer has none."""
        if "function_call" in {item.get("type") for item in (*self._output, self._open.head)}:
            return
        thought = self._thoughts[0].count(piece.prompt.outputs[0].token_ids)
        rows = chat_logprobs(piece, self.body.top_logprobs or 0, self.tokenizer).content
        if piece.finish_reason in _ENDS and not isinstance(piece.stop_reason, str):
            rows = rows[:-1]
        self._scored += rows[max(0, thought - self._tokens) :]
        self._tokens += len(piece.token_ids)

    def _grow(self, kind: str, text: str) -> list[Any]:
        """The open item gains `text`; a new one, if it is of another kind."""
        events = [] if self._open.head.get("type") == kind else self._begin(kind, **_EMPTY[kind])
        more: dict[str, Any] = {"content_index": 0} if kind in _TEXTS else {}
        self._open.texts.append(text)
        if kind == "message":
            more["logprobs"], self._scored = self._scored, []
            self._open.logprobs += more["logprobs"]
        return [*events, self._of_item(f"{_TEXTS.get(kind, 'function_call_arguments')}.delta", delta=text, **more)]

    def _begin(self, kind: str, **more: Any) -> list[Any]:
        events, self._scored = self._end("completed"), self._scored if kind == "message" else []
        self._open = _Open({"id": self._id(kind, str(len(self._output))), "type": kind, "status": "in_progress", **more})
        events.append(self._event("output_item.added", output_index=len(self._output), item=self._open.head))
        if kind in _TEXTS:
            events.append(self._of_item("content_part.added", content_index=0, part=_part(kind, "", [])))
        return events

    def _end(self, status: str) -> list[Any]:
        """The open item, if there is one, is over."""
        head, text, kind = self._open.head, "".join(self._open.texts), self._open.head.get("type", "")
        if not head:
            return []
        if kind in _TEXTS:
            part = _part(kind, text, self._open.logprobs)
            scored = {"logprobs": self._open.logprobs} if kind == "message" else {}
            done = [self._of_item(f"{_TEXTS[kind]}.done", content_index=0, text=text, **scored)]
            done.append(self._of_item("content_part.done", content_index=0, part=part))
            item = {**head, "status": status, "content": [part]}
        else:
            done = [self._of_item("function_call_arguments.done", name=head["name"], arguments=text)]
            item = {**head, "status": status, "arguments": text}
        done.append(self._event("output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._open = _Open({})
        return done

    def _id(self, kind: str, number: str) -> str:
        return f"{PREFIXES[kind]}_{str(self._head['id']).removeprefix(self.kind)}_{number}"

    def _of_item(self, kind: str, **more: Any) -> Item:
        return self._event(kind, item_id=self._open.head["id"], output_index=len(self._output), **more)

    def _event(self, kind: str, **more: Any) -> Item:
        self._sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._sent - 1, **more}

    def _response(self, status: str) -> Any:
        body, params = self._asked.body, self.params
        over = status != "in_progress"
        why = "max_output_tokens" if self._reason == "length" else self._reason
        reasoning = {"effort": None, "summary": None, **(body.reasoning or {})}
        about = {name: getattr(body, name) for name in ("instructions", "previous_response_id", "user")}
        about |= {name: getattr(body, name) for name in ("max_output_tokens", "prompt_cache_key", "safety_identifier")}
        tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in body.tools or ()]
        return p.Response(
            id=self._head["id"],
            object="response",
            created_at=self._head["created"],
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            background=False,
            error=None,
            incomplete_details={"reason": why} if status == "incomplete" else None,
            max_tool_calls=None,
            metadata=body.metadata or {},
            model=self._head["model"],
            output=list(self._output),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=reasoning,
            service_tier="default",
            store=self._store,
            temperature=params.temperature,
            text={"format": {"type": "text"}, **(body.text or {})},
            tool_choice=body.tool_choice or "auto",
            tools=tools,
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation="disabled",
            usage=self._used() if over else None,
            **about,
        )

    def _used(self) -> Any:
        usage = self._usage()
        return p.ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details={"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
            output_tokens=usage.completion_tokens,
            output_tokens_details={"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
            total_tokens=usage.total_tokens,
        )


def _part(kind: str, text: str, logprobs: list[Any]) -> Item:
    return {"type": _TEXTS[kind], "text": text, **({"annotations": [], "logprobs": logprobs} if kind == "message" else {})}
