"""The kernels of a CPU artifact's buckets: one program for all of them, whose stages differ in size only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compilerllm.explain.cpu_times import Stage, stages_of
from compilerllm.explain.predict import Speed, Work
from compilerllm.explain.report import BucketReport, IRNode, Kernel, Launch, Machine
from compilerllm.explain.steps import Chosen
from compilerllm.explain.tables import Table, at_context, make_launch
from compilerllm.explain.trace import Trace, describe_node
from compilerllm.ir.graph import Module
from compilerllm.kernels.costs import node_cost
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.select import select_layouts
from compilerllm.kernels.cpu.target import find_target
from compilerllm.passes.report import PassReport

FEW_ROWS = 4  # up to so many rows a linear is bound by reading and widening its weights
_ATTENTION = ("paged_attention", "dense_attention")
# What stages reach of the threads' read bandwidth and matrix peak, and what a stage costs that does next to nothing: a
# barrier and a call. From minima of a hundred runs of SmolLM2, one thread, AVX-512; benchmarks/results has the AMX ones.
SPEEDS = {
    "linear, few rows": Speed(0.5, 0.85, 0.33, 0.0),
    "linear, few rows, Q4": Speed(0.5, 0.6, 0.33, 0.0),
    "linear, few rows, Q8": Speed(0.5, 0.6, 0.16, 0.0),
    "linear": Speed(0.5, 0.85, 0.85, 0.0),
    "attention": Speed(0.5, 0.3, 0.6, 0.0),
    "rows": Speed(0.4, 0.5, 0.06, 0.0),
    "host": Speed(20.0, 0.3, 0.05, 0.0),
}


class CpuBuckets:
    """The stages of one step, looked at with steps of any size."""

    def __init__(self, module: Module, trace: Trace, manifest: dict[str, Any]) -> None:
        """module: after the pipeline; the layouts of the target's kernels are chosen here."""
        target = find_target(manifest["target"])
        on_rewrite = trace.rewrites(module)
        self.module = select_layouts(module, target)
        on_rewrite(self.module, PassReport("select_layouts"))
        self.manifest = manifest
        self.stages = stages_of(self.module, emit_program(self.module, target))
        self.nodes: Table[IRNode] = Table()
        self.kernels: Table[Kernel] = Table()

    def report(self, chosen: Sequence[Chosen], machine: Machine) -> list[BucketReport]:
        """Each bucket with its step."""
        return [self._bucket(c, machine) for c in chosen]

    def _bucket(self, chosen: Chosen, machine: Machine) -> BucketReport:
        plan, b, step = self.manifest["program"]["plans"][chosen.index], chosen.bucket, chosen.step
        return BucketReport(
            chosen.name, chosen.kind, step.tokens, step.sequences, step.sequences, step.context,
            (b.tokens, b.sequences, b.rows, b.max_query), plan["arena_bytes"],
            tuple(self._launch(stage, chosen, machine) for stage in self.stages),
        )  # fmt: skip

    def _launch(self, stage: Stage, chosen: Chosen, machine: Machine) -> Launch:
        step, graph = chosen.step, self.module.functions[stage.function]
        node = self.nodes.find((stage.node, stage.prefix))
        if node is None:
            described = describe_node(stage.node, graph, self.module, stage.prefix)
            node = self.nodes.place((stage.node, stage.prefix), described)
        kernel = self._kernel(stage)
        if stage.node.op == "call":  # its stages have the cost; what is left is to hand results over
            return make_launch(machine, kernel, node, -1, 0, 0, SPEEDS["rows"].floor_us)
        cost = node_cost(stage.node, step.dims, self.module)
        nbytes, flops = at_context(cost, step.sequences, step.query, step.context)
        speed = SPEEDS[_speed_of(self.kernels.entries[kernel], step.tokens)]
        predicted = predict(speed, Work(nbytes, flops), machine)
        return make_launch(machine, kernel, node, -1, nbytes, flops, predicted)

    def _kernel(self, stage: Stage) -> int:
        use = stage.use
        template = use.spec.template if use is not None else stage.node.op
        config: dict[str, Any] = dict(use.spec.config) if use is not None else {}
        kind = "host" if template == "host" else "cpu"
        kernel = Kernel(template, kind, _family(template, stage.node.op), config)
        return self.kernels.place((template, tuple(sorted(config.items())), kernel.family), kernel)


def predict(speed: Speed, work: Work, machine: Machine) -> float:
    """Microseconds of a stage; of its floor alone where the machine's speed is not known."""
    if not machine.bandwidth:
        return speed.floor_us
    return float(speed.time([work], machine.bandwidth, machine.tflops)[0])


def _family(template: str, op: str) -> str:
    if template == "host":
        return "host"
    if op.startswith("linear") or op in ("experts", "matmul"):
        return "linear"
    return "attention" if template in _ATTENTION else "rows"


def _speed_of(kernel: Kernel, tokens: int) -> str:
    if kernel.family != "linear" or tokens > FEW_ROWS:
        return kernel.family
    weights = str(kernel.config.get("weights", ""))[:2]
    return f"linear, few rows, {weights}" if weights in ("Q4", "Q8") else "linear, few rows"


def host_calls(manifest: dict[str, Any]) -> list[str]:
    """A sentence for each call of the host in mid-step."""
    return [
        f"{e['where']}: {', '.join(e['operators'])} run by {e['runs']}"
        + (f" ({e['reason']})" if e["reason"] else "")
        for e in manifest.get("opaque") or []
    ]


def library_of(folder: Path, manifest: dict[str, Any]) -> Path:
    """The program library of an artifact."""
    return folder / str(manifest["library"])
