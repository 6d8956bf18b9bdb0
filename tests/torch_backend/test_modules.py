"""Three modules that are no language models: fused groups, and the numbers of eager torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch_backend.compiling import assert_same, check, compiled

pytestmark = pytest.mark.usefixtures("unoptimised")


class MixerBlock(nn.Module):
    """MLP-Mixer: a perceptron over patches, then one over channels."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norm_patches, self.norm_channels = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.patches = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(channels, 3 * channels), nn.GELU(), nn.Linear(3 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.norm_patches(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.channels(self.norm_channels(x))
        return result


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MixerBlock(12, 32) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.norm(self.blocks(x)).mean(1))
        return F.log_softmax(scores, -1)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 48))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        code = torch.tanh(self.encoder(x)) * 2.0
        back = torch.sigmoid(self.decoder(code))
        return code, back, ((back - x) ** 2).mean(-1)


def lennard_jones(distance: Tensor, depth: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Energy and force of pairs of atoms, cut off at 2.5 widths."""
    ratio = width / distance.clamp(min=0.5)
    sixth = ratio**6
    energy = 4 * depth * (sixth * sixth - sixth)
    force = 24 * depth * (2 * sixth * sixth - sixth) / distance.clamp(min=0.5)
    near = distance < 2.5 * width
    return torch.where(near, energy, 0.0), torch.where(near, force, torch.zeros_like(force))


class Scaler(nn.Module):
    """Robust scaling of features: missing numbers replaced, logarithms, clipped scores."""

    median: Tensor
    spread: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("median", torch.rand(7))
        self.register_buffer("spread", torch.rand(7) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        filled = torch.where(torch.isnan(x), self.median, x)
        squeezed = torch.sign(filled) * torch.log1p(filled.abs())
        scores = ((squeezed - self.median) / self.spread).clamp(-3, 3)
        return scores / (scores.square().sum(-1, keepdim=True).sqrt() + 1e-6)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_mixer(level: int) -> None:
    (graph,) = check(Mixer().eval(), torch.randn(3, 12, 32), level=level, rtol=1e-4, atol=1e-5)
    assert not graph.opaque and (level == 0 or graph.groups > 0)


def test_mixer_fuses_its_perceptrons() -> None:
    (graph,) = check(Mixer().eval(), torch.randn(3, 12, 32), rtol=1e-4, atol=1e-5)
    ops = [n.op for n in graph.module.main.nodes]
    assert ops.count("linear_act") == 4 and ops.count("linear_add") + ops.count("add_layer_norm") == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autoencoder(dtype: torch.dtype) -> None:
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2)
    model = Autoencoder().eval().to(dtype)
    (graph,) = check(model, torch.rand(5, 48, dtype=dtype), rtol=rtol, atol=atol)
    assert graph.groups > 0 and not graph.opaque


def test_physics() -> None:
    distance, depth, width = torch.rand(6, 40) * 4 + 0.1, torch.rand(40), torch.rand(1) + 0.5
    (graph,) = check(lennard_jones, distance, depth, width, rtol=1e-4, atol=1e-4)
    assert graph.groups > 0 and not graph.opaque


def test_physics_in_double() -> None:
    distance, depth, width = (
        t.double() for t in (torch.rand(6, 40) * 4 + 0.1, torch.rand(40), torch.rand(1) + 0.5)
    )
    (graph,) = check(lennard_jones, distance, depth, width, rtol=1e-12, atol=1e-12)
    assert graph.groups > 0


def test_scaler() -> None:
    x = torch.randn(50, 7) * 20
    x[3, 2] = x[9, 0] = float("nan")
    (graph,) = check(Scaler(), x)
    assert graph.groups > 0 and not graph.opaque


def test_dynamic_batch_compiles_once() -> None:
    model = Autoencoder().eval()
    fast, graphs = compiled(model)
    for batch in (5, 2, 33, 7):
        x = torch.rand(batch, 48)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1 and [d.name for d in graphs[0].module.main.dims] == ["T0"]
