"""A kernel's case: a module of few nodes, the sizes it is run at, and how its kernels are chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Choice = Mapping[str, Any]
Lengths = tuple[tuple[int, int], ...]
CUDA, CPU = "cuda", "cpu"


@dataclass(frozen=True, eq=False)
class KernelCase:
    """A module and how to run it.

    tokens: rows of a module without a step. steps: (context before, tokens now) of each sequence, step after step, of one
    with a step. pads: rows, and sequences, that a bucket has beyond them. pick: what the emitters' candidate must have (a
    value that none of them has is forced). limits: constants of emitter modules while the program is made, as
    "module.NAME". below: whole numbers of an input lie below this. samples: "all" rows or "ends" of sequences.
    late: the kernel scales after a product what the reference scales before it ("late.py"): "rounded" where what goes into
    the product is rounded, "exact" where it is not.
    unlike: the share of narrow results that may be rounded otherwise, as a sum that falls on the other side of a tie is.
    """

    family: str
    name: str
    text: str
    tokens: int = 1
    steps: tuple[Lengths, ...] = ()
    pads: int = 0
    pick: Choice = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    below: int = 4
    targets: tuple[str, ...] = (CUDA, CPU)
    samples: str = "all"
    late: Literal["", "rounded", "exact"] = ""
    unlike: float = 0.08
    cutlass: bool = False

    @property
    def title(self) -> str:
        return f"{self.family}/{self.name}"


def module(
    inputs: str, body: str, results: str, declared: str = "", dtype: str = "f32", more: str = ""
) -> str:
    """A function main; ``$`` stands for the dtype."""
    lines = [line.strip() for line in (declared + "\n" + body).splitlines() if line.strip()]
    dims = (
        "  dim T in [0, 4096]\n  dim S in [1, 4096]\n  dim R in [0, 4096]\n"
        if "%step" in inputs
        else "  dim T in [1, 64]\n"
    )
    text = (
        f"func @main({inputs}) {{\n{dims}"
        + "".join(f"  {x}\n" for x in lines)
        + f"  return {results}\n}}\n{more}"
    )
    return text.replace("$", dtype)


# Activations that gates and linears have.
ACTS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity")
