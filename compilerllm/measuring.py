"""Times candidate kernels on this machine's GPU: for ``compilerllm tune``, and for builds at O3 that miss figures."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from compilerllm.cuda_artifact import flat_module, prepare_bucket
from compilerllm.environment import cache_dir
from compilerllm.ir.step import Bucket
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.tuning import TunedChooser, TuningData
from compilerllm.targets import NoDevice, target_name

if TYPE_CHECKING:
    from compilerllm.ir.graph import Module
    from compilerllm.kernels.cutlass.supply import Supply
    from compilerllm.kernels.triton.tasks import Task

LEVEL = 3  # from here on a build measures what no tuning data has
MOST_CANDIDATES = 8  # of a problem, in a build; ``tune`` may time more
OnMeasure = Callable[[int, int, str], None]  # done, in all, what


def tuning_file(chip: str) -> Path:
    """This user's tuning data of a chip."""
    return cache_dir() / "tuning" / f"{chip.lower()}.json"


def merge_into(path: Path, data: TuningData) -> None:
    """Add to the file what was measured."""
    merged = TuningData.read(path) if path.exists() else TuningData(data.chip)
    merged.merge(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    merged.write(path)


def find_problems(
    module: "Module", target: CudaTarget, buckets: Sequence[Bucket], supply: "Supply"
) -> "list[Task]":
    """Every problem that the model poses in these buckets."""
    from compilerllm.kernels.triton.tasks import find_tasks

    return find_tasks(flat_module(module), buckets, target, LEVEL, prepare_bucket, supply)


def time_problems(
    tasks: "Sequence[Task]",
    target: CudaTarget,
    supply: "Supply",
    most: int,
    seconds: float,
    on_measure: OnMeasure,
) -> TuningData:
    """Time the first ``most`` candidates of each problem, ``seconds`` each."""
    from compilerllm.kernels.triton.tune import tune

    chosen = [replace(t, candidates=t.candidates[:most]) for t in tasks]
    return tune(chosen, target, LEVEL, cache_dir() / "kernels", target.chip, on_measure, seconds, supply)


def measure_missing(
    module: "Module",
    target: CudaTarget,
    buckets: Sequence[Bucket],
    supply: "Supply",
    stage: Callable[[str], None],
) -> bool:
    """Time, and keep, problems that tuning data has nothing near to; whether there were any.

    Does nothing on a machine without the target's GPU: a build for elsewhere takes what data there is.
    """
    try:
        if target_name("cuda") != target.name:
            return False
    except NoDevice:
        return False
    data = TunedChooser.for_target(target, cache_dir() / "tuning").data
    tasks = [
        t
        for t in find_problems(module, target, buckets, supply)
        if data is None or not data.find(t.family, t.problem)[0]
    ]
    if not tasks:
        return False
    measured = time_problems(
        tasks,
        target,
        supply,
        MOST_CANDIDATES,
        0.01,
        lambda done, total, what: stage(f"measure {done}/{total}"),
    )
    merge_into(tuning_file(target.chip), measured)
    return True
