"""What every handler needs: the engine's client, the tokenizer and template of the same model, and the rules they share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from sparkrt.engine.config import EngineConfig
from sparkrt.engine.params import SamplingParams
from sparkrt.errors import CapacityError, RequestError
from sparkrt.serve.args import ServeArgs
from sparkrt.serve.client import EngineClient
from sparkrt.serve.http import require
from sparkrt.serve.protocol import SAMPLING_FIELDS, ChatBody, GenerationBody, TokenizeBody
from sparkrt.text.template import ChatTemplate, check_kwargs
from sparkrt.text.tokenizer import Tokenizer

LONGEST_TOKEN = 512  # characters; vocabularies end their runs of blanks and dashes at 128 or 256
INLINE = 8192  # characters: shorter text is tokenized on the event loop (2 ms at most), longer text beside it

T = TypeVar("T")
OpenText: TypeAlias = Callable[[EngineConfig], tuple[Tokenizer, ChatTemplate]]


class Serving:
    """State of the API process. Handlers call `ready` first: requests that arrive while the model loads wait for it."""

    def __init__(self, args: ServeArgs, client: EngineClient) -> None:
        self.args = args
        self.client = client
        self.created = int(time.time())
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, open_text: OpenText) -> None:
        """Wait for the engine, read the tokenizer and template meanwhile, then let requests in. Raises LoadError."""
        texts = asyncio.ensure_future(asyncio.to_thread(open_text, self.args.engine))
        try:
            self.info = await self.client.loaded()
            self.tokenizer, self.template = await texts
        finally:
            texts.cancel()
        if self.args.chat_template is not None:
            self.template = ChatTemplate.from_option(self.args.chat_template, self.tokenizer)
        if self.args.max_num_queued_reqs is not None:
            self.client.max_requests = self.info.max_num_seqs + self.args.max_num_queued_reqs
        self._ready.set_result(None)

    def close(self) -> None:
        """Requests in flight, and those that wait for the model, end with an error."""
        error = CapacityError("the server is shutting down")
        self.client.fail_all(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # there may be nobody to take it

    @property
    def is_ready(self) -> bool:
        return self._ready.done() and self.client.error is None and not self.client.draining

    async def ready(self) -> None:
        await asyncio.shield(self._ready)

    def check_model(self, name: str | None) -> None:
        """Raises RequestError (404) unless `name` is one of ours, or none."""
        if name and name not in self.args.names:
            raise RequestError(f"The model `{name}` does not exist.", param="model", code="model_not_found", status=404)

    def encode(self, text: str, special: bool, param: str) -> list[int]:
        """Token ids of a prompt. One that is hopelessly long is refused unread: tokenizing it would take seconds."""
        least, context = len(text) // LONGEST_TOKEN, self.info.max_model_len
        if least > context:
            message = f"The model's context length is {context} tokens and the prompt has at least {least}."
            raise RequestError(message, param=param, code="context_length_exceeded")
        return self.tokenizer.encode(text, special, param=param)

    async def render(self, body: ChatBody | TokenizeBody, size: int) -> list[int]:
        """The prompt ids of `body.messages`; `size`: bytes of the body. The template writes the special tokens."""
        given = body.chat_template_kwargs or {}
        check_kwargs(given)  # before they become keyword arguments, where some would clash
        if isinstance(body, ChatBody) and body.reasoning_effort is not None:
            given = {"reasoning_effort": body.reasoning_effort} | given
        variables = self.args.default_chat_template_kwargs | given
        is_open = bool(body.continue_final_message)
        begins = not is_open if body.add_generation_prompt is None else body.add_generation_prompt

        def work() -> list[int]:
            options = {**variables, "add_generation_prompt": begins, "continue_final_message": is_open}
            text = self.template.render(body.messages, body.tools, **options)
            return self.encode(text, bool(body.add_special_tokens), "messages")

        return await aside(size, work)

    def params(self, body: GenerationBody, **more: object) -> SamplingParams:
        """The sampling parameters of a request over the model's defaults. `more`: fields that the two APIs spell differently."""
        given = {name: getattr(body, name) for name in SAMPLING_FIELDS} | more
        params = SamplingParams.from_optional(self.info.sampling_defaults, **given)
        most = self.args.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            require(value is None or value <= most, name, f"{name} must be at most {most}, got {value}")
        require(body.best_of in (None, params.n), "best_of", "best_of is not supported unless it equals n")
        options = "stream_options is only allowed when stream is true"
        require(body.stream_options is None or bool(body.stream), "stream_options", options)
        unscored = body.prompt_logprobs is None or not body.stream
        require(unscored, "prompt_logprobs", "prompt_logprobs is not supported in a stream")
        return params


async def aside(size: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread when its text of `size` characters would hold up the event loop."""
    return work() if size <= INLINE else await asyncio.to_thread(work)
