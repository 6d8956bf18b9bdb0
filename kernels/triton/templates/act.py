"""Activations of f32 elements by the IR's names; rounding is the caller's business."""

import triton
import triton.language as tl

from .elementwise import gelu, gelu_tanh, relu, sigmoid, silu


@triton.jit
def act(x, ACT: tl.constexpr):
    if ACT == "silu":
        return silu(x)
    elif ACT == "gelu":
        return gelu(x)
    elif ACT == "gelu_tanh":
        return gelu_tanh(x)
    elif ACT == "relu":
        return relu(x)
    elif ACT == "relu2":
        return relu(x) * relu(x)
    elif ACT == "sigmoid":
        return sigmoid(x)
    else:
        tl.static_assert(ACT == "identity", "unknown activation")
        return x
