"""Small modules as whole CPU programs: what passes, code generation, packing and launch do together."""

from pathlib import Path

import pytest
import torch

from tests.kernels.cpu.program import run_text

# 3 rows do not fill a tile; 48 columns are three panels of 16.
MLP = """
func @main(%x: {dtype}[T, 64]) {{
  dim T in [1, 16]
  param %norm : {dtype}[64]
  param %gate : {dtype}[48, 64]
  param %down : {dtype}[64, 48]
  %n = rms_norm(%x, %norm, eps=1e-05) : {dtype}[T, 64]
  %g = linear(%n, %gate) : {dtype}[T, 48]
  %a = silu(%g) : {dtype}[T, 48]
  %d = linear(%a, %down) : {dtype}[T, 64]
  %y = add(%x, %d) : {dtype}[T, 64]
  return %y
}}
"""
TOLERANCE = {"f32": 2e-5, "bf16": 2e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, so that the part of a library that every program shares is compiled once."""
    return tmp_path_factory.mktemp("libraries")


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_mlp(dtype: str, fuse: bool, folder: Path) -> None:
    outcome = run_text(MLP.format(dtype=dtype), folder, T=3, fuse=fuse)
    scale = outcome.want[0].float().abs().max()
    worst = (outcome.got[0].float() - outcome.want[0].float()).abs().max()
    assert worst <= TOLERANCE[dtype] * scale
    assert len(outcome.kernels) == (3 if fuse else 5)


def test_pointwise_neighbours_are_one_loop(folder: Path) -> None:
    text = """
func @main(%x: f32[T, 33], %m: f32[T, 33]) {
  dim T in [1, 16]
  %a = exp(%x) : f32[T, 33]
  %b = add(%a, %m) : f32[T, 33]
  %c = tanh(%b) : f32[T, 33]
  return %c
}
"""
    outcome = run_text(text, folder, T=5)
    torch.testing.assert_close(outcome.got[0], outcome.want[0], rtol=1e-5, atol=1e-6)
    assert len(outcome.kernels) == 1
