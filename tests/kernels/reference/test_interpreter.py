"""The interpreter: dims, calls under prefixes, groups, packed weights, what it refuses, several ranks."""

import threading

import pytest
import torch
from torch import Tensor

from compilerllm.ir.text import parse_module
from compilerllm.kernels.reference import errors
from compilerllm.kernels.reference.collective import ThreadCollective
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.quantized import dequantize, quantize


def test_call_binds_params_under_its_prefix() -> None:
    module = parse_module("""
        func @main(%x: f32[T, 4]) {
          dim T in [1, 8]
          param %top : f32[4]
          %a = call(%x, fn=@layer, params="layers.0") : f32[T, 4]
          %b = call(%a, fn=@layer, params="layers.1") : f32[T, 4]
          %c = mul(%b, %top) : f32[T, 4]
          return %c, %a
        }
        func @layer(%x: f32[N, 4]) {
          dim N in [1, 8]
          param %w : f32[4]
          %y = group(%x, %w, fn=@fused) : f32[N, 4]
          return %y
        }
        func @fused(%x: f32[M, 4], %w: f32[4]) {
          dim M in [1, 8]
          %y = add(%x, %w) : f32[M, 4]
          %z = square(%y) : f32[M, 4]
          return %z
        }
    """)
    params = {"top": torch.full((4,), 2.0), "layers.0.w": torch.ones(4), "layers.1.w": torch.full((4,), 3.0)}
    x = torch.rand(3, 4)
    c, a = Interpreter(module, params).run(x)
    torch.testing.assert_close(a, (x + 1) ** 2)
    torch.testing.assert_close(c, ((x + 1) ** 2 + 3) ** 2 * 2)


def test_dims_are_solved_from_linear_extents() -> None:
    module = parse_module("""
        func @main(%x: f32[2*T + 1], %y: f32[FloorDiv(S, 2), S]) {
          dim T in [0, 100]
          dim S in [0, 100]
          %i = iota(size=T) : i64[T]
          return %i
        }
    """)
    runner = Interpreter(module, {})
    assert runner.run(torch.zeros(9), torch.zeros(2, 5))[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(errors.UnboundDim, match=r"no T gives 2\*T \+ 1 = 8"):
        runner.run(torch.zeros(8), torch.zeros(2, 5))
    with pytest.raises(errors.UnboundDim, match="an axis of 3, not 2"):
        runner.run(torch.zeros(9), torch.zeros(3, 5))


_LINEAR = """
    func @main(%x: f32[T, 32]) {
      dim T in [1, 8]
      param %w : q4_1[6, 32]
      %y = linear(%x, %w) : f32[T, 6]
      return %y
    }
"""


def test_packed_weight_is_dequantised() -> None:
    module, weight, x = parse_module(_LINEAR), torch.randn(6, 32), torch.rand(3, 32)
    packed = quantize(weight, "q4_1")
    (got,) = Interpreter(module, {"w": packed}).run(x)
    torch.testing.assert_close(got, x @ dequantize(packed, module.main.params[0].value.tensor).T)


def test_refusals_say_what_and_where() -> None:
    module = parse_module(_LINEAR)
    with pytest.raises(errors.MissingParam, match=r"parameter w : q4_1\[6, 32\] is not given"):
        Interpreter(module, {})
    with pytest.raises(errors.ParamMismatch, match=r"takes 120 bytes, but torch.uint8 \[6, 10\] is given"):
        Interpreter(module, {"w": torch.zeros(6, 10, dtype=torch.uint8)})
    runner = Interpreter(module, {"w": torch.zeros(6, 20, dtype=torch.uint8)})
    with pytest.raises(errors.UnboundDim, match=r"T is 9, outside \[1, 8\]"):
        runner.run(torch.zeros(9, 32))
    with pytest.raises(errors.UnboundDim, match="takes 1 inputs, not 2"):
        runner.run(torch.zeros(1, 32), torch.zeros(1, 32))
    wrong = parse_module("""
        func @main(%x: f32[T, 4]) {
          dim T in [1, 8]
          %y = aten(%x, target="aten.neg.default", args=["%0"]) : bf16[T, 4]
          return %y
        }
    """)
    with pytest.raises(
        errors.ResultMismatch, match=r"%y = aten\(%x\) gives torch.float32 \[2, 4\], but %y is bf16"
    ):
        Interpreter(wrong, {}).run(torch.zeros(2, 4))
    unknown = parse_module("""
        func @main(%x: f32[4]) {
          %y = aten(%x, target="nowhere.nothing.default", args=["%0"]) : f32[4]
          return %y
        }
    """)
    with pytest.raises(errors.MissingReference, match=r"no operator 'nowhere.nothing.default'"):
        Interpreter(unknown, {}).run(torch.zeros(4))


def test_two_ranks_reassemble_a_sharded_linear() -> None:
    module = parse_module("""
        func @main(%x: f32[T, 4]) {
          dim T in [1, 8]
          param %w : f32[6, 4]
          %y = linear(%x, %w) : f32[T, 6]
          %z = all_reduce(%y, axis="tp") : f32[T, 6]
          return %z
        }
    """)
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    mesh = ThreadCollective(2, timeout=20)
    got: list[Tensor] = [torch.empty(0), torch.empty(0)]

    def rank(index: int) -> None:
        columns = slice(4 * index, 4 * index + 4)
        runner = Interpreter(module, {"w": weight[:, columns].clone()}, collective=mesh.rank(index))
        (got[index],) = runner.run(x[:, columns].clone())

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(*got)
    torch.testing.assert_close(got[0], x @ weight.T)
    with pytest.raises(errors.NoCollective, match="all_reduce over 'tp'"):
        Interpreter(module, {"w": weight[:, :4].clone()}).run(x[:, :4].clone())
