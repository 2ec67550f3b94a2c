"""POST /generate: SGLang's own way of asking, which its benchmark takes unless told otherwise. A stream repeats what it said."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from sparkrt.engine.outputs import Logprob
from sparkrt.errors import RequestError
from sparkrt.serve import protocol as p
from sparkrt.serve.completions import FLOOR, CompletionGeneration, prepare
from sparkrt.serve.generation import Piece
from sparkrt.serve.http import decode, encode, json_response, require
from sparkrt.serve.serving import Serving

_SAME = ["temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n", "stop"]
_SAME += ["stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias"]
# name in `sampling_params` → that of the field here
_NAMES = dict(zip(_SAME, _SAME, strict=True)) | {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_NAMES |= {"sampling_seed": "seed", "no_stop_trim": "include_stop_str_in_output", "regex": "guided_regex"}
_NAMES |= {"json_schema": "guided_json"}
_HARMLESS = {"spaces_between_special_tokens": True}  # what else may be there, as long as it says this
_MOST = 128  # tokens of an answer, unless asked otherwise


async def generate(serving: Serving, body: Any, request: Request) -> Any:
    """One answer for one prompt, a list for several or for `n`."""
    require((body.text is None) != (body.input_ids is None), "text", "either text or input_ids must be given")
    prompt = body.input_ids if body.text is None else body.text
    scored = None if not body.return_logprob else body.top_logprobs_num or 0
    require(body.logprob_start_len in (None, -1), "logprob_start_len", "logprob_start_len must be -1: prompts are not scored")
    asked = {"prompt": prompt, "stream": body.stream, "logprobs": scored, "max_tokens": _MOST, "model": body.model}
    for name, value in (body.sampling_params or {}).items():
        known = name in _NAMES or (name in _HARMLESS and value in (None, _HARMLESS[name]))
        require(known, f"sampling_params.{name}", f"sampling_params.{name} is not supported by this server")
        if value is not None and name in _NAMES:
            asked[_NAMES[name]] = value
    try:
        completion = decode(encode(asked), p.CompletionBody)
        found = await (await prepare(serving, completion, NativeGeneration)).respond(request)
    except RequestError as error:
        raise _in_their_words(error, body) from None
    return json_response(found) if isinstance(found, list) else found


def _in_their_words(error: RequestError, body: Any) -> RequestError:
    """Naming the field that the request has."""
    theirs = {ours: f"sampling_params.{name}" for name, ours in _NAMES.items()}
    theirs |= {"prompt": "text" if body.input_ids is None else "input_ids", "logprobs": "top_logprobs_num"}
    param = theirs.get(error.param or "", error.param)
    message = error.message if param == error.param else error.message.replace(str(error.param), str(param), 1)
    return RequestError(message, param=param, code=error.code, status=error.status)


class NativeGeneration(CompletionGeneration):
    kind = "gen"

    def write(self, pieces: list[Piece], is_chunk: bool, **head: Any) -> Any:
        prompt = self.body.prompt
        many = self.params.n > 1 or not (isinstance(prompt, str) or isinstance(prompt[0], int))
        answers = [self._answer(piece, piece.index if many and is_chunk else None) for piece in pieces]
        return answers if many and not is_chunk else answers[0]

    def _answer(self, piece: Piece, index: int | None) -> Any:
        """What there is so far."""
        output = piece.prompt.outputs[piece.index % self.params.n]
        reason: dict[str, Any] | None = None
        if output.finish_reason is not None:
            reason = {"type": output.finish_reason}
            if output.finish_reason == "length":
                reason["length"] = len(output.token_ids)
            elif output.stop_reason is not None:
                reason["matched"] = output.stop_reason
        tokens = {"prompt_tokens": len(piece.prompt.prompt_token_ids), "completion_tokens": len(output.token_ids)}
        about: dict[str, Any] = {"id": self._head["id"], "finish_reason": reason, **tokens}
        about["cached_tokens"] = piece.prompt.num_cached_tokens
        if (rows := output.logprobs) is not None:
            about["output_token_logprobs"] = [_scored(next(iter(row.items()))) for row in rows]  # the chosen token is first
            if top := self.params.logprobs:
                ranked = (sorted(row.items(), key=lambda pair: pair[1].rank or 0)[:top] for row in rows)
                about["output_top_logprobs"] = [[*map(_scored, row)] for row in ranked]
        return p.Generated(text=output.text, output_ids=output.token_ids, meta_info=about, index=index)


def _scored(pair: tuple[int, Logprob]) -> list[Any]:
    return [max(FLOOR, pair[1].logprob), pair[0], None]  # the text stays out, as it does there
