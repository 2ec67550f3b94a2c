"""`LLM`: generation in this process, under the names scripts for other engines use; and `DecodeLoop`: its token ids alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from numbers import Integral
from time import perf_counter
from typing import Any, Self, TypeAlias, overload

from sparkrt.engine.answer import Answer
from sparkrt.engine.config import EngineConfig, Progress
from sparkrt.engine.job import Job
from sparkrt.engine.loading import load
from sparkrt.engine.messages import EngineOutput, EngineRequest
from sparkrt.engine.outputs import RequestOutput
from sparkrt.engine.params import SamplingParams, to_requests
from sparkrt.errors import CapacityError, RequestError, SparkrtError
from sparkrt.text.reasoning import reasoning_format
from sparkrt.text.template import check_kwargs
from sparkrt.text.tokenizer import Tokenizer

log = logging.getLogger("sparkrt")

Ids: TypeAlias = Sequence[int]
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Messages: TypeAlias = Sequence[Mapping[str, Any]]


class LLM:
    """A model loaded into this process. Not thread-safe; close it, or use it in a `with`, to give its memory back at once.

    `model`: a folder, a GGUF file or a hub id (None: sparkrt-tiny). `options`: those of `EngineConfig`. `progress(stage, done,
    total)` is called while loading. LoadError, before anything large is allocated, if the model cannot be served so.

    `tokenizer` has `encode(text) -> list[int]`, `decode(ids) -> str` and `eos_token_ids`; `info` has what is known of the model:
    `max_model_len` in tokens, `vocab_size`, `sampling_defaults`, and `lines`, the summary that a server prints.
    """

    def __init__(self, model: str | None = None, *, progress: Progress | None = None, **options: Any) -> None:
        self.core, self.tokenizer, self._template, self.info = load(EngineConfig.from_options(model=model, **options), progress)
        self._ids, self._reasoning = count(), reasoning_format("auto", "\n".join(self._template.texts.values()))
        for warning in self.info.warnings:
            log.warning(warning)

    @property
    def config(self) -> EngineConfig:
        """Every option, resolved."""
        return self.core.config

    def get_tokenizer(self) -> Tokenizer:
        """The same as `tokenizer`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (its generation_config) over ours."""
        return SamplingParams.from_optional(self.info.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order, computed together. A prompt is text, a list of token ids, {"prompt": text} or
        {"prompt_token_ids": ids}, the last two perhaps with a "cache_salt", under which the prefix cache keeps them apart.
        RequestError before anything runs, if one cannot be answered.

        Without `sampling_params` the model's defaults hold, with 16 tokens if it names no length; a list gives each its own.
        `priority` has one number for each prompt: lower ones go first (`scheduling_policy="priority"`).
        """
        todo: Any = [prompts] if isinstance(prompts, (str, Mapping)) or _is_ids(prompts, "prompts") else prompts
        salts = [prompt.get("cache_salt") if isinstance(prompt, Mapping) else None for prompt in todo]
        return self._generate([self._encode(prompt) for prompt in todo], sampling_params, use_tqdm, priority, salts)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, each a list of {"role": ..., "content": ...}, by the model's chat template.

        Without `sampling_params` they may take the rest of the context. `tools` are in OpenAI's form; calls and thinking stay in
        the text as the model writes them. RequestError names what the template cannot render.
        """
        check_kwargs(kwargs := chat_template_kwargs or {})  # before they become keyword arguments, where some would clash
        given, prompts = None if tools is None else list(tools), list[tuple[str | None, Sequence[int]]]()
        one = not len(_list(messages, "messages")) or isinstance(messages[0], Mapping)
        for chat in [messages] if one else messages:
            text = self._template.render(chat, given, add_generation_prompt, continue_final_message, **kwargs)
            prompts.append((text, self.tokenizer.encode(text, add_special_tokens=False)))
        return self._generate(prompts, sampling_params or self._open_ended(), use_tqdm)

    @overload
    def decode_loop(self, prompt_ids: Ids, sampling_params: SamplingParams | None = None) -> DecodeLoop: ...
    @overload
    def decode_loop(self, prompt_ids: Sequence[Ids], sampling_params: SamplingParams | None = None) -> BatchDecodeLoop: ...
    def decode_loop(self, prompt_ids: Any, sampling_params: Any = None) -> DecodeLoop | BatchDecodeLoop:
        """An iterator of token ids for one prompt [length]; for a list of prompts, of lists [prompts] of an id, or None, a step.

        No text, no stop strings, no log-probabilities: RequestError where they are asked for. A loop reserves its `max_tokens`,
        unless given the rest of the context: CapacityError where other loops hold too much of it.
        """
        one = _is_ids(prompt_ids, "prompt_ids") or not len(prompt_ids)
        return DecodeLoop(self, prompt_ids, sampling_params) if one else BatchDecodeLoop(self, prompt_ids, sampling_params)

    def _loop_request(self, prompt_ids: Ids, sampling_params: SamplingParams | None) -> EngineRequest:
        """One resolved request of a decode loop. RequestError for what a loop does not do."""
        params = sampling_params or self._open_ended()
        for name, neutral in (("n", 1), ("stop", []), ("logprobs", None), ("prompt_logprobs", None)):
            if getattr(params, name) != neutral:
                raise RequestError(f"a decode loop gives token ids only: {name} does not apply", param=name)
        if params.max_tokens == 0:
            raise RequestError("a decode loop needs max_tokens of at least 1", param="max_tokens")
        thinks = self._thinks(None, prompt_ids, params)
        return to_requests(prompt_ids, params, self.info, f"loop-{next(self._ids)}", thinks=thinks)[0]

    def _thinks(self, text: str | None, ids: Ids, params: SamplingParams) -> bool | None:
        """See `ReasoningFormat.thinks`; False where no budget needs to know."""
        if params.thinking_token_budget is None or self._reasoning is None:
            return False
        return self._reasoning.within(self.tokenizer.decode(ids, False) if text is None else text)

    def sleep(self, level: int = 1) -> int:
        """Give the model's memory back until `wake_up` (`enable_sleep_mode=True`); see `EngineCore.sleep`."""
        return self.core.sleep(level)

    def wake_up(self) -> None:
        self.core.wake_up()

    def _open_ended(self) -> SamplingParams:
        params = self.get_default_sampling_params()
        if "max_tokens" not in self.info.sampling_defaults:
            params.max_tokens = None
        return params

    def _encode(self, prompt: Any) -> tuple[str | None, Sequence[int]]:
        given = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        if isinstance(given, str):
            return given, self.tokenizer.encode(given)
        if not hasattr(given, "__len__"):
            forms = 'text, token ids, {"prompt": text} or {"prompt_token_ids": ids}'
            raise RequestError(f"a prompt is {forms}, got {type(given).__name__}", param="prompt")
        return None, given

    def _generate(
        self,
        prompts: list[tuple[str | None, Ids]],
        sampling_params: Params,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
        salts: Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        params = sampling_params or self.get_default_sampling_params()
        each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        ranks = [0] * len(prompts) if priority is None else _list(priority, "priority")
        for name, given in (("sampling_params", each), ("priority", ranks)):
            if len(given) != len(prompts):
                raise RequestError(f"{len(prompts)} prompts but {len(given)} {name}", param=name)
        if wrong := [type(chosen).__name__ for chosen in each if not isinstance(chosen, SamplingParams)]:
            raise RequestError(
                f"sampling_params: expected SamplingParams or a list of them, got {wrong[0]}", param="sampling_params"
            )
        results, requests, answers = list[RequestOutput](), list[EngineRequest](), dict[str, Answer]()
        for (text, ids), chosen, rank, salt in zip(prompts, each, ranks, salts or [None] * len(prompts), strict=True):
            name, thinks = str(next(self._ids)), self._thinks(text, ids, chosen)
            made = to_requests(ids, chosen, self.info, f"llm-{name}", priority=rank, thinks=thinks, cache_salt=salt)
            results.append(RequestOutput(name, text, made[0].prompt_ids))
            requests += made
            for index, request in enumerate(made):
                answers[request.request_id] = Answer(results[-1], index, chosen, self.info.eos_token_ids, self.tokenizer)
        with _progress(len(results), use_tqdm) as report:
            self._run(requests, answers, report)
        return results

    def _run(self, requests: list[EngineRequest], answers: dict[str, Answer], report: Callable[[int, bool], None]) -> None:
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
                    if out.error is not None:
                        kind = CapacityError if out.finish_reason == "timeout" else SparkrtError
                        raise kind(f"request {answer.result.request_id} failed: {out.error}")
                    answer.feed(out, perf_counter() - began)
                    report(len(out.token_ids), answer.result.finished)
                    if answer.finished:
                        del answers[out.request_id]
                        if out.finish_reason is None:  # a stop string: the engine does not know yet
                            core.abort([out.request_id])
        finally:
            core.abort(answers)  # after an error or an interrupt nothing of ours goes on running
            core.settle()

    def reset_prefix_cache(self) -> None:
        """Forget what the prefix cache holds and no running request uses."""
        self.core.reset_prefix_cache()

    def close(self) -> None:
        """Give back the model's memory; again is fine."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _list(value: Any, name: str) -> Any:
    """`value`, which can be counted and indexed. RequestError otherwise."""
    if isinstance(value, (str, Mapping)) or not hasattr(value, "__getitem__"):
        raise RequestError(f"{name} must be a list, got {type(value).__name__}", param=name)
    return value


def _is_ids(value: Any, name: str) -> bool:
    return len(_list(value, name)) > 0 and isinstance(value[0], Integral)


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[int, bool], None]]:
    """A progress bar over `total` prompts with tokens per second, on stderr; yields what to tell it: tokens, prompt done."""
    if not shown or not total:
        yield lambda tokens, done: None
        return
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    with RichProgress(console=Console(stderr=True)) as bar:
        task, began, generated, ended = bar.add_task(f"0/{total} prompts", total=total), perf_counter(), 0, 0

        def report(tokens: int, done: bool) -> None:
            nonlocal generated, ended
            generated, ended = generated + tokens, ended + done
            if done:
                rate = f"{generated / (perf_counter() - began):.0f} tok/s"
                bar.update(task, advance=1, description=f"{ended}/{total} prompts, {rate}")

        yield report


class Loop:
    """What both forms of decode loop share: prompts that go on in step, when the caller asks, beside requests. A loop always
    gives its slots and KV blocks back: at the end, on `close`, at the end of a `with`, on an error, and when it is forgotten.
    """

    def __init__(self, llm: LLM, prompts: Sequence[Ids], sampling_params: SamplingParams | None = None) -> None:
        self._core, self._outbox, self._jobs, self._live = llm.core, list[EngineOutput](), list[Job](), set[str]()
        if not prompts:
            raise RequestError("no prompts", param="prompt")
        self._jobs = self._core.open_loop([llm._loop_request(ids, sampling_params) for ids in prompts], self._outbox)
        self._live |= {job.request_id for job in self._jobs}

    def _next(self) -> list[int | None]:
        """One step of the model, the first time as many as the prompts need."""
        given, due = dict[str, int](), set(self._live)
        try:
            if not due:
                raise StopIteration
            while due:
                for out in self._core.step(self._outbox):
                    if out.finish_reason is not None:
                        self._live.remove(out.request_id)
                    if out.error is not None:  # met by somebody else who read our step
                        raise SparkrtError(f"the decode loop failed: {out.error}")
                    given[out.request_id] = out.token_ids[0]
                due -= given.keys()
            return [given.get(job.request_id) for job in self._jobs]
        except BaseException:  # StopIteration included: whatever ended the loop, it holds nothing
            self.close()
            raise

    def close(self) -> None:
        """Give everything back; again is fine."""
        self._live.clear()
        self._core.close_loop(self._jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class BatchDecodeLoop(Loop, Iterator[list[int | None]]):
    """Several prompts in step: each `next` is one model step and gives one token id per prompt, None for those that ended.

    A row ends with its stop id (given last) or after `max_tokens`. CapacityError, taking nothing, without room for all now.
    """

    def __next__(self) -> list[int | None]:
        return self._next()


class DecodeLoop(Loop, Iterator[int]):
    """One prompt: an iterator of token ids, the stop id included; `LLM.decode_loop` makes it. See `BatchDecodeLoop`."""

    def __init__(self, llm: LLM, prompt_ids: Sequence[int], sampling_params: SamplingParams | None = None) -> None:
        super().__init__(llm, [prompt_ids], sampling_params)

    def __next__(self) -> int:
        token = self._next()[0]
        assert token is not None
        return token
