"""``torch.compile(module, backend="compilerllm")``: any torch function through the same IR, passes and code generator.

    fast = torch.compile(module, backend="compilerllm", options={"fallback": True, "dump_ir": "ir/"})

For inference: call it under ``torch.no_grad()``. Options: ``level`` 0 runs the graph in plain torch, 1 to 3 (default 2)
as a CPU program; ``fallback`` lets operators that cannot be lowered run through torch in mid-program; ``dump_ir`` is a
folder that gets one file for every pass that changed something; ``on_compile`` is called with each ``CompiledGraph``.
Weights are packed for the kernels when first seen, and again after they were written in place (writes through
``.data`` are not seen; call ``torch._dynamo.reset()`` after them).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from compilerllm.environment import cache_dir
from compilerllm.errors import CompilerLLMError
from compilerllm.ir.graph import Module
from compilerllm.kernels.launch.dims import evaluate
from compilerllm.models.errors import UnsupportedOperator
from compilerllm.models.lower import LoweredFx, OutputSlot, lower_fx
from compilerllm.passes.pipeline import LEVELS, Options, run_pipeline
from compilerllm.passes.report import PassReport
from compilerllm.torch_decompositions import decompositions
from compilerllm.torch_prepare import FLOAT32_PASSES, dtypes, prepare
from compilerllm.torch_program import CpuRunner, ReferenceRunner, Runner


class InvalidOption(CompilerLLMError):
    """``torch.compile(options=...)`` has a key or a value this backend does not take."""


class TrainingNotSupported(CompilerLLMError):
    """A graph that needs gradients."""


class CannotLower(CompilerLLMError):
    """Operators that have no place in the IR; names each with the module and the source line it came from."""


@dataclass(frozen=True)
class BackendOptions:
    """What ``torch.compile(options={...})`` may hold."""

    level: int = 2
    fallback: bool = False
    dump_ir: str | None = None
    on_compile: "Callable[[CompiledGraph], None] | None" = None

    @staticmethod
    def parse(given: Mapping[str, Any]) -> "BackendOptions":
        """Raises ``InvalidOption`` naming the key."""
        known = {f.name for f in fields(BackendOptions)}
        if unknown := sorted(set(given) - known):
            raise InvalidOption(
                f"option {unknown[0]!r} is unknown; backend 'compilerllm' takes {', '.join(sorted(known))}"
            )
        options = BackendOptions(**given)
        if options.level not in LEVELS or isinstance(options.level, bool):
            raise InvalidOption(
                f"option 'level' must be one of {', '.join(map(str, LEVELS))}, but is {options.level!r}"
            )
        if not isinstance(options.fallback, bool):
            raise InvalidOption(f"option 'fallback' must be True or False, but is {options.fallback!r}")
        if options.dump_ir is not None and not isinstance(options.dump_ir, str | Path):
            raise InvalidOption(f"option 'dump_ir' must be a folder, but is {options.dump_ir!r}")
        return options


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    """One captured graph, compiled: its final IR, what the passes did, which operators torch runs."""

    module: Module
    reports: tuple[PassReport, ...]
    opaque: Mapping[str, int]

    @property
    def groups(self) -> int:
        """Fused groups of pointwise and row-reduction nodes."""
        return sum(r.counts.get("groups", 0) for r in self.reports)


def compilerllm(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend ``torch.compile`` finds by its name. Inference graphs only.

    Raises ``InvalidOption``, ``TrainingNotSupported``, ``CannotLower``, ``UnsupportedByTarget`` and ``BuildFailed``;
    torch wraps them into its ``BackendCompilerFailed``, their message inside.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    settings = BackendOptions.parse(options or {})
    if mode not in (None, "default"):
        raise InvalidOption(
            f"mode {mode!r} is inductor's; backend 'compilerllm' takes options={{'level': ...}}"
        )

    def inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with unset_fake_temporarily():  # constants of the graph are real tensors, and are read
            return _boxed(compile_graph(graph, settings, static_inputs()))

    wrapped = aot_autograd(
        fw_compiler=_refuse_training,
        bw_compiler=_refuse_training,
        inference_compiler=inference,
        decompositions=decompositions(),
    )
    compiled: Callable[..., Any] = wrapped(gm, list(example_inputs))
    return compiled


def _refuse_training(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    raise TrainingNotSupported(
        "this graph needs gradients, and backend 'compilerllm' compiles for inference. Call the compiled function under "
        "torch.no_grad() or torch.inference_mode(), or freeze its parameters with requires_grad_(False)"
    )


def _boxed(run: Callable[[Sequence[Any]], list[Any]]) -> Callable[..., Any]:
    from torch._functorch._aot_autograd.utils import make_boxed_func

    boxed: Callable[..., Any] = make_boxed_func(lambda *args: run(args))
    return boxed


def static_inputs() -> frozenset[int]:
    """Places of the inputs that AOTAutograd knows to stay the same: parameters and buffers."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    facts = getattr(context, "fw_metadata", None)
    return frozenset(getattr(facts, "static_input_indices", None) or ())


def compile_graph(
    gm: fx.GraphModule, options: BackendOptions, static: frozenset[int] = frozenset()
) -> Callable[[Sequence[Any]], list[Any]]:
    """Compile a functionalised graph with fake values; the result takes the graph's arguments as one sequence."""
    lowered = _lower(gm, options.fallback)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    names = {n.name for i, n in enumerate(placeholders) if i in static}
    module = Module({"main": prepare(lowered.graph, names)})
    wide = "f64" in dtypes(module.main)
    module, reports = run_pipeline(
        module,
        Options(
            level=options.level, serve=False, dump_ir=_dump_folder(options.dump_ir),
            skip=FLOAT32_PASSES if wide else frozenset(),
        ),
    )  # fmt: skip
    runner: Runner
    if options.level == 0:
        runner = ReferenceRunner(module)
    else:
        runner = CpuRunner(module, cache_dir() / "libraries", torch.get_num_threads())
    if options.on_compile is not None:
        options.on_compile(CompiledGraph(module, tuple(reports), lowered.opaque))
    return _Call(gm, lowered, module, runner)


def _dump_folder(folder: str | None) -> Path | None:
    """A folder of its own for each graph: a function with graph breaks has several."""
    if folder is None:
        return None
    number = 0
    while (path := Path(folder) / f"graph_{number}").exists():
        number += 1
    return path


def _lower(gm: fx.GraphModule, fallback: bool) -> LoweredFx:
    try:
        lowered = lower_fx(gm, opaque=True)
    except UnsupportedOperator as error:
        raise CannotLower(str(error)) from error
    if lowered.opaque and not fallback:
        places = [line for target in lowered.opaque for line in _places(gm, target)]
        raise CannotLower(
            "no lowering for\n  "
            + "\n  ".join(places)
            + "\npass options={'fallback': True} to run such operators through torch"
        )
    return lowered


def _places(gm: fx.GraphModule, target: str) -> list[str]:
    """Where an operator stands: argument types, module and source line of each of its nodes."""
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or str(node.target) != target:
            continue
        stack = node.meta.get("nn_module_stack") or {}
        module = str(next(reversed(stack.values()))[0]) if stack else ""
        trace = [
            line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip(" ^~")
        ]
        source = " ".join(trace[-2:])
        found.append(", ".join(part for part in (target, f"in {module}" if module else "", source) if part))
    return found


class _Call:
    """From the arguments AOTAutograd passes to a run, and back: sizes and tensors apart, strides as torch expects."""

    def __init__(self, gm: fx.GraphModule, lowered: LoweredFx, module: Module, runner: Runner) -> None:
        self.runner, self.constants = runner, lowered.constants
        places = {n.name: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
        inputs = {v.name for v in module.main.inputs}
        self.inputs = [places[v.name] for v in module.main.inputs]
        self.params = {name: places[name] for name in lowered.inputs if name not in inputs}
        self.dims = [(ours, _size_place(gm, theirs)) for theirs, ours in lowered.dims.items()]
        self.slots = [
            str(s) if not isinstance(s, OutputSlot | int | float | None) else s for s in lowered.outputs
        ]
        self.orders = [_stride_order(r) for r in _results(gm)]

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        dims = {name: int(args[i] if axis is None else args[i].shape[axis]) for name, (i, axis) in self.dims}
        params = {name: args[i] for name, i in self.params.items()} | dict(self.constants)
        with torch.no_grad():
            tensors = self.runner.run([args[i] for i in self.inputs], params, dims)
        results: list[Any] = []
        for slot, order in zip(self.slots, self.orders, strict=True):
            if isinstance(slot, OutputSlot):
                results.append(_restride(tensors[slot.index], order))
            else:
                results.append(evaluate(slot, dims) if isinstance(slot, str) else slot)
        return results


def _results(gm: fx.GraphModule) -> list[Any]:
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def _size_place(gm: fx.GraphModule, symbol: str) -> tuple[int, int | None]:
    """The argument that tells a symbol: (place, None) where it is the argument, (place, axis) where it is an extent."""
    placeholders = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    for i, val in enumerate(placeholders):
        if isinstance(val, torch.SymInt) and str(val.node.expr) == symbol:
            return i, None
    for i, val in enumerate(placeholders):
        if isinstance(val, Tensor):
            for axis, extent in enumerate(val.shape):
                if isinstance(extent, torch.SymInt) and str(extent.node.expr) == symbol:
                    return i, axis
    raise CannotLower(
        f"no argument tells the size {symbol}; it depends on the data, which a compiled graph cannot"
    )


def _stride_order(result: Any) -> tuple[int, ...] | None:
    """The axes of a result from the slowest to the fastest, or None where they are row-major."""
    val = result.meta.get("val") if isinstance(result, fx.Node) else None
    if not isinstance(val, Tensor) or val.is_contiguous():
        return None
    strides = [int(s) if isinstance(s, int) else int(s.node.hint or 1) for s in val.stride()]
    return tuple(sorted(range(val.dim()), key=lambda axis: -strides[axis]))


def _restride(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The same numbers with the axes in another order in memory."""
    if order is None:
        return tensor.contiguous()
    back = [order.index(axis) for axis in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(back)


__all__ = [
    "BackendOptions",
    "CannotLower",
    "CompiledGraph",
    "InvalidOption",
    "TrainingNotSupported",
    "compile_graph",
    "compilerllm",
]
