"""The bodies of the API, as msgspec structs: what handlers decode and encode, and what the OpenAPI document is made from.

The rule for request fields, the same everywhere: null equals absent; a field of a struct is honoured; a field of its `refused`
would change the answer in a way that is not offered yet and is a 400 naming it; any other field, known to OpenAI or not, is
accepted and has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import msgspec

from sparkrt.engine.messages import EngineStats, ModelInfo
from sparkrt.engine.params import SamplingParams

Object = dict[str, Any]

# field → the values that ask for nothing; null never does
_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "ebnf", "guided_grammar", "guided_json", "guided_regex", "json_schema", "prompt_embeds"), ()),
    **dict.fromkeys(("regex", "thinking_token_budget", "truncate_prompt_tokens", "web_search_options"), ()),
    **dict.fromkeys(("bad_words", "documents", "guided_choice"), ([],)),
    **dict.fromkeys(("priority", "return_tokens_as_token_ids", "use_beam_search"), (False, 0)),
    "modalities": ([], ["text"]),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
}


class Body(msgspec.Struct, kw_only=True):
    """A request."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    model: str | None = None


# every parameter of sampling is a field of the same name; without text there are no answers
_TYPES = {name: hint | None for name, hint in get_type_hints(SamplingParams).items() if name != "detokenize"}
_TYPES["stop"] |= str
SAMPLING_FIELDS = tuple(_TYPES)
if TYPE_CHECKING:

    class _SamplingBody(Body):
        def __getattr__(self, name: str) -> Any: ...
else:
    _SamplingBody = msgspec.defstruct("_SamplingBody", [(n, t, None) for n, t in _TYPES.items()], bases=(Body,), kw_only=True)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_SamplingBody, kw_only=True):
    """What completions and chat completions have in common."""

    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody, kw_only=True):
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED | {"suffix": ("",)}
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None


class ChatBody(GenerationBody, kw_only=True):
    # a template is a program: the server's owner chooses it (--chat-template)
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = _REFUSED | {"chat_template": (), "echo": (False,)}
    messages: list[Object]
    tools: list[Object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    tool_choice: str | Object | None = None
    functions: list[Object] | None = None  # the old spelling of tools
    function_call: str | Object | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None


class TokenizeBody(Body, kw_only=True):
    """Either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[Object] | None = None
    tools: list[Object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    tokens: list[int]


def _answer(name: str, optional: Object | None = None, **always: Any) -> Any:
    """A response, or a part of one. Fields in `optional` are left out while they are None."""
    fields: list[Any] = [*always.items(), *((field, kind | None, None) for field, kind in (optional or {}).items())]
    return msgspec.defstruct(name, fields, kw_only=True, omit_defaults=True)


def _many(kind: Any) -> Any:
    return list[kind]


# A chunk of a stream has the fields of a whole answer, with what is new.
_PROMPT: Object = {"prompt_logprobs": list[dict[str, Object] | None], "prompt_token_ids": list[int]}
_HEAD: Object = {"id": str, "object": str, "created": int, "model": str}
_CHOICE: Object = {"index": int, "finish_reason": str | None}
_MORE: Object = {"stop_reason": str | int, "token_ids": list[int]}
_TOKEN: Object = {"token": str, "logprob": float, "bytes": list[int]}

CachedTokens = _answer("PromptTokensDetails", cached_tokens=int)
Usage = _answer("Usage", prompt_tokens=int, completion_tokens=int, total_tokens=int, prompt_tokens_details=CachedTokens)
_TOPS = list[dict[str, float] | None]
CompletionLogprobs = _answer(
    "CompletionLogprobs", text_offset=list[int], token_logprobs=list[float | None], tokens=list[str], top_logprobs=_TOPS
)
CompletionChoice = _answer("CompletionChoice", _MORE | _PROMPT, **_CHOICE, text=str, logprobs=CompletionLogprobs | None)
Completion = _answer("Completion", {"usage": Usage}, **_HEAD, choices=_many(CompletionChoice))
TopLogprob = _answer("TopLogprob", **_TOKEN)
TokenLogprob = _answer("TokenLogprob", **_TOKEN, top_logprobs=_many(TopLogprob))
ChatLogprobs = _answer("ChatLogprobs", content=_many(TokenLogprob))
ChatMessage = _answer("ChatMessage", {"role": str, "content": str})
# `message` in a whole answer, `delta` in a chunk
_SAID: Object = {"message": ChatMessage, "delta": ChatMessage}
ChatChoice = _answer("ChatChoice", _SAID | _MORE, **_CHOICE, logprobs=ChatLogprobs | None)
ChatCompletion = _answer("ChatCompletion", {"usage": Usage} | _PROMPT, **_HEAD, choices=_many(ChatChoice))
_MODEL: Object = {"owned_by": str, "root": str, "parent": str | None, "max_model_len": int}
Model = _answer("Model", id=str, object=str, created=int, **_MODEL)
ModelList = _answer("ModelList", object=str, data=_many(Model))
Tokens = _answer("Tokens", count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None)
Text = _answer("Text", prompt=str)
Status = _answer("Status", {"reason": str}, status=str)
Version = _answer("Version", version=str)
ServerInfo = _answer("ServerInfo", version=str, model=ModelInfo, config=dict[str, str], stats=EngineStats)
ErrorDetail = _answer("ErrorDetail", message=str, type=str, param=str | None, code=str | int)
ErrorBody = _answer("ErrorBody", error=ErrorDetail)
