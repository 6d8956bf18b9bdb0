"""Chooses among rival kernels by what a whole step takes with each of them.

A kernel timed behind itself does not show what it does to its neighbours: registers that it holds while it waits, memory
traffic that it takes from the kernel before, power. Here a step runs as it is served (replayed from its graph, on weights
of the model's size), once with the best choices known and once with one of them changed, by turns; what gains stays.
"""

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from compilerllm.checkpoint import locate
from compilerllm.compiler import CompileRequest, ensure_artifact
from compilerllm.cuda_artifact import FEW_ROWS
from compilerllm.cuda_program import DEFAULT_OPTIONS
from compilerllm.environment import cache_dir
from compilerllm.errors import CompilerLLMError
from compilerllm.explain.steps import bucket_names
from compilerllm.ir.step import Bucket
from compilerllm.kernels.launch.gpu.graphs import captured_buckets
from compilerllm.kernels.launch.gpu.memory import BLOCK_SIZE
from compilerllm.kernels.launch.gpu.program import Launch, Program
from compilerllm.kernels.launch.weights import SourceSpec
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.tuning import TunedChooser, TuningData
from compilerllm.picks import CONTEXT, HOST_SECONDS, Bench
from compilerllm.serving_artifact import manifest_of

SWEEPS = 2  # over all choices: one may gain only once another has changed
WORTH_AGAIN = 1.01  # of the best step's time: a candidate slower than that is not tried in a later sweep
GAIN = 0.998  # of the best step's time, at most: less is no more than chance
ROUNDS = 4  # in which the two steps take turns
SECONDS = 0.03  # of device time, about, that a step is repeated in one round
MOST_REPEATS = 200
LEAST_TOKENS = 512  # of the largest step with prompts that an artifact is built for, wanted or not
Chosen = dict[int, int]  # candidates by choice
OnTry = Callable[[int, int, str], None]  # tried, in all, what


class NothingToTime(CompilerLLMError):
    """No candidates to choose among."""


@dataclass
class StepResult:
    """What one plan's step took: ``before`` with the program's own candidates, ``after`` with the ``chosen`` ones, and by
    choice and candidate with that one alone changed. Seconds."""

    before: float
    after: float
    chosen: Chosen
    seconds: dict[int, dict[int, float]] = field(default_factory=dict)

    def ranked(self) -> Iterator[tuple[int, int, float]]:
        """(choice, candidate, seconds) of all that were tried; a chosen one is never behind another."""
        for choice, times in self.seconds.items():
            for candidate, seconds in times.items():
                best = candidate == self.chosen[choice]
                yield choice, candidate, self.after if best else max(seconds, self.after * 1.0001)


class StepTuner:
    """Tries the candidates of one plan."""

    def __init__(self, bench: Bench, index: int, on_try: OnTry = lambda done, total, what: None) -> None:
        """``index``: of the plan in the bench's program. Its choices are ones that no earlier plan has settled."""
        self._bench, self._index, self._on_try = bench, index, on_try
        self._plan = bench.program.plans[index]
        self._name = bucket_names([p.bucket for p in bench.program.plans])[index]
        self._graphed = bool(captured_buckets([self._plan.bucket], DEFAULT_OPTIONS.max_graph_tokens))
        self._tries = self._most = 0  # steps timed, and about how many there will be

    def tune(self, settled: Chosen) -> StepResult:
        """The best candidates of the choices that are not in ``settled``. Raises what a launch raises."""
        chosen = {x.pick[0]: settled.get(x.pick[0], 0) for x in self._plan.launches if x.pick}
        order = self._by_weight(set(chosen) - settled.keys())
        self._most = SWEEPS * sum(len(self._bench.program.choices[c].configs) - 1 for c in order)
        self._bench.send(self._index)
        best = self._ready(chosen)
        now = self._seconds(best, self._repeats(best))
        result = StepResult(now, now, dict(chosen), {c: {chosen[c]: now} for c in order})
        for _ in range(SWEEPS):
            before = dict(result.chosen)
            for choice in order:
                best = self._try(choice, result, best)
            if result.chosen == before:
                break
        return result

    def _try(self, choice: int, result: StepResult, best: Callable[[], None]) -> Callable[[], None]:
        """Time the step with each other candidate of a choice that may gain; gives the best step there is then."""
        about, times = self._bench.program.choices[choice], result.seconds[choice]
        for candidate in range(len(about.configs)):
            slow = times.get(candidate, 0.0) > WORTH_AGAIN * result.after
            if slow or candidate == result.chosen[choice]:
                continue
            self._tries += 1
            self._on_try(self._tries, self._most, f"{self._name} {about.family}")
            run = self._ready(result.chosen | {choice: candidate})
            ratio = self._ratio(run, best)
            times[candidate] = ratio * result.after
            if ratio <= GAIN:
                result.after, result.chosen[choice], best = ratio * result.after, candidate, run
        return best

    def _by_weight(self, choices: set[int]) -> list[int]:
        """Choices whose launches take longest first."""
        weight = dict.fromkeys(choices, 0.0)
        for x in self._plan.launches:
            if x.pick and x.pick[0] in choices and x.pick[1] == 0:
                weight[x.pick[0]] += self._bench.expected(x)
        return sorted(weight, key=lambda c: (-weight[c], c))

    def _ready(self, chosen: Chosen) -> Callable[[], None]:
        """A step with these candidates, run once; calling it puts the step into the stream."""

        def runs(x: Launch) -> bool:
            return x.pick is None or chosen[x.pick[0]] == x.pick[1]

        launches = tuple(x for x in self._plan.launches if runs(x))
        bound = self._bench.bind(self._index, replace(self._plan, launches=launches))
        bound.run()
        self._bench.backend.synchronize()
        return self._bench.backend.capture(bound.run) if self._graphed else bound.run

    def _repeats(self, run: Callable[[], None]) -> int:
        run()
        once = self._seconds(run, 1)
        return max(1, min(MOST_REPEATS, round(SECONDS / max(once, 1e-9))))

    def _seconds(self, run: Callable[[], None], repeats: int) -> float:
        """Of one run, the mean of several behind one another."""
        launches = 1 if self._graphed else len(self._plan.launches)
        watch = self._bench.backend.stopwatch(2 * HOST_SECONDS * launches * repeats)
        watch.tick()
        for _ in range(repeats):
            run()
        watch.tick()
        return watch.seconds()[0] / repeats

    def _ratio(self, run: Callable[[], None], best: Callable[[], None]) -> float:
        """What a step takes over what the best one does, the median of rounds in which each goes first by turns: whoever
        follows a rest finds a cooler chip."""
        repeats = self._repeats(best)
        ratios = []
        for place in range(ROUNDS):
            first, second = (run, best) if place % 2 else (best, run)
            times = {first: self._seconds(first, repeats), second: self._seconds(second, repeats)}
            ratios.append(times[run] / max(times[best], 1e-12))
        return statistics.median(ratios)


def tune_steps(
    bench: Bench, families: Collection[str] = (), on_try: OnTry = lambda done, total, what: None
) -> list[StepResult]:
    """Of all plans, in their order: a choice that two of them share is settled by the first. families: of kernels that may
    change, all if empty."""
    results: list[StepResult] = []
    settled = {i: 0 for i, c in enumerate(bench.program.choices) if families and c.family not in families}
    for index in range(len(bench.program.plans)):
        result = StepTuner(bench, index, on_try).tune(settled)
        settled |= {c: result.chosen[c] for c in result.seconds}
        results.append(result)
    return results


def figures(known: TuningData, program: Program, results: Sequence[StepResult]) -> TuningData:
    """What is ``known`` of the candidates that were tried, with what steps took with them."""
    data = TuningData(known.chip)
    for result in results:
        for choice, candidate, seconds in result.ranked():
            about = program.choices[choice]
            problems = data.entries.setdefault(about.family, {})
            problems.setdefault(about.problem, list(known.entries[about.family][about.problem]))
            data.add_step(about.family, about.problem, about.configs[candidate], seconds * 1e6)
    return data


@dataclass(frozen=True)
class Wanted:
    """Steps to time: of a model with made-up weights, decode steps of so many ``sequences``, prompts of so many ``tokens``,
    with up to ``rivals`` candidates of each choice in these ``families`` of kernels (all if empty)."""

    model: str
    dtype: str
    sequences: Sequence[int]
    tokens: Sequence[int]
    rivals: int
    families: Collection[str] = ()

    def request(self, target: CudaTarget) -> CompileRequest:
        """The artifact that has the candidates."""
        return CompileRequest(
            self.model, self.dtype, level=3, target=target.name, max_num_seqs=max([1, *self.sequences]),
            max_num_batched_tokens=max([LEAST_TOKENS, *self.tokens]), load_format="dummy", rivals=self.rivals,
        )  # fmt: skip

    def buckets(self, every: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """Those that are wanted; of ones with prompts, with few rows to sample. Raises ``NothingToTime`` for a size that
        no bucket has."""
        decode = {b.sequences: b for b in every if b.max_query == 1}
        mixed = {b.tokens: b for b in every if b.max_query > 1 and b.rows <= FEW_ROWS}
        for what, sizes, there in (("sequences", self.sequences, decode), ("tokens", self.tokens, mixed)):
            if odd := sorted(set(sizes) - set(there)):
                raise NothingToTime(
                    f"No step has {odd[0]} {what}: programs have {', '.join(map(str, sorted(there)))}."
                )
        if not self.sequences and not self.tokens:
            raise NothingToTime("Neither --sequences nor --tokens names a step to time.")
        return (*(decode[n] for n in self.sequences), *(mixed[n] for n in self.tokens))


def time_steps(wanted: Wanted, target: CudaTarget, on_try: OnTry) -> tuple[TuningData, list[str]]:
    """Figures of the candidates, and for people a line about each step. Runs on this machine's GPU.

    Raises ``NothingToTime`` where no choice has figures to begin with, and what building and loading raise.
    """
    from compilerllm.compiled_cuda import CudaModel, CudaOptions

    request = wanted.request(target)
    found = ensure_artifact(request, locate(wanted.model), lambda stage: on_try(0, 1, stage))
    manifest = manifest_of(found.path)
    buckets = wanted.buckets([Bucket(**b) for b in manifest["buckets"]])
    source = SourceSpec.from_json(manifest["source"] | {"path": ""}).open()
    model = CudaModel.load(found.path, source, options=CudaOptions(graphs=False, buckets=buckets))
    blocks = max(b.sequences * CONTEXT if b.max_query == 1 else b.tokens for b in buckets) // BLOCK_SIZE
    model.allocate(blocks + 1, request.max_num_seqs)
    bench = model.bench()
    if not bench.program.choices:
        raise NothingToTime(
            f"No kernel of {wanted.model} has figures of several candidates on {target.chip} at these sizes. Run "
            "`compilerllm tune` without --in-step first."
        )
    results = tune_steps(bench, wanted.families, on_try)
    known = TunedChooser.for_target(target, cache_dir() / "tuning").data
    assert known is not None, "choices are open where there are figures"
    names = bucket_names([plan.bucket for plan in bench.program.plans])
    lines = [_line(name, result, bench.program) for name, result in zip(names, results, strict=True)]
    return figures(known, bench.program, results), lines


def _line(name: str, result: StepResult, program: Program) -> str:
    """What a step took before and after, and each candidate that is not the one that was known as fastest."""
    changed = [
        f"{program.choices[c].family} {program.choices[c].problem}: {program.choices[c].configs[new]}"
        for c, new in sorted(result.chosen.items())
        if new
    ]
    gain = f"{1e3 * result.before:.3f} ms, now {1e3 * result.after:.3f} ({100 * (result.after / result.before - 1):+.1f}%)"
    return "\n    ".join([f"{name:<14} {gain}, {sum(map(len, result.seconds.values()))} tried", *changed])
