"""The backend's contract with torch.compile: options, errors, weights that change, strides, mutation, fallback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from compilerllm.ir.text import parse_module
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.torch_backend import BackendOptions, CannotLower, InvalidOption, TrainingNotSupported
from tests.torch_backend.compiling import assert_same, check, compiled

pytestmark = pytest.mark.usefixtures("unoptimised")


def failure(function: Any, *inputs: Any, **options: Any) -> Exception:
    """What the backend raised, out of torch's wrapper."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(function, **options)[0](*inputs)
    inner = caught.value.inner_exception
    assert isinstance(inner, Exception) and str(inner) in str(caught.value)
    return inner


def test_torch_lists_the_backend() -> None:
    assert "compilerllm" in torch._dynamo.list_backends()


def bessel(x: Tensor) -> Tensor:
    result: Tensor = torch.special.bessel_j0(x.sin()) + 1
    return result


def test_an_operator_that_cannot_be_lowered_is_named_with_its_line() -> None:
    error = failure(bessel, torch.rand(4))
    assert isinstance(error, CannotLower)
    assert "aten.special_bessel_j0.default" in str(error)
    assert (
        "test_backend.py" in str(error)
        and "bessel_j0(x.sin())" in str(error)
        and "'fallback': True" in str(error)
    )


def test_a_module_is_named_too() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.conv(x)
            return result

    assert "in L['self'].conv" in str(failure(Pool(), torch.rand(1, 2, 9)))


@pytest.mark.parametrize("level", [0, 2])
def test_fallback_runs_it_through_torch(level: int) -> None:
    fast, graphs = compiled(bessel, fallback=True, level=level)
    x = torch.rand(3, 4)
    assert_same(fast(x), bessel(x))
    assert graphs[0].opaque == {"aten.special_bessel_j0.default": 1}


def test_training_graphs_are_refused() -> None:
    with torch.enable_grad():
        error = failure(nn.Linear(4, 4), torch.rand(2, 4))
    assert isinstance(error, TrainingNotSupported) and "torch.no_grad()" in str(error)


@pytest.mark.parametrize(("options", "message"), [
    ({"levle": 1}, "option 'levle' is unknown; backend 'compilerllm' takes dump_ir, fallback, level, on_compile"),
    ({"level": 7}, "'level' must be one of 0, 1, 2, 3, but is 7"),
    ({"fallback": "yes"}, "'fallback' must be True or False, but is 'yes'"),
    ({"dump_ir": 3}, "'dump_ir' must be a folder, but is 3"),
])  # fmt: skip
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        BackendOptions.parse(options)


def test_float16_is_refused_on_cpu_and_runs_at_level_0() -> None:
    x = torch.rand(3, 4, dtype=torch.float16)
    error = failure(lambda t: t.sin() + 1, x)
    assert isinstance(error, UnsupportedByTarget) and "f16" in str(error)
    torch._dynamo.reset()
    check(lambda t: t.sin() + 1, x, level=0)


def test_dump_ir_writes_what_changed(tmp_path: Path) -> None:
    fast, _ = compiled(lambda x: (x.sin() * 2 + 1).tanh(), dump_ir=str(tmp_path))
    fast(torch.rand(3, 4))
    names = sorted(p.name for p in (tmp_path / "graph_0").iterdir())
    assert names[0] == "00_input.ir" and names[-1].endswith("_fuse_pointwise.ir")
    assert "group_0" in parse_module((tmp_path / "graph_0" / names[-1]).read_text()).functions


def test_weights_written_in_place_are_packed_again() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.rand(5, 16)
    fast, graphs = compiled(model)
    assert_same(fast(x), model(x), rtol=1e-4, atol=1e-5)
    model.get_parameter("0.weight").mul_(2)
    assert_same(fast(x), model(x), rtol=1e-4, atol=1e-5)
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
    assert_same(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


def test_a_weight_that_is_an_argument_may_be_another_each_time() -> None:
    fast, _ = compiled(torch.nn.functional.linear)
    x = torch.rand(3, 16)
    for _ in range(4):
        weight = torch.randn(8, 16)
        assert_same(fast(x, weight), torch.nn.functional.linear(x, weight), rtol=1e-4, atol=1e-5)
        del weight


def test_products_of_activations() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    # Eager's strides are those of its flash kernel, not of the products it stands for.
    fast, _ = compiled(attend)
    torch.testing.assert_close(fast(q, k, v), attend(q, k, v), rtol=1e-4, atol=1e-5)
    check(
        lambda a, b: (a @ b).relu() + a.cumsum(0), torch.randn(5, 5), torch.randn(5, 5), rtol=1e-4, atol=1e-5
    )


def test_inputs_need_not_be_contiguous_and_results_have_eagers_strides() -> None:
    x = torch.rand(4, 6, 5).permute(2, 0, 1)
    check(lambda t: (t * 2).exp(), x)
    check(lambda t: (t + 1, t.transpose(0, 1) * 3, t.sum(0)), x)


def test_an_input_can_be_written() -> None:
    def step(x: Tensor, state: Tensor) -> Tensor:
        state.mul_(0.9).add_(x)
        return state * 2

    fast, _ = compiled(step)
    x = torch.rand(4, 5)
    mine, eager = torch.ones(4, 5), torch.ones(4, 5)
    for _ in range(3):
        assert_same(fast(x, mine), step(x, eager))
        assert_same(mine, eager)


def test_results_of_every_kind() -> None:
    def several(x: Tensor) -> tuple[Tensor, int, Tensor, Tensor, None]:
        return x.argmax(-1), x.shape[0] + 2, x > 0.5, x, None

    fast, _ = compiled(several)
    for rows in (3, 8):
        x = torch.rand(rows, 6)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same(fast(x), several(x))


def test_graph_breaks_make_several_graphs() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        return y.cos() * 2

    graphs: list[Any] = []
    fast = torch.compile(broken, backend="compilerllm", options={"on_compile": graphs.append})
    x = torch.rand(3)
    assert_same(fast(x), broken(x))
    assert len(graphs) == 2


_POINTWISE: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "expm1": (torch.expm1, -2, 2), "ceil": (torch.ceil, -3, 3), "trunc": (torch.trunc, -3, 3), "tan": (torch.tan, -1, 1),
    "sinh": (torch.sinh, -3, 3), "cosh": (torch.cosh, -3, 3), "log2": (torch.log2, 0.1, 9), "log10": (torch.log10, 0.1, 9),
    "exp2": (torch.exp2, -4, 4), "elu": (torch.nn.functional.elu, -3, 3), "mish": (torch.nn.functional.mish, -3, 3),
    "leaky_relu": (torch.nn.functional.leaky_relu, -3, 3), "softplus": (torch.nn.functional.softplus, -3, 25),
    "hardswish": (torch.nn.functional.hardswish, -5, 5), "sign": (torch.sign, -2, 2), "relu6": (torch.nn.functional.relu6, -2, 9),
    "silu": (torch.nn.functional.silu, -9, 9), "erf": (torch.erf, -3, 3), "logit": (torch.logit, 0.1, 0.9),
}  # fmt: skip


def test_pointwise_functions() -> None:
    def all_of_them(*xs: Tensor) -> list[Tensor]:
        return [function(x) for (function, _, _), x in zip(_POINTWISE.values(), xs, strict=True)]

    xs = [torch.linspace(low, high, 101) for _, low, high in _POINTWISE.values()]
    fast, _ = compiled(all_of_them)
    for name, got, want in zip(_POINTWISE, fast(*xs), all_of_them(*xs), strict=True):
        assert torch.allclose(got, want, rtol=2e-6, atol=2e-6), f"{name} is off by {(got - want).abs().max()}"


def test_reductions_over_any_axes() -> None:
    def reduce(x: Tensor) -> list[Tensor]:
        return [
            x.sum(), x.mean(), x.sum(0), x.mean((0, 2), keepdim=True), x.amax(1), x.amin((0, 1)), x.var(0), x.std((1, 2)),
            x.argmax(1), x.softmax(0), x.log_softmax(1), (x > 0.5).any(1), (x > 0.1).all(-1), x.prod(1),
        ]  # fmt: skip

    check(reduce, torch.rand(3, 4, 5), rtol=1e-5, atol=1e-6)


def test_norms() -> None:
    batch = nn.BatchNorm1d(6).eval()
    batch.get_buffer("running_mean").uniform_()
    batch.get_buffer("running_var").uniform_(0.5, 2)
    group, layer = nn.GroupNorm(2, 6), nn.LayerNorm((6, 4))
    check(lambda x: (batch(x), group(x), layer(x)), torch.randn(3, 6, 4), rtol=1e-4, atol=1e-5)
