"""The mutation suite: python -m compilerllm.validation.mutate. How many wrong edits of passes and kernels does validation catch?

Every pass, and every template of a kernel that this machine can run, is edited by operators (``mutants``), each edit is
tried in a process of its own (``trying``), and validation alone must find it. The last line is ``caught N of M``.
Not counted, and listed apart: edits that do not compile or import, and edits that change no generated code: the same
graph for every module of the corpus, the same machine code for every case.
"""

import argparse
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from compilerllm.validation.cpp_mutants import cpp_mutants
from compilerllm.validation.mutants import ROOT, Mutant, pass_edits, python_mutants, sample, triton_edits
from compilerllm.validation.trying import (
    CAUGHT,
    CSRC,
    INVALID,
    PASSES,
    SAME,
    SURVIVED,
    TEMPLATES,
    Verdict,
)

LIMIT_S = 120  # of processor time for one mutant: kernels that never end are caught
WAIT_S = 1800.0  # and of time at all, for those that wait for each other
# Files beside the passes and templates that hold no rewrite and no arithmetic of a kernel.
NO_PASS = frozenset(("__init__", "errors", "report", "pipeline", "plan_memory", "servable"))
NO_TEMPLATE = frozenset(("__init__", "program", "runtime", "team", "stamp", "ahead"))
PER_FILE = {PASSES: 4, TEMPLATES: 3, CSRC: 2}


def files() -> list[str]:
    """Every file that is edited, from the checkout's root."""
    found = [f"{PASSES}/{p.name}" for p in sorted((ROOT / PASSES).glob("*.py")) if p.stem not in NO_PASS]
    found += [
        f"{TEMPLATES}/{p.name}" for p in sorted((ROOT / TEMPLATES).glob("*.py")) if p.stem not in NO_TEMPLATE
    ]
    csrc = sorted(p for p in (ROOT / CSRC).iterdir() if p.suffix in (".h", ".cpp"))
    return found + [f"{CSRC}/{p.name}" for p in csrc if p.stem not in NO_TEMPLATE]


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def mutants_of(path: str) -> list[Mutant]:
    """All of a file."""
    match folder_of(path):
        case "passes":
            return python_mutants(path, pass_edits)
        case "kernels/cpu/csrc":
            return cpp_mutants(path)
    return python_mutants(path, triton_edits, triton=True)


class Trials:
    """Tries mutants in forked children. What they need of the sources as they are is made here, once."""

    def __init__(self, paths: Sequence[str]) -> None:
        import torch

        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        folders = {folder_of(p) for p in paths}
        self.corpus: Any = None
        self.units: list[Any] = []
        self.failing: dict[str, str] = {}
        if PASSES in folders:
            from compilerllm.validation.trying import pass_corpus

            self.corpus = pass_corpus()
        if folders - {PASSES}:
            import compilerllm.kernels.triton.emit_sampling
            import compilerllm.validation.units  # noqa: F401 - imported before forks, templates not
            from compilerllm.validation.kernel_cases import cases
            from compilerllm.validation.kernels import prepare_case

            for case in cases():
                prepare_case(case)
            self.titles = in_child(_functions_of_units)
            targets = {"cpu" if f == CSRC else "cuda" for f in folders - {PASSES}}
            self.failing = in_child(lambda: _failing_units(targets))

    def ordered(self, mutant: Mutant) -> list[Any]:
        """Units whose kernels call the edited function, those that call little else first."""
        from compilerllm.validation.kernel_cases import CPU, CUDA, cases
        from compilerllm.validation.sampling import SAMPLING
        from compilerllm.validation.units import Unit

        target = CPU if folder_of(mutant.path) == CSRC else CUDA
        name = mutant.where if target == CPU else f"{Path(mutant.path).stem}.{mutant.where}"
        found = []
        every: list[Any] = [*cases(), *SAMPLING]
        for case in every:
            entry = self.titles.get(f"{target} {case.title}")
            if entry and name in entry and f"{target} {case.title}" not in self.failing:
                found.append(Unit(case, target, frozenset(entry)))
        return sorted(found, key=lambda u: len(u.functions))

    def attempt(self, mutant: Mutant) -> tuple[str, str]:
        """Within a child."""
        from compilerllm.validation import trying

        with tempfile.TemporaryDirectory(prefix="compilerllm-mutant-") as name:
            folder = Path(name)
            if folder_of(mutant.path) == PASSES:
                return trying.try_pass(mutant, self.corpus, folder)
            units = self.ordered(mutant)
            if not units and folder_of(mutant.path) != CSRC:
                return SURVIVED, f"no case has a kernel that {mutant.where} is part of"
            run = trying.try_cpp if folder_of(mutant.path) == CSRC else trying.try_triton
            return run(mutant, units, folder)


def _functions_of_units() -> dict[str, list[str]]:
    from compilerllm.validation.units import all_units

    return {u.title: sorted(u.functions) for u in all_units()}


def _failing_units(targets: set[str]) -> dict[str, str]:
    """Units of some targets that find something in the sources as they are: whatever they found of an edit would say nothing of it."""
    from compilerllm.validation.units import all_units

    found = {}
    with tempfile.TemporaryDirectory(prefix="compilerllm-mutant-") as name:
        for unit in all_units():
            if unit.target in targets and (findings := unit.run(Path(name))):
                found[unit.title] = str(findings[0])
    return found


# -- processes --------------------------------------------------------------------------------------------------------


class Child:
    """A fork that runs ``work`` and writes its result as JSON."""

    def __init__(self, work: Any, limit: int = 0) -> None:
        """limit: of processor time, in seconds; 0 for none."""
        read, write = os.pipe()
        self.started = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            if limit:
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            try:
                result = {"value": work()}
            except BaseException as error:  # noqa: BLE001 - told to the parent
                result = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(write, "w") as out:
                out.write(json.dumps(result))
            os._exit(0)
        os.close(write)
        self.pipe, self._data = read, b""

    def read(self) -> bool:
        """Take what there is; whether the child has ended."""
        part = os.read(self.pipe, 1 << 16)
        self._data += part
        return not part

    def result(self) -> Any:
        """What ``work`` gave. Raises ``RuntimeError`` with what it raised, or with the signal that ended it."""
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        if not self._data:
            raise RuntimeError(f"the process ended with status {status}")
        found = json.loads(self._data)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["value"]

    @property
    def late(self) -> bool:
        return time.monotonic() - self.started > WAIT_S


def in_child(work: Any) -> Any:
    """``work()`` in a fork."""
    child = Child(work)
    while not child.read():
        pass
    return child.result()


def try_all(trials: Trials, mutants: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
    """Verdicts as they come."""
    waiting, running = list(mutants), dict[int, tuple[Mutant, Child]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            child = Child(lambda m=mutant: trials.attempt(m), LIMIT_S)
            running[child.pipe] = mutant, child
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for pipe, (mutant, child) in list(running.items()):
            if pipe in ready and child.read():
                del running[pipe]
                yield _verdict(mutant, child)
            elif child.late:
                os.kill(child.pid, signal.SIGKILL)
                del running[pipe]
                os.close(pipe)
                os.waitpid(child.pid, 0)
                yield Verdict(mutant, CAUGHT, f"did not end within {WAIT_S:.0f} s", WAIT_S)


def _verdict(mutant: Mutant, child: Child) -> Verdict:
    seconds = time.monotonic() - child.started
    try:
        status, how = child.result()
    except RuntimeError as error:
        ended = "status" in str(error)
        return Verdict(mutant, CAUGHT if ended else SURVIVED, str(error), seconds)
    return Verdict(mutant, status, how, seconds)


# -- the command ------------------------------------------------------------------------------------------------------


def chosen(paths: Sequence[str], per_file: int | None, seed: int) -> list[Mutant]:
    """The sample: ``per_file`` of each file, or the folder's own number."""
    return [
        m
        for p in paths
        for m in sample(mutants_of(p), PER_FILE[folder_of(p)] if per_file is None else per_file, seed)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where at least 95% of what counts is caught."""
    parser = argparse.ArgumentParser(prog="python -m compilerllm.validation.mutate", description=__doc__)
    parser.add_argument("--per-file", type=int, help="mutants of each file (the default differs by folder)")
    parser.add_argument("--files", default="", help="only files whose path contains this; several by commas")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--output", type=Path, help="also write the report here, as Markdown")
    parser.add_argument(
        "--log", type=Path, help="append every verdict to this file as it comes, a line of JSON each"
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and try none")
    given = parser.parse_args(arguments)
    paths = [p for p in files() if not given.files or any(part in p for part in given.files.split(","))]
    mutants = chosen(paths, given.per_file, given.seed)
    if given.list:
        print("\n".join(map(str, mutants)))
        return 0
    from compilerllm.validation.mutation_report import Progress, report, totals

    started = time.monotonic()
    trials = Trials(paths)
    for title, what in trials.failing.items():
        print(f"left out, as it fails without any edit: {title}: {what}", file=sys.stderr)
    verdicts = []
    with Progress(len(mutants)) as bar:
        for verdict in try_all(trials, mutants, max(1, given.jobs)):
            verdicts.append(verdict)
            bar.tell(verdict)
            if given.log is not None:
                with given.log.open("a") as log:
                    log.write(json.dumps(verdict.to_json()) + "\n")
    order = {m: i for i, m in enumerate(mutants)}
    verdicts.sort(key=lambda v: order[v.mutant])
    text = report(verdicts, given.seed, time.monotonic() - started)
    print(text)
    if given.output is not None:
        given.output.write_text(text)
    caught, counted = totals(verdicts)
    print(f"caught {caught} of {counted}")
    return 0 if caught >= 0.95 * counted else 1


__all__ = ["CAUGHT", "INVALID", "SAME", "SURVIVED", "Counter", "Trials", "chosen", "files", "main", "try_all"]

if __name__ == "__main__":
    sys.exit(main())
