"""``LLM``: a model in this process, for scripts.

>>> llm = LLM(model="SmolLM2-135M-Instruct.Q4_1.gguf")
>>> llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text
"""

import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from compilerllm import compile_watch
from compilerllm.config import EngineConfig
from compilerllm.errors import GenerationFailed, InvalidParameter
from compilerllm.ir.step import Executable
from compilerllm.outputs import CompletionOutput, RequestOutput, read_logprobs
from compilerllm.runtime.beams import BeamOptions, BeamSearch, EarlyStopping
from compilerllm.runtime.messages import Batch, Delta, Ready, Request, Stats
from compilerllm.sampling_params import SamplingParams
from compilerllm.text.absent import open_tokenizer
from compilerllm.text.chat import render_chat
from compilerllm.text.output import SequenceText, TextDelta, compile_stops
from compilerllm.text.prompts import Prompt, encode_prompt, fit_params, split_params
from compilerllm.text.tokenizer import Tokenizer


class Engine(Protocol):
    """What ``LLM`` needs of ``runtime.engine.InProcessEngine``."""

    @property
    def ready(self) -> Ready: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def step(self) -> Batch: ...

    def has_unfinished(self) -> bool: ...

    def stats(self) -> Stats: ...

    def close(self) -> None: ...


@dataclass
class _Running:
    """One sequence while it is generated."""

    request: RequestOutput
    output: CompletionOutput
    text: SequenceText


class LLM:
    """Loads (and where the cache misses, compiles) a model and generates with it.

    ``model`` is a folder, a hub id or a .gguf file; further keywords are the fields of ``config.ModelConfig``,
    ``CacheConfig``, ``SchedulerConfig`` and ``StartConfig``: dtype, optimization_level, max_model_len, kv_cache_bytes,
    num_blocks, enable_prefix_caching, max_num_seqs, artifact ... With ``artifact``, a path, nothing is ever built, and
    ``load_format="dummy"`` needs no ``model``. Not to be called from several threads at once. ``close`` frees the model; a
    ``with`` statement does so by itself.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        begin = time.perf_counter()
        from compilerllm.loading import load_engine_model, tokenizer_dir
        from compilerllm.runtime.engine import InProcessEngine
        from compilerllm.runtime.grammars import make_grammars
        from compilerllm.serving_artifact import find_artifact, settle

        compile_watch.watch()
        config = EngineConfig.create(**options if model is None else {"model": model, **options})
        start = time.perf_counter()
        with compile_watch.asked_for_by(f"LLM({config.model.display_name!r})"):
            found = find_artifact(config)
        config = settle(config, found)
        compiled = time.perf_counter()
        loaded, facts = load_engine_model(config)
        tokenizer = open_tokenizer(tokenizer_dir(found.path))
        weights = time.perf_counter()
        longest = config.model.max_model_len
        engine = InProcessEngine(
            loaded,
            config.scheduler,
            config.cache,
            max_model_len=longest,
            facts=facts,
            grammars=make_grammars(facts, loaded.vocab_size, config.structured),
        )
        self._begin(engine, tokenizer, loaded)
        ready = time.perf_counter()
        self.start_seconds |= {
            "import": start - begin,
            "compile": compiled - start, "load": weights - compiled, "allocate": ready - weights,
            **getattr(loaded, "start_seconds", {}),
        }  # fmt: skip

    def _begin(self, engine: Engine, tokenizer: Tokenizer, model: Executable | None = None) -> None:
        self._engine, self.tokenizer = engine, tokenizer
        self._count = 0
        self.model = model  # None where the engine was made elsewhere
        # Where the start went. An executable may add parts of its own, such as "capture" (within "allocate").
        self.start_seconds: dict[str, float] = {}

    @classmethod
    def over(cls, engine: Engine, tokenizer: Tokenizer) -> "LLM":
        """An ``LLM`` over an engine that exists already."""
        llm = cls.__new__(cls)
        llm._begin(engine, tokenizer)
        return llm

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._engine.close()

    @property
    def engine(self) -> Engine:
        """The engine itself, for who wants to see single steps. Not while ``generate`` or a stream runs."""
        return self._engine

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        return self._engine.ready.max_model_len

    @property
    def card(self) -> dict[str, str]:
        """Label and text of what was loaded."""
        return self._engine.ready.card

    def stats(self) -> Stats:
        """Counters since the start: tokens, preemptions, prefix hits, blocks in use."""
        return self._engine.stats()

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a prompt in any form that ``generate`` takes."""
        return encode_prompt(self.tokenizer, prompt, max_model_len=self.max_model_len).token_ids

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts; the outputs are in their order.

        A prompt is a text, {"prompt": text}, {"prompt_token_ids": ids} or a list of ids; ``prompts`` is one or a list of
        them. ``sampling_params`` is one for all or one for each. Where ``max_tokens`` does not fit the context, the
        output ends with finish reason "length" at its end. A progress bar is shown on a terminal only.

        Raises ``InvalidParameter`` for a prompt or parameter that cannot be served, before any is run, and
        ``GenerationFailed`` if the model fails.
        """
        listed = prompts if isinstance(prompts, list) and not _is_token_ids(prompts) else [prompts]
        return self._generate(
            [encode_prompt(self.tokenizer, p, max_model_len=self.max_model_len) for p in listed],
            sampling_params,
            use_progress,
        )

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of {role, content}) or a list of them, through the model's chat template."""
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **template_variables,
        }
        return self._generate(
            [self._encode_chat(c, options) for c in conversations], sampling_params, use_progress
        )

    def beam_search(
        self,
        prompts: Any,
        beam_width: int = 4,
        max_tokens: int = 16,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        ignore_eos: bool = False,
        include_stop_str_in_output: bool = False,
    ) -> list[RequestOutput]:
        """The ``beam_width`` likeliest continuations of each prompt, the best first, with their ``cumulative_logprob``.

        ``prompts`` as in ``generate``; ``length_penalty`` and ``early_stopping`` as in transformers (``BeamOptions``).
        ``include_stop_str_in_output``: the text shows the token that ended it.
        """
        params = SamplingParams(
            n=beam_width,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            include_stop_str_in_output=include_stop_str_in_output,
            skip_special_tokens=not include_stop_str_in_output,
        )
        listed = prompts if isinstance(prompts, list) and not _is_token_ids(prompts) else [prompts]
        limit, options = self.max_model_len, BeamOptions(length_penalty, early_stopping)
        encoded = [encode_prompt(self.tokenizer, p, max_model_len=limit) for p in listed]
        fitted = [fit_params(params, len(prompt.token_ids), limit, "prompts") for prompt in encoded]
        return [self._search(p, own, options) for p, own in zip(encoded, fitted, strict=True)]

    def _search(self, prompt: Prompt, params: SamplingParams, options: BeamOptions) -> RequestOutput:
        self._count += 1
        found = RequestOutput(str(self._count), prompt.text, prompt.token_ids, [], finished=True)
        eos = self.tokenizer.eos_token_ids
        search = BeamSearch(self._request(found.request_id, prompt, params), options)
        while not search.done:
            search.advance(self._answers(search.requests()))
        for i, (beam, delta) in enumerate(search.results()):
            output = CompletionOutput(i, cumulative_logprob=beam.total)
            text = SequenceText(self.tokenizer, params, prompt.token_ids, eos, None)
            self._extend(output, text.add(delta))
            found.outputs.append(output)
        return found

    def _answers(self, requests: list[Request]) -> dict[str, Delta]:
        """The one delta of each request. However it is left, the engine holds nothing of them."""
        answers: dict[str, Delta] = {}
        try:
            for request in requests:
                self._engine.submit(request)
            while len(answers) < len(requests):
                for delta in self._engine.step().deltas:
                    if delta.finish_reason == "error":
                        raise GenerationFailed(delta.error or "the model failed")
                    answers[delta.request_id] = delta
        finally:
            self._engine.abort([r.request_id for r in requests if r.request_id not in answers])
            while self._engine.has_unfinished():
                self._engine.step()
        return answers

    def stream_chat(
        self, messages: list[dict[str, Any]], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """The answer to one conversation, piece by piece. Closing the iterator ends the generation."""
        yield from self._stream(self._encode_chat(messages, {}), sampling_params)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """The continuation of one prompt, piece by piece. Closing the iterator ends the generation."""
        yield from self._stream(encode_prompt(self.tokenizer, prompt), sampling_params)

    def _stream(self, prompt: Prompt, sampling_params: SamplingParams | None) -> Generator[str, None, None]:
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise InvalidParameter("a stream has one output: n must be 1", "n")
        for _, new in self._run([prompt], [params], []):
            if new.text:
                yield new.text

    def _encode_chat(self, messages: Any, options: dict[str, Any]) -> Prompt:
        text = render_chat(self.tokenizer, self._engine.ready.model, messages, **options)
        return encode_prompt(self.tokenizer, text, add_special_tokens=False, param="messages")

    def _generate(
        self,
        prompts: list[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
        use_progress: bool,
    ) -> list[RequestOutput]:
        params = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given or [])
        params = params if given is not None else [SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            message = f"{len(prompts)} prompts but {len(params)} sampling parameters: give one for all, or one for each"
            raise InvalidParameter(message, "sampling_params")
        outputs: list[RequestOutput] = []
        with _progress(use_progress, sum(p.n for p in params)) as progress:
            for _, new in self._run(prompts, params, outputs):
                progress.advance(len(new.token_ids), new.finish_reason is not None)
        return outputs

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], outputs: list[RequestOutput]
    ) -> Iterator[tuple[CompletionOutput, TextDelta]]:
        """Generate, filling ``outputs``; yields each addition. However it is left, the engine holds nothing of it."""
        running: dict[str, _Running] = {}
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                outputs.append(self._submit(prompt, wanted, running))
            while running:
                for delta in self._engine.step().deltas:
                    sequence = running.get(delta.request_id)
                    if sequence is None:
                        continue  # ended by a stop string meanwhile
                    if delta.finish_reason == "error":
                        del running[delta.request_id]
                        raise GenerationFailed(delta.error or "the model failed")
                    sequence.request.num_cached_tokens += delta.num_cached_tokens
                    new = sequence.text.add(delta)
                    self._extend(sequence.output, new)
                    if new.finish_reason is not None:
                        del running[delta.request_id]
                        if delta.finish_reason is None:
                            self._engine.abort([delta.request_id])
                    yield sequence.output, new
        finally:
            if running:
                self._engine.abort(list(running))
            while self._engine.has_unfinished():
                self._engine.step()
        for output in outputs:
            output.finished = True

    def _submit(self, prompt: Prompt, params: SamplingParams, running: dict[str, _Running]) -> RequestOutput:
        self._count += 1
        request = RequestOutput(str(self._count), prompt.text, prompt.token_ids, [])
        stops, eos = compile_stops(params), self.tokenizer.eos_token_ids
        for i, one in enumerate(split_params(params)):
            request_id = f"{request.request_id}-{i}"
            output = CompletionOutput(i)
            if params.logprobs is not None:
                output.logprobs, output.cumulative_logprob = [], 0.0
            request.outputs.append(output)
            self._engine.submit(self._request(request_id, prompt, one))
            running[request_id] = _Running(
                request, output, SequenceText(self.tokenizer, one, prompt.token_ids, eos, stops)
            )
        return request

    def _request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """What the engine is asked, now."""
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            arrival_time=time.monotonic(),
            eos_token_ids=self.tokenizer.eos_token_ids,
        )

    def _extend(self, output: CompletionOutput, new: TextDelta) -> None:
        output.text += new.text
        output.token_ids += new.token_ids
        output.finish_reason, output.stop_reason = new.finish_reason, new.stop_reason
        if new.logprobs is None or output.logprobs is None or output.cumulative_logprob is None:
            return
        for token_id, at in zip(new.token_ids, new.logprobs, strict=True):
            names = {i: self.tokenizer.token_text(i) for i in (token_id, *at.top_ids)}
            output.logprobs.append(read_logprobs(token_id, at, names))
            output.cumulative_logprob += at.chosen


def _is_token_ids(prompts: list[Any]) -> bool:
    return bool(prompts) and isinstance(prompts[0], int)


class _Silent:
    def advance(self, tokens: int, finished: bool) -> None:
        pass


class _Bar:
    """Sequences done and tokens a second, on stderr."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:.0f} tokens/s"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=total, speed=0.0)
        self._tokens, self._start = 0, time.monotonic()

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, tokens: int, finished: bool) -> None:
        self._tokens += tokens
        if finished:
            speed = self._tokens / (time.monotonic() - self._start)
            self._progress.update(self._task, advance=1, speed=speed)


def _progress(wanted: bool, total: int) -> AbstractContextManager[_Bar | _Silent]:
    return _Bar(total) if wanted and sys.stderr.isatty() else nullcontext(_Silent())
