"""The kernels that a module's build uses, each run alone at few rows against the reference: for builds with --verify."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from compilerllm.cuda_artifact import flat_module, prepare_bucket
from compilerllm.ir.dims import free_dims
from compilerllm.ir.graph import Graph, Module, Node, Param, Value
from compilerllm.ir.recipe import Read
from compilerllm.ir.step import Bucket
from compilerllm.ir.text import print_module
from compilerllm.ir.types import StateType, StepType
from compilerllm.kernels.cpu.target import CpuTarget
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.refs import VIEW_OPS
from compilerllm.kernels.triton.emitter import BucketEmitter, Chooser, FirstCandidate
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.triton.tasks import alone
from compilerllm.passes.inline_calls import inline_calls
from compilerllm.validation.cpu_machine import CpuMachine
from compilerllm.validation.inputs import Kind, Trial, free_sizes, make_trial
from compilerllm.validation.kernels import KernelFinding, compare
from compilerllm.validation.late import OPS as LATE
from compilerllm.validation.late import scaled_late
from compilerllm.validation.machine import InterpretedMachine
from compilerllm.validation.narrow import narrowed_rows
from compilerllm.validation.running import Runner
from compilerllm.validation.weights import Weights

LOOSE = 4.0  # a factor on the tolerance of f32 results: products here are as wide as the model's
PADS = 2  # rows that a bucket has beyond the step's
PROMPTS = Kind("prompts", ((0, 5), (33, 1), (4, 7)))
DECODES = Kind("decodes", ((9, 1), (40, 1), (0, 1)), sample="all", tokens=3)
ONE = Kind("one token", ((8, 1),), sample="all", tokens=1)
FRESH = Kind("fresh prompts", ((0, 5), (0, 1), (0, 7)))  # where a cache's layout is the kernels' own
NO_KERNEL = frozenset((*VIEW_OPS, "step_field", "call", "full", "aten"))
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class _Piece:
    """A node, or nodes of one state, as a module; with the candidates that its build chose, by family."""

    module: Module
    kind: Kind
    node: Node
    chosen: Mapping[str, dict[str, Any]]

    @property
    def scaled_late(self) -> dict[str, Any] | None:
        """The candidate, where it norms within a product and scales the sums (``late.py``)."""
        linear = self.chosen.get("linear")
        if linear is None or self.node.op not in LATE:
            return None
        path, norm = linear.get("path"), linear.get("norm")
        late = (path == "skinny" and norm != "apart") or (path == "matmul" and norm == "inside")
        return linear if late else None


def verify_kernels(
    module: Module, target: CudaTarget | CpuTarget, level: int, buckets: Sequence[Bucket],
    on_progress: OnProgress = lambda done, total, title: None, chooser: Chooser | None = None,
) -> list[KernelFinding]:  # fmt: skip
    """Every distinct kernel of a module that went through the pipeline; an empty list is what is wanted.

    ``chooser`` is the build's, so that the kernels are those that it chose; weights of many rows have fewer here. CUDA's run in the interpreter (a product of
    CUTLASS is not run: another candidate takes its place), the CPU's as C++ for a target that this machine can run.
    """
    if isinstance(target, CpuTarget):
        pieces = _cpu_pieces(module)
    else:
        pieces = _cuda_pieces(flat_module(module), target, level, buckets, chooser or FirstCandidate())
    found: list[KernelFinding] = []
    with TemporaryDirectory(prefix="compilerllm-verify-") as folder:
        for done, piece in enumerate(pieces):
            on_progress(done, len(pieces), f"{piece.node.op} ({piece.kind.name})")
            errors, templates = _check(piece, target, level, Path(folder))
            shape = ", ".join(str(v.type) for v in piece.node.operands)
            family = f"{piece.node!r} [{piece.node.origin.path}]"
            found += [KernelFinding(piece.node.op, family, target.name, templates, shape, e) for e in errors]
    return found


def _check(
    piece: _Piece, target: CudaTarget | CpuTarget, level: int, folder: Path
) -> tuple[list[str], tuple[str, ...]]:
    trial = make_trial(piece.module, piece.kind, 1, poison=False)
    if trial is None:
        return [f"no step of kind {piece.kind.name!r} fits the module's dims"], ()
    weights = Weights(piece.module, 1)
    meant = piece.module
    if (linear := piece.scaled_late) is not None:
        meant = scaled_late(meant, rounds=linear["bm"] > 1)
    want = Runner(meant, weights).run(trial)
    if isinstance(target, CpuTarget):
        return _on_cpu(piece, trial, weights, want.outputs, target, folder)
    return _on_cuda(piece, trial, weights, want.outputs, want.states, target, level)


# -- CUDA -------------------------------------------------------------------------------------------------------------


class _Recorder:
    """The build's chooser, noting what it chose for the node being emitted."""

    def __init__(self, inner: Chooser) -> None:
        self.inner, self.chosen = inner, dict[str, dict[str, Any]]()
        self.by_node: dict[Node, dict[str, dict[str, Any]]] = {}
        self.emitter: BucketEmitter | None = None

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        found = self.inner.choose(family, problem, candidates)
        if self.emitter is not None:
            self.by_node.setdefault(self.emitter.node, {})[family] = found
        return found


class _Chosen:
    """Gives what the build chose."""

    def __init__(self, chosen: Mapping[str, dict[str, Any]]) -> None:
        self.chosen = chosen

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        return self.chosen.get(family, candidates[0])


def _cuda_pieces(
    flat: Module, target: CudaTarget, level: int, buckets: Sequence[Bucket], chooser: Chooser
) -> list[_Piece]:
    found: dict[tuple[str, str, str], _Piece] = {}
    windows = paged_windows(flat)
    for bucket in buckets:
        ready, recorder = prepare_bucket(flat, bucket), _Recorder(chooser)
        recorder.emitter = BucketEmitter(ready, bucket, target, windows, level, recorder)
        recorder.emitter.emit()
        kind = PROMPTS if bucket.max_query > 1 else (ONE if bucket.sequences == 1 else DECODES)
        for node in ready.main.nodes:
            if node.op in NO_KERNEL:
                continue
            module, chosen = narrowed_rows(_bare(alone(ready, node))), recorder.by_node.get(node, {})
            key = print_module(module), str(sorted(chosen.items())), kind.name
            found.setdefault(key, _Piece(module, kind, node, chosen))
    return list(found.values())


def _bare(module: Module) -> Module:
    """With names that do not tell one layer from the next."""
    main, names = module.main, dict[Value, Value]()

    def named(value: Value, name: str) -> Value:
        return names.setdefault(value, Value(name, value.type))

    inputs = tuple(named(v, f"i{n}") for n, v in enumerate(main.inputs))
    params = tuple(Param(named(p.value, f"p{n}"), Read(f"p{n}")) for n, p in enumerate(main.params))
    states = tuple(named(v, f"s{n}") for n, v in enumerate(main.states))
    nodes = []
    for node in main.nodes:
        outputs = tuple(named(v, f"o{len(names)}") for v in node.outputs)
        operands = tuple(None if v is None else names[v] for v in node.inputs)
        nodes.append(Node(node.op, operands, node.attrs, outputs))
    outputs = tuple(names[v] for v in main.outputs)
    graph = Graph("main", main.dims, inputs, params, states, tuple(nodes), outputs)
    used = {n.fn for n in nodes if n.op == "group"}
    return Module({"main": graph, **{n: g for n, g in module.functions.items() if n in used}})


def _on_cuda(
    piece: _Piece, trial: Trial, weights: Weights, want: Sequence[Tensor], states: Mapping[str, Tensor],
    target: CudaTarget, level: int,
) -> tuple[list[str], tuple[str, ...]]:  # fmt: skip
    chosen = {f: c for f, c in piece.chosen.items() if c.get("path") != "cutlass"}
    step, pads = trial.step, 0 if piece.kind is ONE else PADS
    if step is None:
        sizes = _sizes(piece)
        bucket, inputs, count = Bucket(sizes["T"], sizes["S"], sizes["R"], sizes["T"]), list(trial.inputs), 1
    else:
        tokens, sequences, rows = len(step.token_ids) + pads, len(step.seq_lens), len(step.sample_rows) + pads
        decodes = step.max_query <= 1
        bucket = Bucket(tokens, tokens if decodes else sequences + 1, rows, 1 if decodes else tokens)
        inputs, count = _padded(piece.module, trial, pads), int(step.block_tables.max(initial=0)) + 1
    machine = InterpretedMachine(
        piece.module, weights.bind(piece.module), [bucket], num_blocks=count, level=level, chooser=_Chosen(chosen),
        target=target,
    )  # fmt: skip
    for name, state in trial.states.items():
        machine.states[name].copy_(state.data.permute(0, 2, 3, 1, 4))
    templates = tuple(sorted({k.template for k in machine.program.kernels}))
    try:
        machine.run(0, step, inputs)
    except Exception as error:  # noqa: BLE001 - whatever stops a kernel is what is looked for
        return [f"{type(error).__name__}: {error}"], templates
    got = [o.tensor for o in machine.outputs]  # with the rows of padding
    errors = _differences([a[: len(b)] if b.dim() else a for a, b in zip(got, want, strict=True)], want)
    errors += [
        f"result {i}: memory {o.broken()} it was written" for i, o in enumerate(machine.outputs) if o.broken()
    ]
    for name, data in states.items():
        held = machine.states[name].permute(0, 3, 1, 2, 4)
        if wrong := compare(held, data):
            errors.append(f"state: {wrong}")
    return errors, templates


def _sizes(piece: _Piece) -> dict[str, int]:
    """Of a piece that takes no step: its dims' sizes; 1 for those of a step that it does not have."""
    return dict.fromkeys("TSR", 1) | free_sizes(piece.module.main, piece.kind.tokens)


def _padded(module: Module, trial: Trial, pads: int) -> list[Tensor]:
    """Activations with rows that belong to nobody behind them."""
    values = [v for v in module.main.inputs if not isinstance(v.type, StateType | StepType)]
    made = []
    for value, tensor in zip(values, trial.inputs, strict=True):
        if value.shape and free_dims(value.shape[0]):
            extra = torch.zeros((pads, *tensor.shape[1:]), dtype=tensor.dtype)
            tensor = torch.cat((tensor, extra))
        made.append(tensor)
    return made


def _differences(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[str]:
    errors = (compare(a, b, LOOSE) for a, b in zip(got, want, strict=True))
    return [f"result {number}: {error}" for number, error in enumerate(errors) if error]


# -- CPU --------------------------------------------------------------------------------------------------------------


def _cpu_pieces(module: Module) -> list[_Piece]:
    """Nodes of one state together, since its layout is theirs alone; and those that rotate with the table they rotate by."""
    flat, found = inline_calls(module), dict[str, _Piece]()
    makers = flat.main.producers()
    for node in flat.main.nodes:
        if node.op in NO_KERNEL or node.op == "rotary_table":
            continue
        nodes = [node]
        if states := [v for v in node.operands if isinstance(v.type, StateType)]:
            nodes = [n for n in flat.main.nodes if states[0] in n.operands]
            if node is not nodes[-1]:
                continue
        used = [
            makers[v] for n in nodes for v in n.operands if v in makers and makers[v].op == "rotary_table"
        ]
        piece = narrowed_rows(_bare(_together(flat, [*dict.fromkeys(used), *nodes])))
        found.setdefault(print_module(piece), _Piece(piece, FRESH, node, {}))
    return list(found.values())


def _together(module: Module, nodes: Sequence[Node]) -> Module:
    """``alone`` for several nodes: what they make for each other stays between them, and rotary tables are no results."""
    made = {v for n in nodes for v in n.outputs}
    parts = [alone(module, n).main for n in nodes]
    given = dict.fromkeys(v for p in parts for v in p.inputs if v not in made)
    inputs = tuple(sorted(given, key=lambda v: not isinstance(v.type, StepType)))
    params = tuple(dict.fromkeys(q for p in parts for q in p.params))
    states = tuple(dict.fromkeys(v for p in parts for v in p.states))
    outputs = tuple(v for n in nodes if n.op != "rotary_table" for v in n.outputs)
    main = Graph("main", module.main.dims, inputs, params, states, tuple(nodes), outputs)
    return Module({"main": main, **{n: g for n, g in module.functions.items() if n != "main"}})


def _on_cpu(
    piece: _Piece, trial: Trial, weights: Weights, want: Sequence[Tensor], target: CpuTarget, folder: Path
) -> tuple[list[str], tuple[str, ...]]:
    step = trial.step
    dims = _sizes(piece)
    largest = Bucket(dims["T"], dims["S"], dims["R"], dims["T"])
    if step is not None:
        dims |= {"T": len(step.token_ids), "S": len(step.seq_lens), "R": len(step.sample_rows)}
        largest = Bucket(dims["T"], dims["S"], dims["T"], dims["T"])
    blocks = 1 if step is None else int(step.block_tables.max(initial=0)) + 1
    machine = CpuMachine(piece.module, weights.evaluate, folder, largest, target=target, num_blocks=blocks)
    got = machine.run(dims, step, trial.inputs)
    errors = _differences(got, want)
    errors += [
        f"result {i}: memory {o.broken()} it was written" for i, o in enumerate(machine.outputs) if o.broken()
    ]
    return errors, machine.kernels
