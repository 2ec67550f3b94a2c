"""The bodies of the API, as msgspec structs: what handlers decode and encode, and what the OpenAPI document is made from.

The rule for request fields, the same everywhere: null equals absent; a field named in a struct is honoured; a field of `REFUSED`
would change the answer in a way that is not offered yet and is a 400 naming it; any other field, known to OpenAI or not, is
accepted and has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sparkrt.engine.messages import EngineStats, ModelInfo
from sparkrt.errors import RequestError


class Body(msgspec.Struct, kw_only=True):
    """A request, or a part of one."""


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A response, or a part of one. Fields at their default are left out; those without a default are always there."""


# requests


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None  # the old spelling of tools
    function_call: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None


class TokenizeBody(Body, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    tokens: list[int]
    model: str | None = None


# fields that would change the answer, with the values that ask for nothing; null never does
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "documents": ([],),
    "ebnf": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "modalities": ([], ["text"]),
    "prompt_embeds": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": ({},),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
COMPLETION_REFUSED: dict[str, tuple[Any, ...]] = {**REFUSED, "suffix": ("",)}
CHAT_REFUSED: dict[str, tuple[Any, ...]] = {
    **REFUSED,
    "chat_template": (),  # a template is a program: the server's owner chooses it (--chat-template)
    "echo": (False,),
}


def refusals(fields: Mapping[str, tuple[Any, ...]]) -> msgspec.json.Decoder[Any]:
    """A decoder that sees the fields of a refusal table and nothing else of a body."""
    return msgspec.json.Decoder(msgspec.defstruct("Refusals", [(name, Any, None) for name in fields]))


def check_refusals(found: Any, fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises RequestError naming the first field that really asks for something we do not do."""
    for name, harmless in fields.items():
        if (value := getattr(found, name)) is not None and value not in harmless:
            raise RequestError(f"{name} is not supported by this server", param=name)


# responses


class PromptTokensDetails(Answer, kw_only=True):
    cached_tokens: int


class Usage(Answer, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


PromptLogprobs = list[dict[str, Any] | None]


class CompletionLogprobs(Answer, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Answer, kw_only=True):
    """Of an answer or, with what is new, of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Answer, kw_only=True):
    """The answer of /v1/completions, and one chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Answer, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Answer, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer, kw_only=True):
    content: list[TokenLogprob]


class ChatMessage(Answer, kw_only=True):
    """`role` is left out of every delta but the first."""

    role: str | None = None
    content: str | None = None


class ChatChoice(Answer, kw_only=True):
    """`message` in a whole answer, `delta` in a chunk."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer, kw_only=True):
    """The answer of /v1/chat/completions, and one chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Model(Answer, kw_only=True):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answer, kw_only=True):
    object: str
    data: list[Model]


class Tokens(Answer, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer, kw_only=True):
    prompt: str


class Status(Answer, kw_only=True):
    status: str
    reason: str | None = None


class Version(Answer, kw_only=True):
    version: str


class ServerInfo(Answer, kw_only=True):
    version: str
    model: ModelInfo
    config: dict[str, str]
    stats: EngineStats
