"""GGUF's block formats, against the ``gguf`` package."""

import pytest
import torch

from compilerllm.ir.types import TensorType
from compilerllm.kernels.reference.errors import ParamMismatch
from compilerllm.kernels.reference.quantized import dequantize, quantize


@pytest.mark.parametrize("dtype", ["q4_0", "q4_1", "q8_0"])
def test_dequantize_equals_gguf(dtype: str) -> None:
    gguf = pytest.importorskip("gguf")
    packed = quantize(torch.randn(6, 96, generator=torch.Generator().manual_seed(0)), dtype)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    want = torch.from_numpy(gguf.quants.dequantize(packed.numpy(), kind))
    torch.testing.assert_close(dequantize(packed, TensorType(dtype, (6, 96))), want, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "error"), [("q4_0", 0.35), ("q4_1", 0.2), ("q8_0", 0.02)])
def test_quantize_is_near(dtype: str, error: float) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).clamp(-2.5, 2.5)
    back = dequantize(quantize(weight, dtype), TensorType(dtype, (8, 64)))
    assert (back - weight).abs().max() < error


def test_wrong_size_names_both() -> None:
    with pytest.raises(ParamMismatch, match=r"q8_0\[2, 32\] takes 68 bytes, but 34 are given"):
        dequantize(torch.zeros(34, dtype=torch.uint8), TensorType("q8_0", (2, 32)))
