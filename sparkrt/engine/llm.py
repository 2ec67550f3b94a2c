"""`LLM`: generation in this process, under the names scripts for other engines use."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from numbers import Integral
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, overload

from sparkrt.engine.answer import Answer
from sparkrt.engine.config import EngineConfig, Progress
from sparkrt.engine.decode_loop import BatchDecodeLoop, DecodeLoop
from sparkrt.engine.loading import load
from sparkrt.engine.outputs import RequestOutput
from sparkrt.engine.params import SamplingParams, check_prompt_ids, to_requests
from sparkrt.errors import CapacityError, RequestError, SparkrtError

if TYPE_CHECKING:
    from sparkrt.engine.messages import EngineRequest, ModelInfo
    from sparkrt.text.tokenizer import Tokenizer

log = logging.getLogger("sparkrt")

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""


class LLM:
    """A model loaded into this process. Not thread-safe; close it, or use it in a `with`, to give its memory back at once.

    `model` is a folder, a GGUF file or a hub id; None is the bundled sparkrt-tiny. Further options are those of `EngineConfig`.
    Raises LoadError for what cannot be served.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        max_model_len: int | str | None = None,
        seed: int = 0,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        options |= {"model": model, "tokenizer": tokenizer, "dtype": dtype, "max_model_len": max_model_len, "seed": seed}
        loaded = load(EngineConfig.from_options(**options), progress)
        for warning in loaded.info.warnings:
            log.warning(warning)
        self.core = loaded.core
        self.info: ModelInfo = loaded.info
        self.tokenizer: Tokenizer = loaded.tokenizer
        self._template = loaded.template
        self._ids = count()

    @property
    def config(self) -> EngineConfig:
        """Every option, resolved."""
        return self.core.config

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (its generation_config) over ours."""
        return SamplingParams.from_optional(self.info.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order, computed together.

        Without `sampling_params` the model's defaults hold, with 16 tokens if it names no length; a list gives each prompt its
        own. Raises RequestError, before anything runs, for a prompt or parameter that cannot be.
        """
        one = isinstance(prompts, (str, Mapping)) or _is_ids(prompts)
        todo: list[Prompt] = [prompts] if one else list(prompts)  # type: ignore[arg-type, list-item]
        return self._generate([self._encode(prompt) for prompt in todo], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to several, through the model's chat template.

        Without `sampling_params` an answer may take the rest of the context, as in the chat endpoint.
        """
        one = not messages or isinstance(messages[0], Mapping)
        prompts: list[tuple[str | None, list[int]]] = []
        for conversation in [messages] if one else messages:
            text = self._template.render(
                conversation,
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            prompts.append((text, self.tokenizer.encode(text, add_special_tokens=False)))
        return self._generate(prompts, sampling_params or self._open_ended(), use_tqdm)

    @overload
    def decode_loop(self, prompt_ids: Sequence[int], sampling_params: SamplingParams | None = None) -> DecodeLoop: ...
    @overload
    def decode_loop(
        self, prompt_ids: Sequence[Sequence[int]], sampling_params: SamplingParams | None = None
    ) -> BatchDecodeLoop: ...
    def decode_loop(
        self, prompt_ids: Sequence[int] | Sequence[Sequence[int]], sampling_params: SamplingParams | None = None
    ) -> DecodeLoop | BatchDecodeLoop:
        """An iterator of token ids for one prompt; for a list of prompts, of one id (or None) per prompt and step.

        Nothing stands between the model and the caller: no text, no stop strings, no log-probabilities. Without
        `sampling_params` the model's defaults hold, for the rest of the context; a loop reserves its `max_tokens`.
        """
        if not len(prompt_ids) or _is_ids(prompt_ids):
            return DecodeLoop(self, prompt_ids, sampling_params)  # type: ignore[arg-type]
        return BatchDecodeLoop(self, prompt_ids, sampling_params)  # type: ignore[arg-type]

    def loop_request(self, prompt_ids: Sequence[int], sampling_params: SamplingParams | None) -> EngineRequest:
        """One resolved request of a decode loop. Raises RequestError for what a loop does not do."""
        params = sampling_params or self._open_ended()
        for name, neutral in (("n", 1), ("stop", []), ("logprobs", None), ("prompt_logprobs", None)):
            if getattr(params, name) != neutral:
                raise RequestError(f"a decode loop gives token ids only: {name} does not apply", param=name)
        if params.max_tokens == 0:
            raise RequestError("a decode loop needs max_tokens of at least 1", param="max_tokens")
        return to_requests(prompt_ids, params, self.info, f"loop-{next(self._ids)}")[0]

    def _open_ended(self) -> SamplingParams:
        params = self.get_default_sampling_params()
        if "max_tokens" not in self.info.sampling_defaults:
            params.max_tokens = None
        return params

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        given: Any = prompt
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(given, str):
            return given, check_prompt_ids(self.tokenizer.encode(given), self.info.vocab_size)
        if not hasattr(given, "__len__"):
            raise RequestError(
                f'a prompt is text, token ids, {{"prompt": text}} or {{"prompt_token_ids": ids}}, got {type(given).__name__}',
                param="prompt",
            )
        return None, check_prompt_ids(given, self.info.vocab_size)

    def _generate(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = sampling_params or self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(each)} sampling_params", param="sampling_params")
        results: list[RequestOutput] = []
        requests: list[EngineRequest] = []
        answers: dict[str, Answer] = {}
        for (text, ids), chosen in zip(prompts, each, strict=True):
            result = RequestOutput(str(next(self._ids)), text, ids)
            results.append(result)
            for index, request in enumerate(to_requests(ids, chosen, self.info, f"llm-{result.request_id}")):
                requests.append(request)
                answers[request.request_id] = Answer(result, index, chosen, self.info.eos_token_ids, self.tokenizer)
        with _progress(len(results), use_tqdm) as bar:
            self._run(requests, answers, bar)
        return results

    def _run(self, requests: list[EngineRequest], answers: dict[str, Answer], bar: _Bar) -> None:
        core, began = self.core, perf_counter()
        try:
            for request in requests:
                core.add(request)
            while answers:
                news = core.step()
                if not news and core.stalled:
                    raise CapacityError("open decode loops hold the slots or KV blocks these requests need: close them first")
                for out in news:
                    answer = answers.get(out.request_id)
                    if answer is None:
                        continue  # the echo of an abort, or somebody else's
                    if out.finish_reason == "error":
                        raise SparkrtError(f"request {answer.result.request_id} failed: {out.error}")
                    answer.feed(out, perf_counter() - began)
                    bar.tokens(len(out.token_ids))
                    if answer.finished:
                        del answers[out.request_id]
                        if out.finish_reason is None:  # a stop string: the engine does not know yet
                            core.abort([out.request_id])
                        if answer.result.finished:
                            bar.advance()
        finally:
            core.abort(answers)  # after an error or an interrupt nothing of ours goes on running
            core.settle()

    def close(self) -> None:
        """Give back the model's memory; again is fine."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _is_ids(value: Any) -> bool:
    return len(value) > 0 and isinstance(value[0], Integral)


class _Bar:
    """Counts prompts and tokens; shows nothing."""

    def tokens(self, n: int) -> None: ...

    def advance(self) -> None: ...


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[_Bar]:
    """A progress bar over `total` prompts with tokens per second, on stderr."""
    if not shown or not total:
        yield _Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("Processed prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]:.0f} tok/s"),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as rich:
        task = rich.add_task("", total=total, rate=0.0)

        class Shown(_Bar):
            began, generated = perf_counter(), 0

            def tokens(self, n: int) -> None:
                self.generated += n

            def advance(self) -> None:
                rich.update(task, advance=1, rate=self.generated / (perf_counter() - self.began))

        yield Shown()
