"""What ``compilerllm bench`` measures with: made-up prompts, timed runs, percentiles, and where results go."""

import importlib.metadata
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from compilerllm import __version__
from compilerllm.errors import CompilerLLMError, GenerationFailed
from compilerllm.runtime.messages import Request
from compilerllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # they load torch, which a client of a server has no need of
    from compilerllm.llm import LLM, Engine


class CannotWriteResults(CompilerLLMError):
    """The file for results cannot be written."""


class DatasetInvalid(CompilerLLMError):
    """A file of prompts that cannot be read."""


@runtime_checkable
class Roofed(Protocol):
    """A model that can say how fast its weights could be read: the floor of a decode step."""

    @property
    def weight_bytes(self) -> int: ...

    def read_bandwidth(self) -> float:
        """GB/s at which the device reads the model's own weights, measured."""
        ...


class KernelTime(Protocol):
    """One kernel of a step, timed on the device."""

    @property
    def kernel(self) -> str: ...

    @property
    def node(self) -> str:
        """The IR node it computes."""
        ...

    @property
    def launches(self) -> int:
        """How often a step launches it."""
        ...

    @property
    def microseconds(self) -> float:
        """Of one launch."""
        ...

    @property
    def nbytes(self) -> float:
        """Bytes that one launch must read and write; 0 = not known."""
        ...

    @property
    def flops(self) -> float:
        """Floating-point operations of one launch; 0 = not known."""
        ...


@runtime_checkable
class KernelTimer(Protocol):
    """A model that times its kernels one by one."""

    @property
    def peak_bandwidth(self) -> float:
        """GB/s, measured on the device's kind."""
        ...

    @property
    def peak_tflops(self) -> float:
        """TFLOP/s of matrix products in the model's type, measured on the device's kind."""
        ...

    def time_kernels(self, sequences: int, query: int, context: int) -> Sequence[KernelTime]:
        """The kernels of a step of ``sequences`` sequences, ``query`` tokens each, the last at position context - 1."""
        ...


@dataclass
class Run:
    """What one call of ``timed_run`` saw. Seconds are from the call's start unless said."""

    seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)  # of each prompt
    first: list[float] = field(
        default_factory=list
    )  # when each request's first token came, in order of arrival
    gaps: list[float] = field(default_factory=list)  # between two tokens of one request
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))


def made_up_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids; the first and last ids, where special tokens are, are left out of large vocabularies."""
    source = random.Random(seed)
    low, high = (100, vocab_size - 512) if vocab_size > 2048 else (0, vocab_size)
    return [source.choices(range(low, high), k=n) for n in lengths]


def timed_run(
    engine: "Engine",
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    on_end: Callable[[], None] = lambda: None,
) -> Run:
    """Generate exactly ``lengths[i]`` tokens for prompt i, greedily, all handed over at once.

    ``on_end`` is called as each request ends. Raises ``GenerationFailed``; prompts or lengths that do not fit raise
    what ``submit`` raises.
    """
    run = Run(tokens=[[] for _ in prompts])
    last: dict[str, float] = {}
    start = time.perf_counter()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        arrival = time.monotonic()
        engine.submit(
            Request(request_id=str(i), prompt_token_ids=prompt, params=params, arrival_time=arrival)
        )
    while engine.has_unfinished():
        deltas = engine.step().deltas
        now = time.perf_counter()
        for delta in deltas:
            if delta.finish_reason in ("error", "abort"):
                raise GenerationFailed(delta.error or "the request was aborted")
            run.tokens[int(delta.request_id)] += delta.token_ids
            before = last.get(delta.request_id)
            if before is None:
                run.first.append(now - start)
            else:
                run.gaps.append(now - before)
            last[delta.request_id] = now
            run.cached_tokens += delta.num_cached_tokens
            if delta.finish_reason is not None:
                run.preemptions += delta.num_preemptions
                on_end()
    run.seconds = time.perf_counter() - start
    for i, (tokens, length) in enumerate(zip(run.tokens, lengths, strict=True)):
        if len(tokens) != length:
            raise GenerationFailed(
                f"prompt {i} got {len(tokens)} of {length} tokens: its context ends before. Ask for shorter ones."
            )
    return run


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that ``share`` percent of ``values`` do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)] if ordered else float("nan")


def read_floor(model: object) -> dict[str, float] | None:
    """Bytes of the weights, the rate they can be read at, and the milliseconds of both. None: the model cannot say."""
    if not isinstance(model, Roofed):
        return None
    rate, nbytes = model.read_bandwidth(), model.weight_bytes
    return {
        "weight_bytes": nbytes,
        "read_gb_per_second": round(rate, 1),
        "floor_ms": round(nbytes / rate / 1e6, 5),
    }


def describe(llm: "LLM", benchmark: str) -> dict[str, Any]:
    """What every record says of its making."""
    ready = llm.engine.ready
    return {
        "benchmark": benchmark,
        "model": ready.model,
        "target": ready.target,
        "date": time.strftime("%Y-%m-%d"),
        "version": __version__,
        "torch": importlib.metadata.version("torch"),
    }


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns, the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def write_record(record: dict[str, Any], output: Path | None) -> None:
    """The last line for machines, and the same line at the end of ``output``. Raises ``CannotWriteResults``."""
    line = json.dumps(record)
    if output is not None:
        try:
            with output.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            print(line)
            raise CannotWriteResults(
                f"cannot write {output}: {error.strerror or error}. Name another with --output."
            ) from error
    print(line, flush=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A callback that moves a bar on by one. The bar is shown on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
