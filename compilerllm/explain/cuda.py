"""The kernels of a CUDA artifact's buckets: its launches, the nodes they come from, and how each was chosen.

The artifact says what is launched; which node and which choice that was is found by emitting each bucket again with the
artifact's own picks. What comes out is held against the artifact, launch by launch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from compilerllm.artifact import ArtifactInvalid
from compilerllm.cuda_artifact import bucket_passes, flat_module, prepare_bucket
from compilerllm.cuda_program import read_program
from compilerllm.explain.predict import Predictor, Work, family_of, predictor_for, work_of
from compilerllm.explain.report import (
    BucketReport,
    Candidate,
    IRNode,
    Kernel,
    Launch,
    Machine,
    Pick,
)
from compilerllm.explain.steps import Chosen, bucket_names
from compilerllm.explain.tables import Table, at_context, make_launch
from compilerllm.explain.trace import Trace, describe_node
from compilerllm.ir.graph import Module, Node
from compilerllm.ir.step import Bucket
from compilerllm.kernels.costs import node_cost
from compilerllm.kernels.cutlass.supply import Supply
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.launch.gpu.program import Kernel as ProgramKernel
from compilerllm.kernels.launch.gpu.program import Plan, Program
from compilerllm.kernels.triton.calls import Call
from compilerllm.kernels.triton.emitter import BucketEmitter
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.tuning import SIZE_FIELD, TunedChooser, TuningData, problem_key

# Templates that prepare what a node's kernel reads, or follow it: a norm before a linear, a gate after it.
HELPERS = ("norm:", "after:", "align:", "generated_", "embed:")
SHOWN = 12  # candidates that were never timed, in the cost model's order
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Asked:
    """A choice as an emitter posed it, and what the artifact has."""

    family: str
    problem: Mapping[str, int | str]
    candidates: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    why: str


class _Replay:
    """Chooses what the artifact chose, and notes for which node it was asked."""

    emitter: BucketEmitter

    def __init__(self, picks: Mapping[tuple[str, str], tuple[dict[str, Any], str]]) -> None:
        self._picks = picks
        self.asked: dict[Node, Asked] = {}  # the first choice of each node

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        config, why = self._picks.get((family, problem_key(problem)), (candidates[0], "cost model"))
        why = "only candidate" if len(candidates) == 1 else why
        self.asked.setdefault(self.emitter.node, Asked(family, dict(problem), tuple(candidates), config, why))
        return config


class CudaBuckets:
    """The launches of a CUDA artifact, bucket by bucket."""

    def __init__(
        self, module: Module, trace: Trace, folder: Path, manifest: dict[str, Any], target: CudaTarget, own: Path
    ) -> None:  # fmt: skip
        """module: after the pipeline. own: the folder of the user's tuning data."""
        self.target, self.trace, self.manifest = target, trace, manifest
        whole = read_program(folder, manifest, whole=True)
        self.open = {(c.family, c.problem): len(c.configs) for c in whole.choices}
        self.program: Program = whole.picked()
        self.sampling: Program = read_program(folder, manifest, "sampling")
        self.flat = flat_module(module, trace.rewrites(module))
        self.predictor: Predictor = predictor_for(target, own)
        self.data: TuningData | None = TunedChooser.for_target(target, own).data
        self._windows = paged_windows(self.flat)
        self._picks = {(p["family"], p["problem"]): (p["config"], p["why"]) for p in manifest["picks"]}
        self._prepared: dict[tuple[str, ...], Module] = {}
        self.nodes: Table[IRNode] = Table()
        self.kernels: Table[Kernel] = Table()
        self.picks: Table[Pick] = Table()

    # -- graphs ----------------------------------------------------------------------------------------------------

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Run each distinct list of a bucket's own passes once, and note which buckets it is for."""
        names = bucket_names(buckets)
        for bucket in buckets:
            key = _passes(bucket)
            if key not in self._prepared:
                same = [n for n, b in zip(names, buckets, strict=True) if _passes(b) == key]
                self._prepared[key] = prepare_bucket(self.flat, bucket, self.trace.rewrites(self.flat, same))

    # -- buckets ---------------------------------------------------------------------------------------------------

    def report(self, chosen: Sequence[Chosen], machine: Machine, on_progress: Progress) -> list[BucketReport]:
        """Each bucket with its step. Raises ``ArtifactInvalid`` where the artifact's launches are not this version's."""
        made = []
        for done, one in enumerate(chosen):
            on_progress(done, len(chosen))
            made.append(self._bucket(one, machine))
        on_progress(len(chosen), len(chosen))
        return made

    def _bucket(self, chosen: Chosen, machine: Machine) -> BucketReport:
        module, b, step = self._prepared[_passes(chosen.bucket)], chosen.bucket, chosen.step
        plan = self.program.plans[chosen.index]
        calls, asked = self._emit(module, chosen.bucket, plan, chosen.name)
        launches: list[Launch] = []
        pairs = zip(calls, plan.launches, strict=True)
        for number, same in groupby(pairs, key=lambda pair: pair[0].node):
            node = module.main.nodes[number]
            cost = at_context(node_cost(node, step.dims, module), step.sequences, step.query, step.context)
            kernels = [self.program.kernels[launch.kernel] for _, launch in same]
            launches += self._launches(node, module, kernels, asked.get(node), cost, machine)
        sampling = f"sampling-greedy-{b.rows}" if chosen.kind == "decode" else ""
        return BucketReport(
            chosen.name, chosen.kind, step.tokens, step.sequences, step.sequences, step.context,
            (b.tokens, b.sequences, b.rows, b.max_query), plan.arena_bytes, tuple(launches), sampling,
        )  # fmt: skip

    def _launches(
        self, node: Node, module: Module, kernels: Sequence[ProgramKernel], asked: Asked | None, cost: tuple[float, float],
        machine: Machine,
    ) -> list[Launch]:  # fmt: skip
        """The launches of one node. Its work and time stand at those that do it, in equal parts; what prepares or follows
        takes the floor."""
        family = _family(node, asked)
        total = self._predict(asked, family, Work(*cost, _depth(asked)))
        mains = [not k.template.startswith(HELPERS) for k in kernels]
        mains = mains if any(mains) else [True] * len(kernels)
        parts, floor = sum(mains), machine.launch_us
        each = max((total - (len(kernels) - parts) * floor) / parts, floor / 2)
        return [
            make_launch(
                machine, self._kernel(kernel, family), self._node(node, module), self._pick(asked),
                cost[0] / parts * main, cost[1] / parts * main, each if main else floor,
            )
            for kernel, main in zip(kernels, mains, strict=True)
        ]  # fmt: skip

    def _emit(
        self, module: Module, bucket: Bucket, plan: Plan, name: str
    ) -> tuple[list[Call], dict[Node, Asked]]:
        replay = _Replay(self._picks)
        emitter = BucketEmitter(
            module, bucket, self.target, self._windows, self.manifest["level"], replay, Supply(builds=True)
        )
        replay.emitter = emitter
        calls = emitter.emit().calls
        ours = [c.label for c in calls]
        theirs = [x.node for x in plan.launches]
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            raise ArtifactInvalid(
                f"bucket {name} of the artifact was emitted by another version than this one: launch {at} differs. "
                "Build the artifact again, or explain it with the version that built it."
            )
        return calls, replay.asked

    def _node(self, node: Node, module: Module) -> int:
        return self.nodes.place(node, describe_node(node, module.main, module))

    def _kernel(self, kernel: ProgramKernel, family: str) -> int:
        return self.kernels.place((kernel, family), describe_kernel(kernel, family))

    # -- choices ---------------------------------------------------------------------------------------------------

    def _timed(self, asked: Asked) -> tuple[list[dict[str, Any]], str]:
        """Timed candidates of a problem, or of the size nearest to it, and the text of the problem that was timed."""
        if self.data is None:
            return [], ""
        timed, _ = self.data.find(asked.family, asked.problem)
        keys = [k for k, v in self.data.entries.get(asked.family, {}).items() if v is timed]
        return timed, keys[0] if keys else ""

    def _pick(self, asked: Asked | None) -> int:
        if asked is None:
            return -1
        problem = problem_key(asked.problem)
        key = (asked.family, problem)
        known = self.picks.find(key)
        return known if known is not None else self.picks.place(key, self._describe_pick(asked, problem))

    def _describe_pick(self, asked: Asked, problem: str) -> Pick:
        timed, where = self._timed(asked)
        us = next((float(t["us"]) for t in timed if t["config"] == asked.config), None)
        behind = sorted((t for t in timed if t["config"] != asked.config), key=lambda t: float(t["us"]))
        others = [Candidate(t["config"], float(t["us"])) for t in behind]
        known = [asked.config, *(t["config"] for t in timed)]
        untimed = [Candidate(c) for c in asked.candidates if c not in known][:SHOWN]
        why = "left open" if (asked.family, problem) in self.open else asked.why
        return Pick(
            asked.family, problem, asked.config, why, us,
            where if where != problem and us is not None else "", (*others, *untimed),
        )  # fmt: skip

    def _predict(self, asked: Asked | None, family: str, work: Work) -> float:
        """The model's time; where the choice was timed, that figure, moved by the model to the work there is now."""
        model = self.predictor.time(family, work)
        if asked is None:
            return model
        timed, where = self._timed(asked)
        us = next((float(t["us"]) for t in timed if t["config"] == asked.config), None)
        if us is None:
            return model
        fields = dict(part.split("=", 1) for part in where.split(","))
        then = work_of(asked.family, fields)
        if then is None:
            return us
        rows = float(fields.get(SIZE_FIELD, 0))
        return us * model / self.predictor.time(family_of(asked.family, rows), then)

    # -- sampling --------------------------------------------------------------------------------------------------

    def sampling_names(self) -> list[str]:
        """sampling-greedy-8 and so on: a variant and the most rows."""
        return [f"sampling-{p.variant}-{p.bucket.rows}" for p in self.sampling.plans]

    def report_sampling(self, wanted: Sequence[str], machine: Machine) -> list[BucketReport]:
        """The sampling program's plans, those called ``wanted`` or all. Their launches come from no IR."""
        made = []
        for name, plan in zip(self.sampling_names(), self.sampling.plans, strict=True):
            if wanted and name not in wanted and "sampling" not in wanted:
                continue
            b = plan.bucket
            bounds = (b.tokens, b.sequences, b.rows, b.max_query)
            launches = tuple(self._sampling_launch(plan, i, machine) for i in range(len(plan.launches)))
            made.append(
                BucketReport(name, "sampling", b.rows, b.rows, b.rows, 0, bounds, plan.arena_bytes, launches)
            )
        return made

    def _sampling_launch(self, plan: Plan, index: int, machine: Machine) -> Launch:
        launch = plan.launches[index]
        text = launch.node or "sampling"
        node = self.nodes.place(("sampling", text), IRNode(text, "sampling", "", "sampling"))
        # Only the first launch reads the logits: the others look at what it left.
        nbytes = 4.0 * self.manifest["vocab_size"] * plan.bucket.rows if index == 0 else 0.0
        kernel = self._kernel(self.sampling.kernels[launch.kernel], "sampling")
        predicted = self.predictor.time("sampling", Work(nbytes, 0.0))
        return make_launch(machine, kernel, node, -1, nbytes, 0.0, predicted)


def _passes(bucket: Bucket) -> tuple[str, ...]:
    return tuple(run.__name__ for run in bucket_passes(bucket))


def _family(node: Node, asked: Asked | None) -> str:
    if asked is None:
        return node.op if node.op == "sampling" else "rows"
    return family_of(asked.family, float(asked.problem.get(SIZE_FIELD, 0)))


def _depth(asked: Asked | None) -> float:
    return float(asked.problem.get("K", 0)) if asked is not None else 0.0


def describe_kernel(kernel: ProgramKernel, family: str) -> Kernel:
    """A kernel of a program, for people."""
    kind = "triton"
    if kernel.template.startswith("library:"):
        kind = "cutlass" if "cutlass" in kernel.template else "library"
    config = {name: value for name, value in kernel.constexprs if name != "library"}
    made = Kernel(kernel.template, kind, family, config, kernel.num_warps, kernel.shared, kernel.pdl)
    return replace(made, key=kernel.key)
