"""Weights on their way to the device: streamed in pieces, tied ones once, made up where asked."""

from collections.abc import Iterable, Mapping

import pytest
import torch

from compilerllm.ir.recipe import Concat, Convert, Literal, Read, Recipe, Relayout, Shift, Slice
from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.gpu import parameters
from compilerllm.kernels.launch.gpu.parameters import DUMMY_RANGE, Placement, load_parameters
from compilerllm.kernels.launch.packing import ParameterSpec
from compilerllm.kernels.triton.interpreted_backend import InterpretedBackend


class Checkpoint:
    """Tensors in memory."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return "f32", tuple(self.tensors[name].shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.tensors[name][start:stop]


def load(
    specs: Iterable[ParameterSpec], source: Checkpoint, made_up: bool = False
) -> tuple[InterpretedBackend, Placement, Mapping[str, int]]:
    backend, placement = InterpretedBackend(), Placement.of(specs)
    _, addresses = load_parameters(backend, placement, source, made_up=made_up)
    return backend, placement, addresses


def spec(name: str, shape: tuple[int, ...], recipe: Recipe, dtype: str = "f32") -> ParameterSpec:
    return ParameterSpec(name, dtype, shape, recipe)


def test_streamed_through_small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces than buffers, so that buffers are used again while copies wait; stacked parts, conversion, a slice."""
    monkeypatch.setattr(parameters, "STAGING_BYTES", 64)
    a, b = torch.randn(7, 5), torch.randn(3, 5)
    specs = [
        spec("ab", (10, 5), Concat((Read("a"), Read("b")), 0)),
        spec("half", (2, 5), Convert(Slice(Read("a"), 0, 1, 3), "bf16"), "bf16"),
        spec("tied", (10, 5), Concat((Read("a"), Read("b")), 0)),
        spec("one", (1,), Literal("f32", (1,), (2.5,))),
    ]
    seen: list[tuple[int, int]] = []
    backend = InterpretedBackend()
    placement = Placement.of(specs)
    _, at = load_parameters(backend, placement, Checkpoint(a=a, b=b), on_progress=lambda *p: seen.append(p))
    torch.testing.assert_close(backend.tensor(at["ab"], torch.float32, (10, 5)), torch.cat([a, b]))
    torch.testing.assert_close(backend.tensor(at["half"], torch.bfloat16, (2, 5)), a[1:3].bfloat16())
    assert backend.tensor(at["one"], torch.float32, (1,)).item() == 2.5
    assert at["tied"] == at["ab"] and all(address % 256 == 0 for address in at.values())
    assert placement.nbytes == 256 * 3 and seen[-1] == (516, 768)


def test_weights_of_another_model() -> None:
    for recipe in (Read("a"), Concat((Read("a"), Read("a")), 0), Read("b")):
        source = Checkpoint(a=torch.zeros(7, 5), b=torch.zeros(8, 4))
        with pytest.raises(ArtifactError, match=r"w must be \[8, 5\]"):
            load([spec("w", (8, 5), recipe)], source)


def test_packed_layouts_are_refused() -> None:
    with pytest.raises(ArtifactError, match="packed as n16k2"):
        Placement.of([spec("w", (16, 2), Relayout(Read("a"), "n16k2"), "bf16")])


def test_made_up_weights() -> None:
    """Uniform within a thousandth, equal shapes alike, what a recipe adds is added; constants are what they are."""
    specs = [
        spec("w", (64, 64), Read("a")),
        spec("v", (64, 64), Read("b")),
        spec("norm", (64,), Shift(Read("n"), 1.0)),
        spec("one", (1,), Literal("f32", (1,), (2.5,))),
    ]
    backend, _, at = load(specs, Checkpoint(), made_up=True)
    w, v = (backend.tensor(at[n], torch.float32, (64, 64)) for n in "wv")
    assert torch.equal(w, v) and 0.9 * DUMMY_RANGE < w.abs().max().item() <= DUMMY_RANGE
    norm = backend.tensor(at["norm"], torch.float32, (64,))
    assert ((norm - 1).abs() <= 1.01 * DUMMY_RANGE).all()
    assert backend.tensor(at["one"], torch.float32, (1,)).item() == 2.5
    with pytest.raises(ArtifactError, match="cannot be packed as q4_1"):
        load([spec("q", (64, 64), Read("a"), "q4_1")], Checkpoint(), made_up=True)
