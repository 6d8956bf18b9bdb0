"""How a probe tells that two pieces of code compute the same: bit for bit in bfloat16, closely in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PROBE_DTYPES = (torch.bfloat16, torch.float32)


def random_sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def equal(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if want.dtype == torch.bfloat16:
        return torch.equal(got, want)
    return torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def attempt(function: Callable[[], Any]) -> Any:
    """A probe's result, or None where the model's code refuses our sample: then nothing is swapped."""
    try:
        return function()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return None
