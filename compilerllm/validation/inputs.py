"""What rewrites are tried on: kinds of inputs, steps of several sequences, states that already hold a context."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from compilerllm.ir.dims import Dim, free_dims, substitute
from compilerllm.ir.graph import Graph, Module, Value
from compilerllm.ir.step import StepInputs
from compilerllm.ir.types import StepType, TensorType
from compilerllm.kernels.groups import paged_windows
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.reference.states import BLOCK_SIZE, State, allocate_states

FREE_SIZES = (7, 3, 5, 2, 6)  # of dims that no step tells: different ones, so that a mix-up of two shows


@dataclass(frozen=True)
class Kind:
    """One way to make inputs up.

    sequences: (tokens of earlier context, tokens of this step) each. pads: rows behind the last token that belong to
    nobody; activations there are NaN. scale: of activations and kept states. weights: factor on every weight.
    sample: "some" rows, out of order and one twice, or "all" tokens in order. tokens: the extent T of a graph without a
    step.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    scale: float = 1.0
    weights: float = 1.0
    pads: int = 0
    sample: str = "some"
    tokens: int = 7

    @property
    def valid(self) -> int:
        """Rows that belong to a sequence."""
        return sum(n for _, n in self.sequences)


# Lengths end one past a block of 32, at one, and within one; sequences differ; one of them has no token in its step.
KINDS: tuple[Kind, ...] = (
    Kind("random", ((0, 5), (33, 1), (4, 7)), scale=2.0),
    Kind("large", ((3, 2), (0, 3)), scale=3e4, weights=8.0, tokens=5),
    Kind("tiny", ((3, 2), (0, 3)), scale=2.0**-12, weights=2.0**-6, tokens=5),
    Kind("zeros", ((3, 2), (0, 3)), scale=0.0, tokens=5),
    Kind("one token", ((0, 1),), scale=2.0, tokens=1),
    Kind("tails", ((31, 2), (0, 1), (40, 0), (2, 17)), scale=2.0, tokens=33),
    Kind("padded", ((5, 1), (0, 3)), scale=2.0, pads=3, tokens=9),
    Kind("decode", ((9, 1), (40, 1), (0, 1)), scale=2.0, sample="all", tokens=3),
    Kind("padded decode", ((33, 1), (0, 1)), scale=2.0, pads=2, sample="all", tokens=4),
)


def kind(name: str) -> Kind:
    """The kind of that name."""
    return next(k for k in KINDS if k.name == name)


@dataclass(eq=False)
class Trial:
    """Inputs of one run. ``inputs`` are the tensors that main takes beside the step, in order.

    ``states`` are never written: each run gets copies (``fresh_states``).
    """

    kind: Kind
    inputs: tuple[Tensor, ...]
    step: StepInputs | None = None
    states: Mapping[str, State] = field(default_factory=dict)
    valid: int | None = None  # rows that belong to a sequence; None where there is no step

    def fresh_states(self) -> dict[str, State]:
        return {name: State(s.type, s.data.clone(), s.group) for name, s in self.states.items()}


def make_trial(module: Module, chosen: Kind, seed: int = 0, *, poison: bool = True) -> Trial | None:
    """Inputs for ``module.main``; None where its dims allow no such step. The same seed gives the same numbers.

    Without ``poison`` padded rows of activations are zeros in place of NaN.
    """
    main = module.main
    generator = torch.Generator().manual_seed(seed)
    if not any(isinstance(v.type, StepType) for v in main.inputs):
        sizes = free_sizes(main, chosen.tokens)
        return Trial(
            chosen, tuple(make_tensor(module, v, sizes, generator, chosen.scale) for v in main.inputs)
        )
    step = make_step(module, chosen, seed)
    sizes = {"T": len(step.token_ids), "S": len(step.seq_lens), "R": len(step.sample_rows)}
    if any(
        d.name in sizes and not d.low <= sizes[d.name] <= d.high
        for g in module.functions.values()
        for d in g.dims
    ):
        return None
    if any(not _fits(v, sizes) for v in main.inputs):
        return None
    inputs: list[Tensor] = []
    for value in main.inputs:
        if isinstance(value.type, StepType):
            continue
        tensor = make_tensor(module, value, sizes, generator, chosen.scale)
        if chosen.pads and tensor.dim() and free_dims(value.shape[0]) == {"T"} and tensor.is_floating_point():
            tensor[chosen.valid :] = float("nan") if poison else 0.0
        inputs.append(tensor)
    states = make_states(module, step, chosen, generator)
    return Trial(chosen, tuple(inputs), step, states, chosen.valid)


def _fits(value: Value, sizes: Mapping[str, int]) -> bool:
    """A specialised graph has numbers where T was: an input that is known by name only must not contradict the step."""
    return isinstance(value.type, StepType) or not (free_dims_of(value) - sizes.keys())


def free_dims_of(value: Value) -> frozenset[str]:
    return frozenset().union(*(free_dims(d) for d in value.shape)) if value.shape else frozenset()


def free_sizes(graph: Graph, tokens: int) -> dict[str, int]:
    """A size for every dimension that a graph without a step declares; ``tokens``, within its bounds, for the first."""
    sizes: dict[str, int] = {}
    others = iter(FREE_SIZES * 4)
    for decl in graph.dims:
        sizes[decl.name] = min(max(tokens if not sizes else next(others), decl.low), decl.high)
    return sizes


def make_tensor(
    module: Module, value: Value, sizes: Mapping[str, int], generator: torch.Generator, scale: float
) -> Tensor:
    """Random numbers of a value's type. Whole numbers stay inside what they index."""
    type = value.tensor
    shape = tuple(_number(d, sizes) for d in type.shape)
    dtype = TORCH_DTYPES[type.dtype]
    if type.dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    if not type.is_float:
        if _is_position(value):
            return torch.arange(shape[-1]).expand(shape).to(dtype).clone()
        return torch.randint(0, index_bound(module, value, sizes), shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def _is_position(value: Value) -> bool:
    return value.name in ("positions", "position_ids") and value.tensor.rank > 0


def _number(extent: Dim, sizes: Mapping[str, int]) -> int:
    number = substitute(extent, dict(sizes))
    assert isinstance(number, int), f"nothing tells {extent}"
    return number


def index_bound(module: Module, value: Value, sizes: Mapping[str, int]) -> int:
    """One past the largest whole number that every use of an input allows; 4 where nobody uses it as an index."""
    graph = next(g for g in module.functions.values() if value in g.inputs)
    bounds: list[int] = []

    def follow(value: Value, graph: Graph) -> None:
        for node in graph.uses().get(value, []):
            at = node.inputs.index(value)
            match node.op:
                case "embedding" if at == 0:
                    bounds.append(_number(node.operand(1).shape[0], sizes))
                case "gather_rows" if at == 1:
                    bounds.append(_number(node.operand(0).shape[0], sizes))
                case "experts" if at == 1:
                    bounds.append(_number(node.operand(3).shape[0], sizes))
                case "call" | "group":
                    callee = module.functions[node.fn]
                    follow(callee.inputs[at], callee)
                case "reshape" | "permute" | "cast" | "slice" | "concat" | "expand":
                    follow(node.output, graph)

    follow(value, graph)
    return max(1, min(bounds, default=4))


def vocabulary(module: Module) -> int:
    """Token ids below this are in every embedding table."""
    sizes = [n.operand(1).shape[0] for g in module.functions.values() for n in g.nodes if n.op == "embedding"]
    return min((s for s in sizes if isinstance(s, int)), default=4)


def make_step(module: Module, chosen: Kind, seed: int = 0, adapters: Sequence[int] = ()) -> StepInputs:
    """A step of the kind's sequences. Blocks are in no order; ids of padded rows are legal, and mean nothing.

    ``adapters``: a slot for each sequence, by turns.
    """
    draw = np.random.default_rng(seed)
    counts = [n for _, n in chosen.sequences]
    lengths = [c + n for c, n in chosen.sequences]
    positions = [p for c, n in chosen.sequences for p in range(c, c + n)]
    total = chosen.valid + chosen.pads
    rows = list(range(total))
    if chosen.sample == "some":
        ends = [int(e) - 1 for e, n in zip(np.cumsum(counts), counts, strict=True) if n]
        rows = [*reversed(ends), *([0] if total > 1 else [])]
    width = max(-(-n // BLOCK_SIZE) for n in lengths)
    groups = max(1, len(paged_windows(module)))
    blocks = draw.permutation(len(counts) * width * groups).astype(np.int32)
    ids = list(adapters) or [0]
    owners = [ids[s % len(ids)] for s, n in enumerate(counts) for _ in range(n)]
    return StepInputs(
        token_ids=draw.integers(0, vocabulary(module), total).astype(np.int32),
        positions=np.array(positions + [0] * chosen.pads, np.int32),
        query_start=np.cumsum([0, *counts], dtype=np.int32),
        seq_lens=np.array(lengths, np.int32),
        block_tables=blocks.reshape(groups, len(counts), width),
        slots=draw.permutation(len(counts)).astype(np.int32),
        sample_rows=np.array(rows, np.int32),
        adapter_id=np.array(owners + [0] * chosen.pads, np.int32),
    )


def make_states(
    module: Module, step: StepInputs, chosen: Kind, generator: torch.Generator
) -> dict[str, State]:
    """States in which the sequences' earlier context stands; the rest is NaN, so that a read of it shows."""
    count = int(step.block_tables.max(initial=0)) + 1
    states = allocate_states(module, count, len(step.seq_lens))
    for state in states.values():
        if state.type.addressing != "paged":
            state.data.copy_(torch.randn(state.data.shape, generator=generator) * chosen.scale)
            continue
        for s, (context, _) in enumerate(chosen.sequences):
            if not context:
                continue
            at = torch.arange(context)
            table = torch.from_numpy(step.block_tables[state.group, s].copy()).long()
            kept = torch.randn((context, *state.data.shape[2:]), generator=generator) * chosen.scale
            state.data[table[at // BLOCK_SIZE], at % BLOCK_SIZE] = kept.to(state.data.dtype)
    return states


def trials(
    module: Module,
    kinds: Sequence[Kind] = KINDS,
    seed: int = 0,
    wanted: Callable[[Kind], bool] = lambda k: True,
) -> list[Trial]:
    """A trial of each kind that the module's dims allow."""
    found = (make_trial(module, k, seed) for k in kinds if wanted(k))
    return [t for t in found if t is not None]


__all__ = ["KINDS", "Kind", "TensorType", "Trial", "kind", "make_step", "make_tensor", "make_trial", "trials"]
