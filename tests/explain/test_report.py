"""The report's data: it survives JSON, refuses what is no report, and adds up."""

import json
from dataclasses import replace

import pytest

from compilerllm.explain.report import (
    BucketReport,
    Candidate,
    IRNode,
    Kernel,
    Launch,
    Machine,
    Miss,
    PassRun,
    Pick,
    Report,
    ReportInvalid,
    StepTime,
)

MACHINE = Machine("sm_90", "H200", 4000.0, 750.0, 2.0, "typical of H200")


def make_report() -> Report:
    """One of everything, with a value in every field."""
    launches = (
        Launch(0, 0, 0, 8e6, 1e6, 2.0, 3.0, 2.5, 0.0),
        Launch(1, 1, -1, 4e6, 0.0, 1.0, 2.0),
    )
    step = StepTime(10.0, 9.0, 0.5, 5, {"barriers": 0.5})
    return Report(
        "llama", "ab12", "0.1.0", 2, "bfloat16", 1, MACHINE, ("before", "after"),
        (PassRun("fuse", "fuse", "joins", 0, 1, 1, 0.01, {"main": 1}, {"groups": 2}, (Miss("main", "%y = add(%x)", "no", "m.0"),), ("decode-1",)),),
        (IRNode("%y = linear(%x)", "linear", "main", "m.0.q", 0, ("aten.linear.default",), ("fuse",)), IRNode("%z = add(%y)", "add", "main", "m.0")),
        (Kernel("skinny:linear", "triton", "linear", {"BN": 16}, 4, 1024, True, "ff"), Kernel("library:aten", "library", "aten")),
        (Pick("linear", "M=1", {"BN": 16}, "timed", 2.5, "", (Candidate({"BN": 32}, 3.0), Candidate({"BN": 64}))),),
        (BucketReport("decode-1", "decode", 1, 1, 1, 256, (1, 1, 1, 1), 4096, launches, "sampling-greedy-1", step),),
        ("a note",), {"capture": 1.5},
    )  # fmt: skip


def test_json_and_back() -> None:
    report = make_report()
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.parametrize("entry", [None, [], {}, {"schema": 99}, {"schema": 1}, {"schema": 1, "machine": 3}])
def test_what_is_no_report_is_refused(entry: object) -> None:
    with pytest.raises(ReportInvalid):
        Report.from_json(entry)


def test_a_damaged_report_is_refused() -> None:
    entry = json.loads(json.dumps(make_report().to_json()))
    del entry["buckets"][0]["launches"]["node"]
    with pytest.raises(ReportInvalid, match="damaged"):
        Report.from_json(entry)


def test_roofline_is_the_larger_of_memory_and_compute() -> None:
    assert MACHINE.roofline_us(8e6, 0) == pytest.approx(2.0)  # 8 MB at 4,000 GB/s
    assert MACHINE.roofline_us(8e6, 7.5e9) == pytest.approx(10.0)  # 7.5 GFLOP at 750 TFLOP/s
    assert replace(MACHINE, tflops=0.0).roofline_us(8e6, 1e12) == pytest.approx(2.0)


def test_a_bucket_adds_up_its_launches() -> None:
    bucket = make_report().bucket("decode-1")
    assert (bucket.nbytes, bucket.flops) == (12e6, 1e6)
    assert (bucket.roofline_us, bucket.predicted_us) == (3.0, 5.0)
    assert bucket.measured is not None and bucket.measured.unattributed_share == pytest.approx(0.05)
