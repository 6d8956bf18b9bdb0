"""Measured times for a report: the artifact is loaded, each bucket's step is run and timed kernel by kernel."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compilerllm.artifact import ArtifactInvalid, read_manifest
from compilerllm.compiled import BLOCK_SIZE, CompiledModel
from compilerllm.errors import CompilerLLMError
from compilerllm.explain.collect import Collected
from compilerllm.explain.cpu_times import StageTimes, TimedModel, write_contexts
from compilerllm.explain.predict import Error, summarise_errors
from compilerllm.explain.report import BucketReport, Report, StepTime
from compilerllm.explain.steps import Chosen, find_bucket
from compilerllm.ir.step import Bucket
from compilerllm.kernel_times import Space, made_up_step
from compilerllm.targets import is_cuda

Progress = Callable[[int, int, str], None]


class CannotMeasure(CompilerLLMError):
    """Times were asked for where nothing can be timed."""


def measure(
    collected: Collected, folder: Path, place: Path, wanted: Sequence[str] = (),
    on_progress: Progress = lambda done, total, what: None,
) -> Report:  # fmt: skip
    """The report with times of the buckets called ``wanted`` (all without any), on this machine.

    place: the checkpoint with the weights. Raises ``CannotMeasure``, ``TimesDoNotMatch``, and what loading raises.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ArtifactInvalid(f"{folder} holds no finished artifact any more.")
    if manifest["program"] is None:
        raise CannotMeasure(
            "level 0 runs no kernels of ours: there is nothing to time. Take level 1 or above."
        )
    chosen = [c for c in collected.chosen if not wanted or c.name in wanted]
    if not chosen:
        return collected.report
    on_progress(0, len(chosen), "loading the weights")
    time = _gpu_timer(folder, manifest, place, chosen) if is_cuda(manifest["target"]) else (
        _cpu_timer(folder, place, chosen)
    )  # fmt: skip
    report, notes = collected.report, []
    timed: dict[str, BucketReport] = {}
    buckets = [Bucket(**b) for b in manifest["buckets"]]
    for done, one in enumerate(chosen):
        on_progress(done, len(chosen), one.name)
        if (holds := find_bucket(buckets, one.step)).index != one.index:
            notes.append(f"{one.name} is not measured: the step that is looked at runs in {holds.name}")
            continue
        timed[one.name] = time(one, report.bucket(one.name))
    on_progress(len(chosen), len(chosen), "")
    made = tuple(timed.get(b.name, b) for b in report.buckets)
    return replace(report, buckets=made, notes=(*report.notes, *notes))


Timer = Callable[[Chosen, BucketReport], BucketReport]


def blocks_for(chosen: Sequence[Chosen]) -> int:
    """KV blocks that the largest of these steps needs."""
    return max(c.step.sequences * -(-c.step.context // BLOCK_SIZE) for c in chosen)


def _cpu_timer(folder: Path, place: Path, chosen: Sequence[Chosen]) -> Timer:
    from compilerllm.loading import load_compiled

    model = load_compiled(folder, place)
    assert isinstance(model, CompiledModel)
    model.allocate(blocks_for(chosen), max(c.step.sequences for c in chosen))
    timed = TimedModel(model, folder)

    def time(one: Chosen, bucket: BucketReport) -> BucketReport:
        step = made_up_step(model, one.step.sequences, one.step.query, one.step.context)
        write_contexts(model, step)
        return with_stages(bucket, timed.time(step))

    return time


def with_stages(bucket: BucketReport, times: StageTimes) -> BucketReport:
    """A CPU's bucket with its times."""
    kernels = float(times.micros.sum())
    rest = times.wall - kernels - times.waking
    return _timed(
        bucket, times.micros, times.starts,
        StepTime(round(times.wall, 3), round(kernels, 3), round(rest, 3), times.repeats, {"waking threads": round(times.waking, 3)}),
    )  # fmt: skip


def _timed(bucket: BucketReport, micros: Any, starts: Any, step: StepTime) -> BucketReport:
    """Raises ``CannotMeasure`` where there is not one time of each launch."""
    if len(micros) != len(bucket.launches):
        raise CannotMeasure(f"{len(micros)} times for {len(bucket.launches)} kernels of {bucket.name}")
    first = float(starts[0]) if len(starts) else 0.0
    launches = tuple(
        replace(x, measured_us=round(float(us), 4), start_us=round(float(at) - first, 4))
        for x, us, at in zip(bucket.launches, micros, starts, strict=True)
    )
    return replace(bucket, launches=launches, measured=step)


def _gpu_timer(folder: Path, manifest: dict[str, Any], place: Path, chosen: Sequence[Chosen]) -> Timer:
    from compilerllm.explain.gpu_times import time_step
    from compilerllm.kernels.launch.gpu.probe import find_gpu
    from compilerllm.loading import load_compiled

    if find_gpu() is None:
        raise CannotMeasure(
            f"--measure runs the kernels, which are built for {manifest['target']}, and the CUDA driver finds no GPU here. "
            "Leave it out, or run it on such a GPU."
        )
    model: Any = load_compiled(folder, place)
    model.allocate(blocks_for(chosen), max(c.step.sequences for c in chosen))

    def time(one: Chosen, bucket: BucketReport) -> BucketReport:
        space: Space = model
        step = made_up_step(space, one.step.sequences, one.step.query, one.step.context)
        times = time_step(model, step)
        kernels = float(times.micros.sum())
        parts = {"copies": round(times.copies, 3)}
        rest = times.step - kernels - times.copies
        return _timed(
            bucket, times.micros, times.starts,
            StepTime(round(times.step, 3), round(kernels, 3), round(rest, 3), times.repeats, parts),
        )  # fmt: skip

    return time


def prediction_errors(report: Report) -> list[Error]:
    """Of every launch that has work and was measured, by family."""
    return summarise_errors(
        (report.kernels[x.kernel].family, x.predicted_us, x.measured_us)
        for bucket in report.buckets
        for x in bucket.launches
        if x.measured_us is not None and x.nbytes
    )
