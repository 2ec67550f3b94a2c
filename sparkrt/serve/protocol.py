"""The bodies of the API, as msgspec structs: what handlers decode and encode, and what the OpenAPI document is made from.

The rule for request fields, the same everywhere: null equals absent; a field of a struct is honoured; a field of `REFUSED`
would change the answer in a way that is not offered yet and is a 400 naming it; any other field, known to OpenAI or not, is
accepted and has no effect.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any, get_type_hints

import msgspec

from sparkrt.engine.messages import EngineStats, ModelInfo
from sparkrt.engine.params import SamplingParams

Object = dict[str, Any]


def _struct(name: str, optional: Object | None = None, **always: Any) -> Any:
    """Fields in `optional` may be absent, and in an answer are left out while they are None. [kind]: a list of them."""
    kinds = {name: GenericAlias(list, (*k,)) if isinstance(k, list) else k for name, k in (always | (optional or {})).items()}
    fields: list[Any] = [(name, kinds[name]) for name in always] + [(name, kinds[name] | None, None) for name in optional or ()]
    return msgspec.defstruct(name, fields, kw_only=True, omit_defaults=True)


# every parameter of sampling is a field of the same name; without text there are no answers
_SAMPLING: Object = {name: hint for name, hint in get_type_hints(SamplingParams).items() if name != "detokenize"}
SAMPLING_FIELDS = tuple(_SAMPLING)
StreamOptions = _struct("StreamOptions", {"include_usage": bool, "continuous_usage_stats": bool})
_GENERATION = _SAMPLING | {"stop": str | list[str], "add_special_tokens": bool, "return_token_ids": bool, "best_of": int}
_GENERATION |= {"response_format": Object, "guided_json": Any, "guided_regex": str, "guided_choice": list[str]}
_GENERATION |= {"guided_grammar": str, "model": str, "stream": bool, "stream_options": StreamOptions, "priority": int}
_GENERATION |= {"cache_salt": str}
_TEMPLATE: Object = {"tools": list[Object], "add_generation_prompt": bool, "continue_final_message": bool}
_TEMPLATE |= {"chat_template_kwargs": Object, "add_special_tokens": bool, "reasoning_effort": str, "enable_thinking": bool}
_CHAT: Object = {"logprobs": bool, "top_logprobs": int, "max_completion_tokens": int}
_CHAT |= {"include_reasoning": bool, "separate_reasoning": bool, "parallel_tool_calls": bool}
_CHAT |= {"tool_choice": str | Object, "functions": list[Object], "function_call": str | Object}  # the last two: old spellings
_TEXT: Object = {"model": str, "prompt": str, "messages": list[Object], "return_token_strs": bool}

CompletionBody = _struct("CompletionBody", _GENERATION | {"echo": bool}, prompt=str | list[str | int | list[int]])
ChatBody = _struct("ChatBody", _GENERATION | _TEMPLATE | _CHAT, messages=list[Object])
TokenizeBody = _struct("TokenizeBody", _TEMPLATE | _TEXT)
_ASKED: Object = {"model": str, "system": str | list[Object], "stop_sequences": list[str], "stream": bool, "temperature": float}
_ASKED |= {"top_p": float, "top_k": int, "tools": list[Object], "tool_choice": Object, "thinking": Object}
_ASKED |= {"output_config": Object}
MessagesBody = _struct("MessagesBody", _ASKED, messages=list[Object], max_tokens=int)
CountTokensBody = _struct("CountTokensBody", _ASKED | {"max_tokens": int}, messages=list[Object])
_RESPONDING: Object = {"model": str, "instructions": str, "previous_response_id": str, "store": bool, "metadata": dict[str, str]}
_RESPONDING |= {"tools": list[Object], "tool_choice": str | Object, "parallel_tool_calls": bool, "max_output_tokens": int}
_RESPONDING |= {"text": Object, "reasoning": Object, "include": list[str], "top_logprobs": int, "stream": bool, "user": str}
_RESPONDING |= {"stream_options": Object, "prompt_cache_key": str, "safety_identifier": str}  # shown again, no more
# what chat knows besides, under its names there
SHARED = {name for name in _SAMPLING if name not in ("n", "max_tokens", "logprobs", "prompt_logprobs")}
SHARED |= {"stop", "priority", "cache_salt", "chat_template_kwargs", "enable_thinking"}
SHARED |= {name for name in _GENERATION if "guided" in name}
_SHARED: Object = {name: kind for name, kind in (_GENERATION | _TEMPLATE).items() if name in SHARED}
ResponsesBody = _struct("ResponsesBody", _SHARED | _RESPONDING, input=str | list[Object])
AbortBody = _struct("AbortBody", {"rid": str, "request_ids": list[str], "abort_all": bool})
_WAYS: Object = {"text": str | list[str], "input_ids": list[int | list[int]], "sampling_params": Object, "stream": bool}
_WAYS |= {"return_logprob": bool, "top_logprobs_num": int, "logprob_start_len": int, "model": str}
GenerateBody = _struct("GenerateBody", _WAYS)
DetokenizeBody = _struct("DetokenizeBody", {"model": str}, tokens=list[int])

# field → the values that ask for nothing; null never does
_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "ebnf", "json_schema", "prompt_embeds"), ()),
    **dict.fromkeys(("regex", "truncate_prompt_tokens", "web_search_options"), ()),
    **dict.fromkeys(("bad_words", "custom_logit_processor", "documents", "logits_processors", "stop_regex"), ([],)),
    **dict.fromkeys(("return_tokens_as_token_ids", "use_beam_search"), (False, 0)),
}
_NOT_OFFERED |= {"modalities": ([], ["text"]), "moderation": ()}
# a template is a program: the server's owner chooses it (--chat-template)
_NOT_FOR_CHAT: dict[str, tuple[Any, ...]] = {"echo": (False,), "chat_template": ()}
_OTHERS_NAMES = ("max_tokens", "max_completion_tokens", "reasoning_effort")
REFUSED: dict[Any, dict[str, tuple[Any, ...]]] = {
    CompletionBody: _NOT_OFFERED | {"suffix": ("",)},
    ChatBody: _NOT_OFFERED | _NOT_FOR_CHAT,
    MessagesBody: {"mcp_servers": ([],), "compaction": (), "container": (), "thread": ()},
    CountTokensBody: {"mcp_servers": ([],)},
    ResponsesBody: {
        **(_NOT_OFFERED | _NOT_FOR_CHAT),
        **dict.fromkeys(("access_programs", "conversation", "prompt", *_OTHERS_NAMES), ()),
        "background": (False,),
        "context_management": ([],),
        "logprobs": (False,),
        "n": (1,),
        "response_format": ({"type": "text"},),
        "truncation": ("disabled",),
    },
    GenerateBody: {
        **dict.fromkeys(("image_data", "video_data", "audio_data"), ([],)),
        **dict.fromkeys(("custom_logit_processor", "input_embeds", "lora_path", "rid"), ()),
        **dict.fromkeys(("session_params", "token_ids_logprob"), ()),
        **dict.fromkeys(("return_hidden_states", "return_routed_experts"), (False,)),
    },
    TokenizeBody: {},
    DetokenizeBody: {},
    AbortBody: {},
}

# what the two APIs document and nothing comes of here: hints, labels, and what is about tools that there are none of
_HINTS = ("prompt_cache_options", "prompt_cache_retention", "service_tier")
_LABELS = ("metadata", "prompt_cache_key", "safety_identifier", "store", "user")
_BETAS = ("billing_policy", "cache_control", "context_management", "speed", "user_profile_id", "workspace_id")
WITHOUT_EFFECT: dict[Any, tuple[str, ...]] = {
    CompletionBody: ("user",),
    ChatBody: (*_HINTS, *_LABELS, "prediction", "verbosity"),
    ResponsesBody: (*_HINTS, "background_options", "image", "max_tool_calls"),
    MessagesBody: (*_BETAS, "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "metadata", "service_tier"),
    CountTokensBody: (*_BETAS, "compaction"),
}

# A chunk of a stream has the fields of a whole answer, with what is new.
_PROMPT: Object = {"prompt_logprobs": list[dict[str, Object] | None], "prompt_token_ids": list[int]}
_HEAD: Object = {"id": str, "object": str, "created": int, "model": str}
_CHOICE: Object = {"index": int, "finish_reason": str | None}
_MORE: Object = {"stop_reason": str | int, "token_ids": list[int]}
_TOKEN: Object = {"token": str, "logprob": float, "bytes": list[int]}

CachedTokens = _struct("PromptTokensDetails", cached_tokens=int)
ReasoningTokens = _struct("CompletionTokensDetails", reasoning_tokens=int)  # of thinking, its tags included
_COUNTS: Object = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int, "prompt_tokens_details": CachedTokens}
Usage = _struct("Usage", {"completion_tokens_details": ReasoningTokens}, **_COUNTS)
_SCORED: Object = {"text_offset": list[int], "token_logprobs": list[float | None], "tokens": list[str]}
CompletionLogprobs = _struct("CompletionLogprobs", **_SCORED, top_logprobs=list[dict[str, float] | None])
CompletionChoice = _struct("CompletionChoice", _MORE | _PROMPT, **_CHOICE, text=str, logprobs=CompletionLogprobs | None)
Completion = _struct("Completion", {"usage": Usage}, **_HEAD, choices=[CompletionChoice])
Generated = _struct("Generated", {"index": int}, text=str, output_ids=list[int], meta_info=Object)
TopLogprob = _struct("TopLogprob", **_TOKEN)
TokenLogprob = _struct("TokenLogprob", **_TOKEN, top_logprobs=[TopLogprob])
ChatLogprobs = _struct("ChatLogprobs", content=[TokenLogprob])
CalledFunction = _struct("CalledFunction", {"name": str}, arguments=str)
ToolCall = _struct("ToolCall", {"index": int, "id": str, "type": str}, function=CalledFunction)  # `index` in a chunk only
_THOUGHT: Object = {"reasoning": str, "reasoning_content": str, "tool_calls": [ToolCall]}  # the first two are the same
ChatMessage = _struct("ChatMessage", _THOUGHT, role=str, content=str | None)
ChatDelta = _struct("ChatDelta", {"role": str, "content": str} | _THOUGHT)
# `message` in a whole answer, `delta` in a chunk
_SAID: Object = {"message": ChatMessage, "delta": ChatDelta}
ChatChoice = _struct("ChatChoice", _SAID | _MORE, **_CHOICE, logprobs=ChatLogprobs | None)
ChatCompletion = _struct("ChatCompletion", {"usage": Usage} | _PROMPT, **_HEAD, choices=[ChatChoice])
_STOPPED: Object = {"stop_reason": str | None, "stop_sequence": str | None}
Message = _struct("Message", id=str, type=str, role=str, model=str, content=list[Object], **_STOPPED, usage=dict[str, int])
_USED: Object = {"input_tokens": int, "input_tokens_details": dict[str, int], "output_tokens": int}
ResponsesUsage = _struct("ResponsesUsage", **_USED, output_tokens_details=dict[str, int], total_tokens=int)
_RESPONSE: Object = {"id": str, "object": str, "created_at": int, "completed_at": int | None, "status": str, "background": bool}
_RESPONSE |= {"error": Object | None, "incomplete_details": Object | None, "instructions": str | None}
_RESPONSE |= {"max_output_tokens": int | None, "max_tool_calls": int | None, "metadata": dict[str, str], "model": str}
_RESPONSE |= {"output": list[Object], "parallel_tool_calls": bool, "previous_response_id": str | None}
_RESPONSE |= {"prompt_cache_key": str | None, "reasoning": Object, "safety_identifier": str | None, "service_tier": str}
_RESPONSE |= {"store": bool, "temperature": float, "text": Object, "tool_choice": str | Object, "tools": list[Object]}
_RESPONSE |= {"top_logprobs": int, "top_p": float, "truncation": str, "usage": ResponsesUsage | None, "user": str | None}
Response = _struct("Response", **_RESPONSE)
ResponseItems = _struct("ResponseItems", object=str, data=list[Object], first_id=str, last_id=str, has_more=bool)
Deleted = _struct("Deleted", id=str, object=str, deleted=bool)
InputTokens = _struct("InputTokens", object=str, input_tokens=int)
TokenCount = _struct("TokenCount", input_tokens=int)
AnthropicError = _struct("AnthropicError", type=str, error=dict[str, str])
_MODEL: Object = {"owned_by": str, "root": str, "parent": str | None, "max_model_len": int}
Model = _struct("Model", id=str, object=str, created=int, **_MODEL)
ModelList = _struct("ModelList", object=str, data=[Model])
Tokens = _struct("Tokens", count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None)
Text = _struct("Text", prompt=str)
Status = _struct("Status", {"reason": str}, status=str)
Aborted = _struct("Aborted", aborted=int)
Sleep = _struct("Sleep", is_sleeping=bool)
Version = _struct("Version", version=str)
ServerInfo = _struct("ServerInfo", version=str, model=ModelInfo, config=dict[str, str], stats=EngineStats)
ErrorDetail = _struct("ErrorDetail", message=str, type=str, param=str | None, code=str | int)
ErrorBody = _struct("ErrorBody", error=ErrorDetail)
