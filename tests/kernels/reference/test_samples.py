"""Every op has a reference, and what it gives has the dtype and shape its type rule says (the interpreter checks)."""

import pytest
import torch

from compilerllm.ir.op import all_ops
from compilerllm.ir.text import parse_module
from compilerllm.ir.types import STEP
from compilerllm.kernels.reference import registry
from compilerllm.kernels.reference.collective import ThreadCollective
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.states import Step, allocate_states
from tests.ir.op_samples import ALL, IDS
from tests.kernels.reference.steps import make_step, random_inputs, random_params


def test_every_op_has_a_reference() -> None:
    assert set(registry.all_references()) | registry.STRUCTURAL == set(all_ops())


@pytest.mark.parametrize(("op", "text"), ALL, ids=IDS)
def test_reference_agrees_with_the_type_rule(op: str, text: str) -> None:
    torch.manual_seed(0)
    module = parse_module(text)
    step = make_step([(0, 3), (2, 1), (0, 7)], rows=[0, 4])
    dims = {"T": 11, "S": 3, "R": 2}
    runner = Interpreter(module, random_params(module), collective=ThreadCollective(1).rank(0))
    inputs = random_inputs(module, dims)
    if any(v.type == STEP for v in module.main.inputs):
        states = allocate_states(module, 24, 4, block_size=4)
        for state in states.values():
            state.data.zero_()  # sequence 1 has a context that no step here wrote
        result = runner.run_step(Step(step), states, inputs=inputs)
        assert not result.is_floating_point() or bool(result.isfinite().all())
    else:
        for result in runner.run(*inputs):
            assert op == "full" or not result.is_floating_point() or not bool(result.isnan().any())
