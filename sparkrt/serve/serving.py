"""What every handler needs: the engine's client, the tokenizer and template of the same model, and the rules they share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from sparkrt.engine.config import EngineConfig
from sparkrt.engine.params import SamplingParams, check_prompt_ids
from sparkrt.errors import CapacityError, RequestError
from sparkrt.serve.cli import ServeArgs
from sparkrt.serve.engine import EngineClient
from sparkrt.serve.http import require
from sparkrt.serve.metrics import Metrics
from sparkrt.serve.protocol import SAMPLING_FIELDS
from sparkrt.serve.responses.store import ResponseStore
from sparkrt.text.reasoning import BEGIN, END, reasoning_format
from sparkrt.text.template import ChatTemplate, check_kwargs
from sparkrt.text.tokenizer import Tokenizer
from sparkrt.text.tools import tool_format

# tokens of thinking for a `reasoning_effort` that the chat template does not know; more effort than that has no limit
EFFORTS = {"none": 0, "minimal": 512, "low": 1024, "medium": 4096}
LONGEST_TOKEN = 512  # characters; vocabularies end their runs of blanks and dashes at 128 or 256

OpenText: TypeAlias = Callable[[EngineConfig], tuple[Tokenizer, ChatTemplate]]


class Serving:
    """State of the API process. Requests that arrive while the model loads wait for `opened`; long texts are read in threads."""

    def __init__(self, args: ServeArgs, client: EngineClient) -> None:
        """LoadError: what /v1/responses keeps cannot be opened."""
        self.responses = ResponseStore(args.response_store, args.response_store_bytes)
        self.args = args
        self.client = client
        self.created = int(time.time())
        self.metrics = Metrics(args.names[0], lambda: client.stats, client.refused)
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, open_text: OpenText) -> None:
        """Wait for the engine, read the tokenizer and template meanwhile, then let requests in. Raises LoadError."""
        texts = asyncio.ensure_future(asyncio.to_thread(open_text, self.args.engine))
        await asyncio.gather(asyncio.shield(self.client.loaded), texts, return_exceptions=True)
        errors = (self.client.loaded.exception(), texts.exception())
        for error in filter(None, errors):  # the engine's reason comes first
            raise error
        self.info = self.client.loaded.result()
        self.tokenizer, self.template = texts.result()
        if self.args.chat_template is not None:
            self.template = ChatTemplate.from_option(self.args.chat_template, self.tokenizer)
        text = "\n".join(self.template.texts.values())
        self.tools = tool_format(self.args.tool_call_parser, text)
        self.reasoning = reasoning_format(self.args.reasoning_parser, text)
        self._efforts = {} if "reasoning_effort" in text else EFFORTS
        marks = {*(self.tools.marks if self.tools else ()), BEGIN, END}
        self.marks = {i for i in self.tokenizer.special_ids if self.tokenizer.token_str(i) in marks}
        self.opened.set_result(None)

    def close(self) -> None:
        """Requests in flight, and those that wait for the model, end with an error."""
        error = CapacityError("the server is shutting down")
        self.client.fail_all(error)
        self.responses.close()
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # there may be nobody to take it

    def check_model(self, name: str | None) -> None:
        """Raises RequestError (404) unless `name` is one of ours, or none."""
        if name and name not in self.args.names:
            raise RequestError(f"The model `{name}` does not exist.", param="model", code="model_not_found", status=404)

    def encode(self, prompt: str | list[int], special: bool, param: str) -> list[int]:
        """Token ids of a prompt. One that is hopelessly long is refused unread: tokenizing it would take seconds."""
        self._check_length(len(prompt) // LONGEST_TOKEN if isinstance(prompt, str) else len(prompt), param)
        if not isinstance(prompt, str):
            return check_prompt_ids(prompt, self.info.vocab_size)
        return self.tokenizer.encode(prompt, special, param=param)

    def _check_length(self, least: int, param: str) -> None:
        """Raises RequestError when a prompt of at least so many tokens cannot be."""
        if least > (context := self.info.max_model_len):
            message = f"The model's context length is {context} tokens and the prompt has at least {least}."
            raise RequestError(message, param=param, code="context_length_exceeded")

    def render(self, body: Any) -> tuple[str, list[int]]:
        """The prompt of `body.messages`, text and ids. The template writes the special tokens."""
        variables, effort = dict(self.args.default_chat_template_kwargs), body.reasoning_effort
        if effort is not None:  # "none" is for templates that know a switch only
            variables |= {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
        if body.enable_thinking is not None:
            variables["enable_thinking"] = body.enable_thinking
        variables |= body.chat_template_kwargs or {}
        check_kwargs(variables)  # before they become keyword arguments, where some would clash
        is_open = bool(body.continue_final_message)
        begins = not is_open if body.add_generation_prompt is None else body.add_generation_prompt
        variables |= {"add_generation_prompt": begins, "continue_final_message": is_open}
        for name in ("messages", "tools"):  # each is a token at least
            self._check_length(len(getattr(body, name) or ()), name)
        text = self.template.render(body.messages, body.tools, **variables)
        return text, self.encode(text, bool(body.add_special_tokens), "messages")

    def params(self, body: Any, **more: object) -> SamplingParams:
        """The sampling parameters of a request over the model's defaults. `more`: fields that the two APIs spell differently."""
        given = {name: getattr(body, name) for name in SAMPLING_FIELDS} | more
        params = SamplingParams.from_optional(self.info.sampling_defaults, **given)
        if params.thinking_token_budget is None:
            params.thinking_token_budget = self._efforts.get(getattr(body, "reasoning_effort", None) or "")
        most = self.args.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            require(value is None or value <= most, name, f"{name} must be at most {most}, got {value}")
        require(body.best_of in (None, params.n), "best_of", "best_of is not supported unless it equals n")
        require(body.stream or body.stream_options is None, "stream_options", "stream_options needs stream to be true")
        require(not body.stream or body.prompt_logprobs is None, "prompt_logprobs", "prompt_logprobs is not for streams")
        return params
