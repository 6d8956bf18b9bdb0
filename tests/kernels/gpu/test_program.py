"""A program goes into the artifact and comes back the same."""

import json
from dataclasses import replace

import pytest

from compilerllm.ir.step import Bucket
from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.gpu.program import Cost, Extent, Kernel, Launch, Plan, Pointer, Program

KERNEL = Kernel(
    "a", "key", "m:a", ("*bf16", "i32", "fp32", "i1"), 8, 64, True, (("EPS", 1e-6), ("ACT", None)), (0,)
)


def test_round_trip() -> None:
    """Numbers keep their types, plans their variants; equal arguments of several launches are written once."""
    args = (Pointer("param", "w", 16), Extent("T", 4, 2, -1, 3), 1.0, True)
    one = Launch(0, (Extent("S"), 1, 1), args, "%1 = linear", Cost(8.0, 2.0))
    other = Launch(0, (1, 2, 3), (*args[:2], 0.5, 1), "%2 = linear")
    plan = Plan(Bucket(4, 4, 4, 1), 512, (one, other, one))
    program = Program((KERNEL,), (plan, replace(plan, variant="greedy")), 7)
    entry = json.loads(json.dumps(program.to_json()))
    back = Program.from_json(entry)
    assert back == program
    types = [[type(a) for a in x.args] for x in back.plans[0].launches]
    assert types == [[type(a) for a in x.args] for x in plan.launches]
    assert len(entry["nodes"]) == len(entry["costs"]) == 2


def test_other_launch_abi() -> None:
    with pytest.raises(ArtifactError, match="launch ABI is None, this version runs 1"):
        Program.from_json({})
