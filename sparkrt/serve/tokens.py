"""Messages to token ids; POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparkrt.errors import RequestError
from sparkrt.serve.http import decode, json_response, read_body
from sparkrt.serve.protocol import ChatBody, DetokenizeBody, Text, TokenizeBody, Tokens
from sparkrt.serve.serving import Serving, aside
from sparkrt.text.template import check_kwargs

_tokenize_body = msgspec.json.Decoder(TokenizeBody)
_detokenize_body = msgspec.json.Decoder(DetokenizeBody)


async def render(serving: Serving, body: ChatBody | TokenizeBody, size: int) -> list[int]:
    """The prompt ids of `body.messages`. `size`, the body's bytes, decides whether the event loop can wait for it.

    The template writes special tokens itself, so the tokenizer adds none unless asked.
    """
    check_kwargs(body.chat_template_kwargs or {})
    open_end = bool(body.continue_final_message)
    variables = serving.args.default_chat_template_kwargs | (body.chat_template_kwargs or {})

    def work() -> list[int]:
        text = serving.template.render(
            body.messages,
            body.tools,
            add_generation_prompt=not open_end if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=open_end,
            **variables,
        )
        return serving.encode(text, bool(body.add_special_tokens), "messages")

    return await aside(size, work)


async def tokenize(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    raw = await read_body(request)
    body = decode(raw, _tokenize_body)
    await serving.ready()
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("either prompt or messages must be given", param="prompt")
    if (prompt := body.prompt) is not None:
        special = body.add_special_tokens is not False
        ids = await aside(len(raw), lambda: serving.encode(prompt, special, "prompt"))
    else:
        ids = await render(serving, body, len(raw))
    names = [serving.tokenizer.token_str(i) for i in ids] if body.return_token_strs else None
    return json_response(Tokens(count=len(ids), max_model_len=serving.info.max_model_len, tokens=ids, token_strs=names))


async def detokenize(request: Request) -> Response:
    serving: Serving = request.app.state.serving
    raw = await read_body(request)
    body = decode(raw, _detokenize_body)
    await serving.ready()
    serving.check_model(body.model)
    text = await aside(len(raw), lambda: serving.tokenizer.decode(body.tokens, skip_special_tokens=False))
    return json_response(Text(prompt=text))
