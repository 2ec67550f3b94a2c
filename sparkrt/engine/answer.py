"""`Answer`: one sequence's tokens on their way to text."""

from __future__ import annotations

from collections.abc import Collection, Set

from sparkrt.engine.messages import EngineOutput
from sparkrt.engine.messages import Logprob as TokenLogprob
from sparkrt.engine.outputs import CompletionOutput, Logprob, RequestOutput
from sparkrt.engine.params import SamplingParams
from sparkrt.text.assembler import TextAssembler
from sparkrt.text.tokenizer import Tokenizer


class Answer:
    """Fills one `CompletionOutput` of `result`, which it appends. `shown`: special tokens that its text has all the same."""

    def __init__(
        self,
        result: RequestOutput,
        index: int,
        params: SamplingParams,
        eos_ids: Collection[int],
        tokenizer: Tokenizer,
        shown: Set[int] = frozenset(),
    ) -> None:
        self.result, self.output = result, CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        result.outputs.append(self.output)
        self._quiet = set(eos_ids) - set(params.stop_token_ids)  # stop ids that are no stop_reason
        self._tokenizer = tokenizer
        self._assembler = TextAssembler(
            tokenizer,
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            shown=shown,
        )
        self._has_text = params.detokenize

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def feed(self, news: EngineOutput, seconds: float) -> None:
        """Take a step's news, `seconds` after the request was handed in."""
        output, result = self.output, self.result
        result.num_cached_tokens = max(result.num_cached_tokens, news.cached_tokens)
        if news.prompt_logprobs is not None and result.prompt_logprobs is None:
            result.prompt_logprobs = [None if p is None else self._by_token(p) for p in news.prompt_logprobs]
        if news.token_ids and result.metrics.first_token is None:
            result.metrics.first_token = seconds
        output.token_ids += news.token_ids
        if output.logprobs is not None:
            output.logprobs += [self._by_token(row) for row in news.logprobs or ()]
        output.finish_reason = news.finish_reason
        output.stop_reason = None if news.stop_token in self._quiet else news.stop_token
        if self._has_text:
            self._read(news)
        if self.finished and output.logprobs is not None:
            output.cumulative_logprob = sum(row[t].logprob for t, row in zip(output.token_ids, output.logprobs, strict=True))
        if self.finished and all(o.finish_reason is not None for o in result.outputs):
            result.finished, result.metrics.finished = True, seconds

    def _read(self, news: EngineOutput) -> None:
        output, delta = self.output, self._assembler.feed(news.token_ids, stop_token=news.stop_token)
        output.text += delta.text
        if not delta.finished and news.finish_reason is not None:
            delta = self._assembler.flush()
            output.text += delta.text
        if delta.finished:  # a stop string, which may come before what the engine stopped at
            output.finish_reason, output.stop_reason = "stop", delta.stop_reason
            del output.token_ids[delta.tokens_used :]
            if output.logprobs is not None:
                del output.logprobs[delta.tokens_used :]

    def _by_token(self, row: TokenLogprob) -> dict[int, Logprob]:
        """The chosen token, then the most likely ones."""
        name = self._tokenizer.token_str
        found = {row.token_id: Logprob(row.logprob, row.rank, name(row.token_id))}
        for rank, (token, logprob) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), 1):
            found.setdefault(token, Logprob(logprob, rank, name(token)))
        return found
