"""Probe-verified swaps: a module's own norm or rotary code is replaced by one operator only after it has been run on
samples and found equal to one of our formulas: bit for bit in bfloat16, closely in float32.

What no formula equals stays as it is and reaches the IR as the ATen operators it is made of.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from compilerllm.models.interfaces import probe_experts
from compilerllm.models.norms import swap_norms
from compilerllm.models.rotary import swap_tables, swapped_rotary


@dataclass(frozen=True)
class Swaps:
    """How many modules and functions were replaced, and which were not, with the reason."""

    norms: int
    rotary: int
    tables: int
    experts: int
    left: tuple[str, ...]


def _mark_experts(model: nn.Module, left: list[str]) -> int:
    count = 0
    for path, module in model.named_modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            form = probe_experts(module)
            if form is None:
                left.append(f"{path}: {type(module).__name__} gates its experts as none of our formulas does")
                continue
            module.compilerllm_gate = form
            count += 1
    return count


@contextmanager
def swapped(model: nn.Module) -> Iterator[Callable[[], Swaps]]:
    """Replace what can be replaced, modules for good (the model is a private copy), module functions until the end.

    Gives a function that says what was done; rotary applications are counted as they are traced.
    """
    left: list[str] = []
    norms = swap_norms(model, left)
    tables, layouts = swap_tables(model, left)
    experts = _mark_experts(model, left)
    with swapped_rotary(model, layouts, left) as uses:
        yield lambda: Swaps(norms, len(uses), tables, experts, tuple(left))
