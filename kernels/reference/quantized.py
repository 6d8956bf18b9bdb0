"""GGUF's block formats back to f32: blocks of 32 weights along the last axis, little-endian.

q4_0: f16 scale d, 16 bytes; weight i is d * (nibble - 8). q4_1: f16 d, f16 minimum m; d * nibble + m. q8_0: f16 d, 32
signed bytes; d * code. The low nibble of byte i is weight i, the high nibble weight i + 16.
"""

import torch
from torch import Tensor

from compilerllm.ir.types import QUANTIZED_BLOCKS, TensorType
from compilerllm.kernels.reference.errors import ParamMismatch


def dequantize(packed: Tensor, type: TensorType) -> Tensor:
    """Bytes of blocks, in any shape, to f32 in the type's shape."""
    size, weights = QUANTIZED_BLOCKS[type.dtype]
    shape = tuple(int(extent) for extent in type.shape)
    raw = packed.contiguous().view(torch.uint8).reshape(-1)
    if raw.numel() != int(type.nbytes):
        raise ParamMismatch(f"{type} takes {type.nbytes} bytes, but {raw.numel()} are given")
    blocks = raw.view(-1, size)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    if type.dtype == "q8_0":
        return (scale * blocks[:, 2:].contiguous().view(torch.int8).float()).reshape(shape)
    codes = blocks[:, size - weights // 2 :]
    nibbles = torch.cat((codes & 15, codes >> 4), 1).float()
    if type.dtype == "q4_0":
        return (scale * (nibbles - 8)).reshape(shape)
    return (scale * nibbles + blocks[:, 2:4].contiguous().view(torch.float16).float()).reshape(shape)


def quantize(weight: Tensor, dtype: str) -> Tensor:
    """f32 [..., K] to bytes [..., K / 32 * block], by rounding to nearest; for tests and small experiments."""
    size, weights = QUANTIZED_BLOCKS[dtype]
    groups = weight.float().reshape(-1, weights)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    if dtype == "q4_1":
        scale = ((high - low) / 15).half()
        parts = [scale, low.half()]
        codes = ((groups - low.half().float()) / scale.float().clamp(min=1e-8)).round().clamp(0, 15)
    elif dtype == "q4_0":
        scale = (groups.abs().amax(1, keepdim=True) / 7).half()
        parts = [scale]
        codes = (groups / scale.float().clamp(min=1e-8)).round().clamp(-8, 7) + 8
    else:
        scale = (groups.abs().amax(1, keepdim=True) / 127).half()
        parts = [scale]
        codes = (groups / scale.float().clamp(min=1e-8)).round().clamp(-127, 127)
    head = torch.cat([p.view(torch.uint8) for p in parts], 1)
    if dtype == "q8_0":
        body = codes.to(torch.int8).view(torch.uint8)
    else:
        whole = codes.to(torch.uint8)
        body = whole[:, :16] | (whole[:, 16:] << 4)
    return torch.cat((head, body), 1).reshape(*weight.shape[:-1], weight.shape[-1] // weights * size)
