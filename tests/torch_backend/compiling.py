"""Compile a function, run it beside eager torch, and hand out what was compiled."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compilerllm.torch_backend import CompiledGraph


def compiled(function: Any, **options: Any) -> tuple[Callable[..., Any], list[CompiledGraph]]:
    """The compiled function and the list its graphs go to; a graph break is an error."""
    graphs: list[CompiledGraph] = []
    torch_options: Any = {"on_compile": graphs.append, **options}
    return torch.compile(function, backend="compilerllm", fullgraph=True, options=torch_options), graphs


def assert_same(got: Any, want: Any, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Equal structure; tensors close, of one dtype, shape and stride."""
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    assert pairs
    for a, b in pairs:
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
            assert a.stride() == b.stride() or a.numel() <= 1
        else:
            assert a == b and type(a) is type(b)


def check(
    function: Any, *inputs: Any, level: int = 2, rtol: float | None = None, atol: float | None = None
) -> list[CompiledGraph]:  # fmt: skip
    """Compile, compare with eager, and give the graphs."""
    fast, graphs = compiled(function, level=level)
    assert_same(fast(*inputs), function(*inputs), rtol=rtol, atol=atol)
    return graphs
