"""Values known by their numbers, and who is to blame for one that is not: how two graphs are compared that share no names."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from compilerllm.bisect.evaluate import Runtime, Site
from compilerllm.ir.op import lookup
from compilerllm.kernels.reference.states import State

SAMPLES = 512  # elements of a value that are kept to know it again, spread evenly
SAME = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}  # relative difference; in f32:
SAME_F32 = 2.0**-14


def _sketch(value: Tensor) -> Tensor:
    flat = value.detach().reshape(-1)
    if flat.numel() > SAMPLES:
        flat = flat[torch.linspace(0, flat.numel() - 1, SAMPLES).long()]
    return flat.double().nan_to_num(nan=7e77)


class Known:
    """Tensors that a graph computed, in any shape; bounded memory each."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[Tensor]] = {}
        self._stacked: dict[int, Tensor] = {}

    def add(self, value: Tensor) -> None:
        self._by_size.setdefault(value.numel(), []).append(_sketch(value))
        self._stacked.pop(value.numel(), None)

    def has(self, value: Tensor) -> bool:
        """Whether some value had the same numbers, in the same order."""
        if value.numel() not in self._by_size:
            return False
        if value.numel() not in self._stacked:
            self._stacked[value.numel()] = torch.stack(self._by_size[value.numel()])
        sketch = _sketch(value)
        limit = SAME.get(value.dtype, SAME_F32) * float(sketch.norm())
        return bool(((self._stacked[value.numel()] - sketch).norm(dim=1) <= limit).any())

    def remember(self, site: Site, operands: Sequence[Runtime], results: Sequence[Runtime]) -> None:
        """A ``Watch`` that adds what a node takes and leaves behind."""
        for value in (*operands, *_left_behind(site, operands, results)):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.add(value)


def _written(site: Site, operands: Sequence[Runtime]) -> list[State]:
    if site.node.op in ("call", "group") or not lookup(site.node.op).writes_state:
        return []
    return [o for o in operands if isinstance(o, State)]


def _left_behind(site: Site, operands: Sequence[Runtime], results: Sequence[Runtime]) -> list[Tensor]:
    return [*(r for r in results if isinstance(r, Tensor)), *map(_contents, _written(site, operands))]


def _contents(state: State) -> Tensor:
    """What has been written to a state: all else is NaN."""
    return state.data[state.data.isfinite()]


class Blame:
    """For each unknown value the node where the unknown began; a ``Watch``.

    A node whose results are unknown passes on the blame of its operands; where all of these are known, it is to blame.
    What is new in a graph is unknown too, but what is made of it is known again, and the blame ends.
    """

    def __init__(self, known: Known) -> None:
        self._known = known
        self._of: dict[int, tuple[weakref.ref[Tensor], Site]] = {}
        self._states: dict[int, Site] = {}
        self.latest: Site | None = None  # who is to blame for the result of the last node that ran

    def look(self, site: Site, operands: Sequence[Runtime], results: Sequence[Runtime]) -> None:
        if site.node.op == "call":
            return  # its results were looked at inside
        handed = [b for b in (self.of(o) for o in operands) if b is not None]
        begun = handed[0] if handed else site
        self.latest = None
        for state in _written(site, operands):
            if self._known.has(_contents(state)):
                self._states.pop(id(state.data), None)
            else:
                self._states.setdefault(id(state.data), begun)
        for value in results:
            if isinstance(value, Tensor) and value.is_floating_point() and not self._known.has(value):
                self._of[id(value)] = weakref.ref(value), begun
                self.latest = begun

    def of(self, value: Runtime) -> Site | None:
        """Who is to blame for a value; None where it is known."""
        if isinstance(value, State):
            return self._states.get(id(value.data))
        found = self._of.get(id(value))
        return found[1] if found is not None and found[0]() is value else None
