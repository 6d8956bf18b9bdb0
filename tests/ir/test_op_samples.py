"""Every op of the registry: its samples parse, verify, print back, and have a cost."""

import pytest

from compilerllm.ir.dims import free_dims
from compilerllm.ir.op import all_ops, lookup
from compilerllm.ir.text import parse_module, print_module
from compilerllm.ir.verify import verify
from tests.ir.equality import facts
from tests.ir.op_samples import ALL, IDS, SAMPLES


def test_every_op_has_a_sample() -> None:
    assert set(SAMPLES) == set(all_ops())


def test_every_attribute_of_every_op_is_in_a_sample() -> None:
    used = {(op, a) for op, text in ALL for n in parse_module(text).main.nodes if n.op == op for a in n.attrs}
    declared = {(op, a.rstrip("?")) for op, entry in all_ops().items() for a in entry.attrs}
    rare = {  # shared with another op of the same rule, which has a sample
        ("rotary_table", "scaling"), ("layer_norm", "round_first"), ("add_layer_norm", "round_first"),
        ("iota", "dtype"), ("call", "states"), ("qkv_rope_write", "half_width"), ("qkv_rope_write", "f32"),
        ("qkv_rope_write", "offset"), ("qkv_rope_write", "round_first"), ("logical_and", "scalar"),
        ("logical_and", "reverse"), ("logical_or", "scalar"), ("logical_or", "reverse"),
    }  # fmt: skip
    assert declared - used == rare


@pytest.mark.parametrize(("op", "text"), ALL, ids=IDS)
def test_sample_verifies_and_prints_back(op: str, text: str) -> None:
    module = parse_module(text)
    verify(module)
    assert facts(parse_module(print_module(module))) == facts(module)
    node = next(n for n in module.main.nodes if n.op == op)
    cost = lookup(op).cost(node)
    assert free_dims(cost.bytes) <= {"T", "S", "R"} and free_dims(cost.flops) <= {"T", "S", "R", "C"}
