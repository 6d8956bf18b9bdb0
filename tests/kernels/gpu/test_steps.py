"""Step inputs as they lie on the device: the step's own, then padding, whatever the buffers held before."""

import numpy as np
import pytest
import torch

from compilerllm.ir.step import Bucket, Int32, StepInputs
from compilerllm.kernels.launch.gpu.program import StepLayout
from compilerllm.kernels.launch.gpu.steps import StepRefused, StepStage
from compilerllm.kernels.triton.interpreted_backend import InterpretedBackend

BUCKETS = (Bucket(8, 4, 3, 8), Bucket(2, 2, 2, 1))
STALE = -7


def ints(*values: int) -> Int32:
    return np.array(values, np.int32)


def make_stage(groups: int) -> tuple[StepStage, InterpretedBackend]:
    """A stage whose buffers hold stale numbers."""
    backend = InterpretedBackend()
    stage = StepStage(backend, BUCKETS, groups, 4)
    for words in stage._arrays:
        words[:] = STALE
    return stage, backend


def make_step(groups: int) -> StepInputs:
    tables = np.arange(groups * 2 * 3, dtype=np.int32).reshape(groups, 2, 3)
    return StepInputs(
        token_ids=ints(5, -2, 6), positions=ints(10, 3, 4), query_start=ints(0, 1, 3), seq_lens=ints(11, 5),
        block_tables=tables, slots=ints(3, 1), sample_rows=ints(2), adapter_id=ints(0, 1, 1),
    )  # fmt: skip


def field(stage: StepStage, bucket: int, name: str, count: int) -> list[int]:
    start = stage.offsets(bucket)[name]
    numbers: list[int] = stage.memory[start : start + 4 * count].view(torch.int32).tolist()
    return numbers


@pytest.mark.parametrize("groups", [1, 2])
def test_padded_to_the_bucket(groups: int) -> None:
    stage, backend = make_stage(groups)
    step = make_step(groups)
    stage.send(0, step, ints(1), (8, 4, 3))
    backend.synchronize()
    expected = {
        "meta": [3, 2, 1, 3], "token_ids": [5, -2, 6, 0, 0, 0, 0, 0], "positions": [10, 3, 4, 0, 0, 0, 0, 0],
        "query_start": [0, 1, 3, 3, 3], "seq_lens": [11, 5, 0, 0], "slots": [3, 1, -1, -1], "sample_rows": [2, 0, 0],
        "adapter_id": [0, 1, 1, 0, 0, 0, 0, 0], "row_slots": [1, -1, -1], "table_0": [0, 1, 2, 3, 4, 5],
    }  # fmt: skip
    if groups == 2:
        expected["table_1"] = [6, 7, 8, 9, 10, 11]
    for name, values in expected.items():
        assert field(stage, 0, name, len(values)) == values, name


def test_exact_sizes_have_no_padding() -> None:
    stage, backend = make_stage(1)
    stage.send(0, make_step(1), None, (3, 2, 1))
    backend.synchronize()
    assert field(stage, 0, "token_ids", 4) == [5, -2, 6, STALE]
    assert field(stage, 0, "query_start", 4) == [0, 1, 3, STALE]
    assert field(stage, 0, "row_slots", 2) == [-1, STALE]


def test_empty_step_and_late_row_slots() -> None:
    stage, backend = make_stage(1)
    stage.send_empty(1, (2, 2, 2))
    stage.send_row_slots(1, ints(4), 2)
    backend.synchronize()
    expected = {
        "meta": [0, 0, 0, 1], "token_ids": [0, 0], "query_start": [0, 0, 0], "seq_lens": [0, 0], "slots": [-1, -1],
        "row_slots": [4, -1],
    }  # fmt: skip
    for name, values in expected.items():
        assert field(stage, 1, name, len(values)) == values, name


def test_copies_no_more_than_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and the rows of real sequences, in one piece."""
    stage, backend = make_stage(1)
    sent: list[int] = []
    monkeypatch.setattr(backend, "upload", lambda target, source, nbytes: sent.append(nbytes))
    stage.send(0, make_step(1), ints(1), (8, 4, 3))
    assert sent == [StepLayout.of(BUCKETS[0], 1, 4).offsets["table_0"] + 2 * 3 * 4]


def test_tables_of_another_program() -> None:
    stage, _ = make_stage(2)
    with pytest.raises(StepRefused, match="1 block tables of 3 blocks; the program has 2 of at most 4"):
        stage.send(0, make_step(1), None, (8, 4, 3))
