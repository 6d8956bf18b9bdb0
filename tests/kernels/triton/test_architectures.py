"""Whole tiny models as CUDA programs, run in Triton's interpreter, against the reference node by node in float32.

Every kernel family meets every architecture's graph here: two sequences of different length, prefill in a padded
bucket with stale rows, then two steps of decoding.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from compilerllm.cuda_artifact import flat_module, prepare_bucket
from compilerllm.ir.step import Bucket, StepInputs
from compilerllm.kernels.triton.emit import draft_program
from compilerllm.kernels.triton.target import TARGETS
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.validation.weights import bind
from tests.kernels.triton.harness import Machine
from tests.models.tiny import MORE, OPAQUE, TINY, captured, tiny_model
from tests.passes.running import Served

MIXED, DECODE = Bucket(16, 3, 16, 16), Bucket(4, 4, 4, 1)
CHUNKS = (([3, 14, 15, 9, 26, 5, 35, 8, 1], [8, 9, 7, 2]), ([40], [38]), ([6], [11]))
BLOCKS = 2  # a sequence
FAST = ("gemma2", "gpt2", "qwen3_moe")
NAMES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in [*TINY, *MORE, *OPAQUE]]


class LargestTiles:
    """Of the first candidate's kind, the one with the fewest programs: the interpreter's time goes by programs.

    Decoding is split in two, fewer than any candidate for a GPU with so few sequences.
    """

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        alike = [c for c in candidates if c.get("path") == candidates[0].get("path")]
        sizes = ("bn", "bm", "gu_bn", "down_bn", "BH", "BT", "BN", "BM")
        best = min(alike, key=lambda c: (abs(c.get("splits", 2) - 2), -math.prod(c.get(s, 1) for s in sizes)))
        return best | {"splits": 2} if family == "decode_qkv" else best


def make_step(done: list[int], chunks: tuple[list[int], ...], groups: int) -> StepInputs:
    """The step after ``done`` tokens of each sequence; every row is sampled."""

    def ints(values: Any) -> Any:
        return np.array(values, np.int32)

    counts = [len(c) for c in chunks]
    tables = np.arange(len(chunks) * BLOCKS, dtype=np.int32).reshape(1, len(chunks), BLOCKS)
    return StepInputs(
        token_ids=ints([t for c in chunks for t in c]),
        positions=ints([p for at, n in zip(done, counts, strict=True) for p in range(at, at + n)]),
        query_start=ints(np.cumsum([0, *counts])), seq_lens=ints([a + n for a, n in zip(done, counts, strict=True)]),
        block_tables=np.repeat(tables, groups, 0), slots=ints(range(len(chunks))),
        sample_rows=ints(range(sum(counts))), adapter_id=ints([0] * sum(counts)),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_programs_give_the_reference_logits(name: str) -> None:
    module = captured(name).module
    tensors = {k: v.detach() for k, v in tiny_model(name).state_dict().items()}
    served, _ = run_pipeline(module, Options(level=2, target="cuda-sm_90"))
    reference = Served(served, tensors, len(CHUNKS[0]))
    flat = flat_module(served)
    machine = Machine(
        flat, bind(served, tensors), [MIXED, DECODE], prepare=prepare_bucket, chooser=LargestTiles()
    )
    done = [0] * len(CHUNKS[0])
    for number, chunks in enumerate(CHUNKS):
        want = reference.step(chunks)
        (got,) = machine.run(min(number, 1), make_step(done, chunks, machine.groups))
        done = [a + len(c) for a, c in zip(done, chunks, strict=True)]
        scale = want.abs().max().item()
        assert (want[0] - want[-1]).abs().max().item() > 0.2 * scale, (
            "rows are alike: the model shows nothing"
        )
        error = (got.cpu() - want).abs().max().item()
        assert error <= 2e-5 * scale, f"step {number}: logits are off by {error:.3g} of {scale:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("name", TINY)
def test_programs_are_emitted_for_every_target(name: str, target: Any) -> None:
    """In bf16, at every level: a program of launches, each with a source to compile."""
    served, _ = run_pipeline(
        captured(name, torch.bfloat16).module, Options(level=2, target=f"cuda-{target.name}")
    )
    flat = flat_module(served)
    for level in (1, 2, 3):
        draft = draft_program(flat, [MIXED, DECODE], target, level, prepare=prepare_bucket)
        assert draft.sources()
        assert all(
            s.pdl == (target.pdl and level >= 2) for s in draft.sources() if "PDL" in dict(s.constexprs)
        )
