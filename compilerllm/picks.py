"""Which candidate runs where a program ships several: kept from an earlier start, measured in about a second, or the first.

Measuring runs steps as they will be, on the loaded weights and launch by launch, once with the first candidate of every
choice, once with the second, and so on, an event before and after each node that is measured: what a candidate finds in
the caches is what it would find in a step. It takes no memory of its own.
"""

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from compilerllm.ir.step import Bucket, StepInputs
from compilerllm.kernel_times import Space, made_up_step
from compilerllm.kernels.launch.gpu.backend import Backend, BoundPlan
from compilerllm.kernels.launch.gpu.program import Launch, Plan, Program

log = logging.getLogger(__name__)

SECONDS = 1.0  # that measuring may take in all, about
HOST_SECONDS = 5e-6  # of the host for a launch, about
LEAST_SECONDS = 2.5e-6  # of a kernel, however little it does
ROUNDS = 2  # of each candidate; the first loads it
CONTEXT = 256  # tokens, of a decode step that is measured
OCCURRENCES = 4  # of a choice in one plan that are timed: layers are alike
GAIN = 0.98  # a candidate must take at most this share of the default's time to replace it
NEEDS_REAL_INPUTS = ("experts",)  # families that address memory by what their inputs hold
_FORMAT = 1


@dataclass(frozen=True)
class Picks:
    """A candidate for each choice of a program, and how many of them came from where. ``seconds``: of measuring."""

    chosen: tuple[int, ...] = ()
    kept: int = 0
    measured: int = 0
    seconds: float = 0.0

    @property
    def open(self) -> int:
        """Choices of which nothing is known: they run their default."""
        return len(self.chosen) - self.kept - self.measured

    def text(self) -> str:
        """For a card; empty where the program leaves no choice."""
        parts = [
            f"{self.measured} measured in {self.seconds:.1f} s" if self.measured else "",
            f"{self.kept} from an earlier start" if self.kept else "",
            f"{self.open} by default" if self.open else "",
        ]
        return ", ".join(p for p in parts if p)


class Picker:
    """A program with choices, on its way to one without."""

    def __init__(self, whole: Program, file: Path | None, seconds: float) -> None:
        """``file``: where picks are kept, None for nowhere; ``seconds``: for measuring, 0 for defaults and nothing else."""
        self.whole, self._file, self._seconds = whole, file, seconds
        self._known = read_picks(file, whole) if file is not None and seconds and whole.choices else {}
        self.picks = Picks(self._chosen(), kept=len(self._known))

    def _chosen(self) -> tuple[int, ...]:
        return tuple(self._known.get(i, 0) for i in range(len(self.whole.choices)))

    @property
    def unknown(self) -> bool:
        """Whether there is anything to measure, and time for it."""
        return self._seconds > 0 and self.picks.open > 0

    @property
    def program(self) -> Program:
        """With what is known now."""
        return self.whole.picked(self.picks.chosen)

    def measure(self, bench: "Bench") -> Program:
        """Pick what is open, keep it for later starts, and give the program. Raises what a launch raises."""
        start, kept = time.perf_counter(), len(self._known)
        times = measure(bench, self._known.keys(), self._seconds)
        self._known |= {choice: best(figures) for choice, figures in times.items()}
        self.picks = Picks(self._chosen(), kept, len(times), time.perf_counter() - start)
        if self._file is not None:
            write_picks(self._file, self.whole, self._known, times)
        log.info("Candidates: %s.", self.picks.text())
        return self.program


@dataclass(frozen=True)
class Bench:
    """A loaded program with all candidates. bind: launches at their addresses, of the plan with an index or of part of it;
    send: a full step for that plan to where its launches read it. Rates of the target, GB/s and TFLOP/s."""

    program: Program
    backend: Backend
    bind: Callable[[int, Plan], BoundPlan]
    send: Callable[[int], None]
    bandwidth: float
    tflops: float

    def expected(self, x: Launch) -> float:
        """Seconds that a launch will take at least, the host's included."""
        work = max(x.cost.nbytes / self.bandwidth / 1e9, x.cost.flops / self.tflops / 1e12, LEAST_SECONDS)
        return work + HOST_SECONDS


def full_step(model: Space, bucket: Bucket) -> StepInputs:
    """A made-up step that fills the bucket: each sequence's token behind some context, or prompts from their beginning."""
    if bucket.max_query == 1:
        return made_up_step(model, bucket.sequences, 1, min(CONTEXT, model.max_model_len))
    sequences = min(bucket.sequences, bucket.rows, -(-bucket.tokens // model.max_model_len))
    query = min(bucket.tokens // sequences, model.max_model_len)
    return made_up_step(model, sequences, query, query)


def picks_file(folder: Path, artifact: str, chip: str) -> Path:
    """Where the picks for an artifact's id and a chip are kept."""
    return folder / f"{artifact}-{re.sub(r'[^A-Za-z0-9]+', '-', chip).strip('-')}.json"


def read_picks(path: Path, program: Program) -> dict[int, int]:
    """Candidates by choice, of an earlier start. What does not belong to the program is left out, and the log says so."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != _FORMAT:
            raise ValueError("another format")
        known = {(e["family"], e["problem"]): e["config"] for e in data["choices"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s holds no picks (%r): candidates are measured again.", path, error)
        return {}
    found = {}
    for index, choice in enumerate(program.choices):
        config = known.get((choice.family, choice.problem))
        if config in choice.configs:
            found[index] = choice.configs.index(config)
        elif config is not None:
            log.warning(
                "%s: %s for %s %s is no candidate of the artifact: it is left out.",
                path, config, choice.family, choice.problem,
            )  # fmt: skip
    return found


def write_picks(
    path: Path, program: Program, picks: dict[int, int], times: dict[int, dict[int, float]]
) -> None:
    """Keep picks for later starts, whole or not at all, together with those in the file of choices that this program does
    not have. Where the folder cannot be written, the log says so."""
    ours = {(c.family, c.problem) for c in program.choices}
    entries: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none there, or not worth keeping
        before = json.loads(path.read_text())["choices"]
        entries = [e for e in before if (e["family"], e["problem"]) not in ours]
    for index, candidate in sorted(picks.items()):
        choice = program.choices[index]
        us = {str(c): round(s * 1e6, 2) for c, s in sorted(times.get(index, {}).items())}
        entries.append(
            {"family": choice.family, "problem": choice.problem, "config": choice.configs[candidate]}
            | ({"us": us} if us else {})
        )
    part = path.with_name(f".{path.name[:12]}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"format": _FORMAT, "choices": entries}, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        log.info(
            "Picks cannot be kept in %s (%s): the next start measures again.", path, error.strerror or error
        )
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def measure(
    bench: Bench, known: Collection[int] = (), seconds: float = SECONDS
) -> dict[int, dict[int, float]]:
    """Seconds of a node by choice and candidate, of choices that are not ``known``, smallest buckets first.

    Ends when the time is used up: then some have no figures, and the log says how many.
    """
    program, start = bench.program, time.perf_counter()
    wanted = set(range(len(program.choices))) - set(known)
    where = sorted(range(len(program.plans)), key=lambda i: program.plans[i].bucket.tokens)
    where = [i for i in where if wanted & {x.pick[0] for x in program.plans[i].launches if x.pick}]
    times: dict[int, dict[int, float]] = {}
    for place, index in enumerate(where):
        left = seconds - (time.perf_counter() - start)
        if left <= 0 and place:
            break
        share = max(left, 0.0) / (len(where) - place)
        times |= _measure_plan(bench, index, wanted - times.keys(), share)
    if missed := len(wanted - times.keys()):
        log.info("%d choices were not measured in %.1f s: they run their default.", missed, seconds)
    return times


def best(times: dict[int, float]) -> int:
    """The fastest candidate; the default, which is 0, unless another gains enough to be more than chance."""
    fastest = min(times, key=lambda c: (times[c], c))
    return fastest if times[fastest] <= GAIN * times[0] else 0


def _measure_plan(bench: Bench, index: int, wanted: set[int], share: float) -> dict[int, dict[int, float]]:
    plan = bench.program.plans[index]
    wanted = wanted & {x.pick[0] for x in plan.launches if x.pick}
    if not wanted:
        return {}
    passes = ROUNDS * max(len(bench.program.choices[c].configs) for c in wanted)
    stretches = _stretches(plan)
    chosen = _within(bench, plan, stretches, wanted, share / passes)
    bound = bench.bind(index, plan)
    bench.send(index)
    times: dict[int, dict[int, float]] = {c: {} for c in wanted}
    for turn in range(passes):
        candidate, last = turn // ROUNDS, turn % ROUNDS == ROUNDS - 1
        spent = _run(bench, bound, chosen, wanted, candidate)
        for choice in wanted if last else ():
            if candidate < len(bench.program.choices[choice].configs):
                times[choice][candidate] = sum(spent[choice]) / len(spent[choice])
    return times


@dataclass(frozen=True)
class _Stretch:
    """Launches of a plan that belong together: ones that always run, or all candidates of one node."""

    choice: int | None
    spans: tuple[tuple[int, int], ...]  # first and last of each candidate; one where there is no choice


def _stretches(plan: Plan) -> list[_Stretch]:
    """A plan's launches in order. A node's candidates come one after another, from the first to the last."""
    found: list[_Stretch] = []
    at = 0
    for pick, run in groupby(plan.launches, lambda x: x.pick):
        span = at, at + len(list(run))
        at = span[1]
        if pick is None:
            found.append(_Stretch(None, (span,)))
        elif pick[1] == 0:
            found.append(_Stretch(pick[0], (span,)))
        else:
            found[-1] = _Stretch(pick[0], (*found[-1].spans, span))
    return found


def _within(
    bench: Bench, plan: Plan, stretches: list[_Stretch], wanted: set[int], share: float
) -> list[_Stretch]:
    """The plan's beginning as far as a pass has time for; behind it the first node of each choice that it lacks.

    Those run on whatever is in memory, which is well for all but a few families: their first node is in the beginning.
    """
    spent, seen = 0.0, dict.fromkeys(wanted, 0)
    real = {c for c in wanted if bench.program.choices[c].family in NEEDS_REAL_INPUTS}
    kept: list[_Stretch] = []
    for place, stretch in enumerate(stretches):
        enough = spent >= share or all(n >= OCCURRENCES for n in seen.values())
        if enough and all(seen[c] for c in real):
            rest = [s for s in stretches[place:] if s.choice in wanted and not seen[s.choice]]
            return kept + list({s.choice: s for s in reversed(rest)}.values())[::-1]
        kept.append(stretch)
        first, last = stretch.spans[0]
        spent += sum(bench.expected(x) for x in plan.launches[first:last])
        if stretch.choice in wanted:
            seen[stretch.choice] += 1
    return kept


def _run(
    bench: Bench, bound: BoundPlan, chosen: list[_Stretch], wanted: set[int], candidate: int
) -> dict[int, list[float]]:
    """Seconds of each timed node, by choice, in one pass with this candidate (or the last one there is)."""
    launches = sum(s.spans[0][1] - s.spans[0][0] for s in chosen)
    watch = bench.backend.stopwatch(2 * HOST_SECONDS * (launches + len(chosen)))
    order: list[int] = []  # of the intervals: the choice that ran in it, -1 between two
    watch.tick()
    for stretch in chosen:
        first, last = stretch.spans[min(candidate, len(stretch.spans) - 1)]
        if stretch.choice in wanted:
            watch.tick()
            order.append(-1)
        bound.run_part(first, last)
        if stretch.choice in wanted:
            watch.tick()
            order.append(stretch.choice)
    found: dict[int, list[float]] = {c: [] for c in wanted}
    for choice, seconds in zip(order, watch.seconds(), strict=True):
        if choice >= 0:
            found[choice].append(seconds)
    return found
