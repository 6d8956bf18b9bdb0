"""Specialising to a bucket, and memory plans: nothing that lives together overlaps, and dead bytes are used again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compilerllm.ir.builder import Builder
from compilerllm.ir.graph import FuncRef, Graph, Module, Value
from compilerllm.ir.step import Bucket
from compilerllm.ir.types import TensorType
from compilerllm.ir.verify import verify
from compilerllm.passes.errors import BadPlan, PassError
from compilerllm.passes.pipeline import run_pipeline
from compilerllm.passes.plan_memory import ALIGNMENT, Frame, Life, MemoryPlan, Slot, plan_memory
from compilerllm.passes.specialize import specialize
from compilerllm.validation.weights import checkpoint
from tests.passes.captured import Decoder
from tests.passes.running import SEQUENCES, Served

BUCKET = Bucket(tokens=8, sequences=4, rows=4, max_query=8)


def views(module: Module) -> dict[Value, Value]:
    return {n.output: n.operands[0] for g in module.functions.values() for n in g.nodes if n.op == "reshape"}


def test_one_token_step_runs_specialised() -> None:
    module = Decoder(dtype="f32").module()
    tensors = checkpoint(module)
    served, _ = run_pipeline(module)
    one = specialize(served, Bucket(1, 1, 1, 1))
    verify(one)
    assert [d.name for d in one.functions["layer"].dims] == []
    assert [d.name for d in one.main.dims] == ["R"]
    want, got = Served(served, tensors, 1), Served(one, tensors, 1)
    for token in SEQUENCES[0]:
        assert torch.equal(want.step([[token]]), got.step([[token]]))


def test_bounds_of_a_larger_bucket() -> None:
    served, _ = run_pipeline(Decoder().module())
    fitted = specialize(served, Bucket(16, 8, 8, 16))
    assert [(d.name, d.low, d.high) for d in fitted.main.dims] == [("T", 1, 16), ("S", 1, 8), ("R", 0, 8)]
    assert fitted.main.nodes is served.main.nodes, "nothing but bounds changes"
    with pytest.raises(PassError, match=r"T in \[1, 4096\] has no value"):
        specialize(served, Bucket(0, 1, 1, 1))


def test_plan_of_a_decoder() -> None:
    module, _ = run_pipeline(Decoder().module())
    plan = plan_memory(module, BUCKET, views(module))
    plan.check()
    layer, main = plan.frames["layer"], plan.frames["main"]
    assert set(layer.results.values()) == {0, 1}, "both results are written where main keeps them"
    calls = [n for n in module.main.nodes if n.op == "call"]
    for call in calls:
        alive = [main.slots[v] for v in (*call.operands, *call.outputs) if v in main.slots]
        assert main.call_base[call] >= max(s.end for s in alive)
    assert plan.total == max(main.bytes, *(main.call_base[c] + layer.total for c in calls))
    attention = next(n for n in module.functions["layer"].nodes if n.op == "paged_attention")
    view = next(n for n in module.functions["layer"].nodes if n.op == "reshape")
    assert layer.slots[view.output] == layer.slots[attention.output]
    made = sum(s.bytes for v, s in layer.slots.items() if v not in layer.alias_of)
    assert layer.bytes < made, "dead values' bytes are used again"


def test_a_bad_plan_is_told() -> None:
    a, b = (Value(n, TensorType("f32", (4,))) for n in "ab")
    slots = {a: Slot(0, 128), b: Slot(64, 64)}

    def plan(lives: dict[Value, Life], slots: dict[Value, Slot] = slots) -> MemoryPlan:
        frame = Frame(slots, {}, {}, 128, 128, lives, {})
        return MemoryPlan({"f": frame}, 128)

    plan({a: Life(0, 1), b: Life(2, 3)}).check()
    with pytest.raises(BadPlan, match="@f: %a and %b live together"):
        plan({a: Life(0, 2), b: Life(2, 3)}).check()
    with pytest.raises(BadPlan, match="%a is not aligned to 64"):
        plan({a: Life(0, 1)}, {a: Slot(8, 64)}).check()


@st.composite
def programs(draw: st.DrawFn) -> tuple[Module, dict[Value, Value]]:
    """A main that calls a function now and then; values are used at random, some are views or in place."""
    alias: dict[Value, Value] = {}

    def body(b: Builder, values: list[Value], call: Graph | None) -> Value:
        for _ in range(draw(st.integers(1, 12))):
            x = draw(st.sampled_from(values))
            kind = draw(st.sampled_from(["neg", "wide", "reshape", "call" if call else "neg"]))
            if kind == "call" and call is not None:
                given = x if x.type == call.inputs[0].type else values[0]
                values.append(b.emit("call", given, types=[call.outputs[0].tensor], fn=FuncRef(call.name)))
            elif kind == "wide":
                values.append(b.emit("concat", x, x, axis=1))
            elif kind == "reshape":
                values.append(b.emit("reshape", x, shape=(x.shape[0] * x.shape[1],)))
                alias[values[-1]] = x
                values[-1] = b.emit("reshape", values[-1], shape=x.shape)
                alias[values[-1]] = b._nodes[-1].operands[0]
            else:
                values.append(b.emit("neg", x))
        return draw(st.sampled_from(values[1:]))

    type = TensorType("f32", (Decoder().module().main.inputs[0].shape[1], 4))
    inner = Builder("inner")
    inner.dim("T", 1, 64)
    first = inner.input("x", type)
    body_values = [first]
    body(inner, body_values, None)
    inner_graph = inner.finish(next((v for v in reversed(body_values) if v.type == type), first))
    outer = Builder("main")
    outer.dim("T", 1, 64)
    result = body(outer, [outer.input("x", type)], inner_graph)
    return Module({"main": outer.finish(result), "inner": inner_graph}), alias


@settings(max_examples=60, deadline=None)
@given(programs())
def test_no_two_live_values_overlap(made: tuple[Module, dict[Value, Value]]) -> None:
    """Checked against the plan's own lives, and by running the bytes: no value is overwritten before its last use."""
    module, alias = made
    plan = plan_memory(module, BUCKET, alias)
    plan.check()
    main, frame = module.main, plan.frames["main"]
    owner: dict[int, Value] = {}
    for node in main.nodes:
        for value in node.operands:
            if value in frame.slots:
                slot = frame.slots[value]
                root = frame.alias_of.get(value, value)
                assert all(owner[byte] is root for byte in range(slot.offset, slot.end, ALIGNMENT))
        if node in frame.call_base:
            callee = plan.frames[node.fn]
            for byte in range(frame.call_base[node], frame.call_base[node] + callee.total, ALIGNMENT):
                owner.pop(byte, None)
        for value in node.outputs:
            if value in frame.slots and value not in frame.alias_of:
                slot = frame.slots[value]
                owner.update(dict.fromkeys(range(slot.offset, slot.end, ALIGNMENT), value))
    for value in main.outputs:
        if value in frame.slots:
            root = frame.alias_of.get(value, value)
            assert all(
                owner[b] is root for b in range(frame.slots[value].offset, frame.slots[value].end, ALIGNMENT)
            )
    assert all(s.end <= plan.total for s in frame.slots.values())
