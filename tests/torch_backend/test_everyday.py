"""Everyday functions and modules, through the CPU program: each meets something the others do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch_backend.compiling import check, compiled

pytestmark = pytest.mark.usefixtures("unoptimised")


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "gate and add in one group": (lambda x, y, z: F.silu(x) * y + z, [(4, 6)] * 3),
    "reduction that drops its axis": (lambda x, b, c: ((x * 2).sum(-1) * b + c).exp(), [(3, 4, 5), (3, 4), (4,)]),
    "square shapes before and behind": (lambda x, b: (x.exp().mean(-1) * b, x * b), [(4, 4, 4), (4,)]),
    "two reductions": (lambda x: (x.amax(-1) - x.amin(-1)).exp(), [(6, 4, 4)]),
    "constants in the graph": (lambda x: x + torch.tensor([1.0, 2, 3]) * torch.tensor(3.0), [(4, 3)]),
    "rank 0": (lambda x, s: x * s.sum() + s.mean(), [(4, 6), (3,)]),
    "cut and joined": (lambda x, y: torch.cat([x, y * 2], 1)[:, 2:9].reshape(-1, 7) * 1, [(4, 6)] * 2),
    "outer product": (lambda x, y: x[:, :, None] * y[:, None, :], [(4, 6)] * 2),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), [(4, 6)] * 2),
    "lower triangle": (torch.tril, [(5, 5)]),
    "rounding": (lambda x: (x * 2).round() + (x * 0 + 2.5).round() + x.clamp(max=0.3), [(4, 6)]),
    "powers": (lambda x: x.abs() ** 1.5 + 2**x, [(4, 6)]),
    "long and thin": (lambda x: x.sin().sum(-1), [(70000, 3)]),
    "running sums": (lambda x: x.cumsum(1).exp().cumsum(0), [(4, 6)]),
    "largest": (lambda x: torch.topk(x, 3), [(4, 6)]),
    "copies": (lambda x: (x.clone(), x.reshape(24).clone()), [(4, 6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    (graph,) = check(function, *inputs(*shapes), rtol=1e-4, atol=1e-5)
    assert not graph.opaque


def test_whole_numbers() -> None:
    ids = torch.randint(0, 20, (3, 4))
    check(lambda i: ((i * 3 + 1) // 2 % 5, i / 3 + i.float().sqrt(), i > 7), ids)


def test_embedding_and_recurrent_cells() -> None:
    table, cell = nn.Embedding(20, 8), nn.GRUCell(8, 12)
    check(
        lambda i, h: cell(table(i) * 2, h),
        torch.randint(0, 20, (3,)),
        torch.randn(3, 12),
        rtol=1e-4,
        atol=1e-5,
    )


def test_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    (graph,) = check(layer, torch.randn(2, 5, 32), rtol=1e-4, atol=1e-4)
    assert {"linear_act", "add_layer_norm"} <= {n.op for n in graph.module.main.nodes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_perceptron_is_packed(dtype: torch.dtype) -> None:
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2)
    (graph,) = check(SwiGlu().to(dtype), torch.randn(2, 5, 32, dtype=dtype), rtol=rtol, atol=atol)
    assert {"linear_gated", "linear_add"} <= {n.op for n in graph.module.main.nodes}


def test_double_precision() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 7)).double()
    check(model, torch.randn(3, 32, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_convolutions_run_through_torch_between_our_kernels() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    ).eval()  # fmt: skip
    fast, graphs = compiled(model, fallback=True)
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert set(graphs[0].opaque) == {"aten.convolution.default", "aten.max_pool2d_with_indices.default"}
    assert graphs[0].groups > 0


def test_results_never_share_memory_with_inputs() -> None:
    for level in (0, 2):
        torch._dynamo.reset()
        fast, _ = compiled(lambda x: (x.clone(), x.clone()), level=level)
        x = torch.rand(4)
        a, b = fast(x)
        assert len({t.data_ptr() for t in (a, b, x)}) == 3
