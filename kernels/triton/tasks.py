"""What could be timed: every problem that a model's buckets pose, each as a program of one node for each candidate."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compilerllm.ir.graph import Graph, Module, Node, Param, Value
from compilerllm.ir.step import Bucket
from compilerllm.ir.types import StateType, StepType
from compilerllm.kernels.cutlass.supply import NONE as NO_CUTLASS
from compilerllm.kernels.cutlass.supply import Supply
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.triton.emit import ProgramDraft
from compilerllm.kernels.triton.emitter import BucketEmitter
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.tuning import problem_key


@dataclass(frozen=True, eq=False)
class Task:
    """One problem of one family: the node alone as a module, the bucket, and its candidates."""

    family: str
    problem: Mapping[str, int | str]
    candidates: tuple[dict[str, Any], ...]
    module: Module
    bucket: Bucket
    node: str

    def draft(
        self, candidate: Mapping[str, Any], target: CudaTarget, level: int, cutlass: Supply = NO_CUTLASS
    ) -> ProgramDraft:
        """The node emitted with ``candidate``."""
        emitter = BucketEmitter(
            self.module, self.bucket, target, paged_windows(self.module), level, _Forced(candidate), cutlass
        )
        return ProgramDraft(target, (emitter.emit(),))


class _Forced:
    def __init__(self, candidate: Mapping[str, Any]) -> None:
        self.candidate = dict(candidate)

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        return self.candidate if self.candidate in candidates else candidates[0]


class _Recorder:
    """Takes first candidates and notes where each was asked for."""

    emitter: BucketEmitter

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, int | str], list[dict[str, Any]], Node]] = []

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        self.found.append((family, dict(problem), list(candidates), self.emitter.node))
        return candidates[0]


def find_tasks(
    module: Module,
    buckets: Iterable[Bucket],
    target: CudaTarget,
    level: int,
    prepare: Callable[[Module, Bucket], Module] = lambda module, bucket: module,
    cutlass: Supply = NO_CUTLASS,
) -> list[Task]:
    """Every problem with more than one candidate, once, in the order it is met."""
    tasks: dict[tuple[str, str], Task] = {}
    for bucket in buckets:
        ready = prepare(module, bucket)
        recorder = _Recorder()
        emitter = BucketEmitter(ready, bucket, target, paged_windows(module), level, recorder, cutlass)
        recorder.emitter = emitter
        emitter.emit()
        for family, problem, candidates, node in recorder.found:
            key = family, problem_key(problem)
            if key not in tasks and len(candidates) > 1:
                tasks[key] = Task(
                    family, problem, tuple(candidates), alone(ready, node), bucket,
                    f"{node!r} [{node.origin.path}]",
                )  # fmt: skip
    return list(tasks.values())


def alone(module: Module, node: Node) -> Module:
    """A module whose main is the node: its activations become inputs, its weights and states stay what they are."""
    graph = module.main
    weights = {p.value: p for p in graph.params}
    inputs: list[Value] = []
    params: list[Param] = []
    states: list[Value] = []
    for value in dict.fromkeys(node.operands):
        if value in weights:
            params.append(weights[value])
        elif isinstance(value.type, StateType):
            states.append(value)
        else:
            inputs.append(value)
    inputs.sort(key=lambda v: not isinstance(v.type, StepType))
    main = Graph("main", graph.dims, tuple(inputs), tuple(params), tuple(states), (node,), node.outputs)
    groups = {n: g for n, g in module.functions.items() if n != "main"}
    return Module({"main": main, **groups})
