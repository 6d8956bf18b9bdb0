"""A language model of four kernels, small enough for the interpreter: the next token is the sum of its context modulo 16.

It reads and writes paged state, resolves tokens that only the device knows, and ties its head to its embedding.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compilerllm.artifact import read_manifest, write_manifest
from compilerllm.ir.step import Bucket, SampleRows, StepInputs
from compilerllm.kernels.launch.gpu.program import Extent, Kernel, Launch, Plan, Pointer, Program
from compilerllm.kernels.triton.build import compile_source
from compilerllm.kernels.triton.source import KernelSource, generated

VOCAB = 16
BLOCK = 32
TEXT = '''
import triton
import triton.language as tl


@triton.jit
def write(token_ids, last_token, query_start, seq_lens, table, state, meta, S, PDL: tl.constexpr):
    """state[block, 0, 0, offset, 0] = the token, for each real one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0)
    if t < tl.load(meta):
        token = tl.load(token_ids + t)
        if token < 0:
            token = tl.load(last_token - 1 - token)
        s = 0
        while tl.load(query_start + s + 1) <= t:
            s += 1
        end = tl.load(query_start + s + 1)
        position = tl.load(seq_lens + s) - end + t
        block = tl.load(table + s * tl.load(meta + 3) + position // 32)
        tl.store(state + block * 64 + position % 32, token.to(tl.float32))


@triton.jit
def read(query_start, seq_lens, table, state, meta, embedding, out, S, V: tl.constexpr, PDL: tl.constexpr):
    """out[t] = embedding[(sum of the context up to t) % V]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0)
    d = tl.arange(0, V)
    if t < tl.load(meta):
        s = 0
        while tl.load(query_start + s + 1) <= t:
            s += 1
        end = tl.load(query_start + s + 1)
        position = tl.load(seq_lens + s) - end + t
        total = 0.0
        for i in range(0, position + 1):
            block = tl.load(table + s * tl.load(meta + 3) + i // 32)
            total += tl.load(state + block * 64 + i % 32)
        row = total.to(tl.int32) % V
        tl.store(out + t * V + d, tl.load(embedding + row * V + d))


@triton.jit
def gather(rows, x, out, scale, V: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    r = tl.program_id(0)
    d = tl.arange(0, V)
    tl.store(out + r * V + d, tl.load(x + tl.load(rows + r) * V + d) * scale)
'''
STATE = {"name": "kv", "kind": "paged_kv", "dtype": "f32", "heads": 1, "dim": 1, "group": 0}


I32, F32 = "*i32", "*fp32"
# By function: run-time arguments, and constants.
KERNELS: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "write": (
        {"token_ids": I32, "last_token": I32, "query_start": I32, "seq_lens": I32, "table": I32, "state": F32, "meta": I32,
         "S": "i32"}, {},
    ),
    "read": (
        {"query_start": I32, "seq_lens": I32, "table": I32, "state": F32, "meta": I32, "embedding": F32, "out": F32,
         "S": "i32"}, {"V": VOCAB},
    ),
    "gather": ({"rows": I32, "x": F32, "out": F32, "scale": "fp32"}, {"V": VOCAB}),
}  # fmt: skip


def make_kernels(folder: Path | None, pdl: bool = False) -> tuple[Kernel, ...]:
    """The kernels, compiled for sm_90 into ``folder/kernels``; with None they have no cubins."""
    module = generated(TEXT)
    made = []
    for name, (types, constants) in KERNELS.items():
        template = f"{module}:{name}"
        if folder is None:
            given = tuple({**constants, "PDL": False}.items())
            made.append(Kernel(name, "", template, tuple(types.values()), constexprs=given))
        else:
            source = KernelSource.of(template, types, {**constants, "PDL": pdl}, num_warps=1, pdl=pdl)
            code, meta = compile_source(source, 90)
            (folder / "kernels").mkdir(exist_ok=True)
            (folder / f"kernels/{source.key()}.cubin").write_bytes(code)
            made.append(
                Kernel(meta["name"], source.key(), template, tuple(types.values()), 1, meta["shared"], pdl)
            )
    matmul = Kernel("", "", "library:matmul", (F32, F32, F32, "i32"), constexprs=(("k", VOCAB), ("n", VOCAB)))
    return (*made, matmul)


def make_program(buckets: Sequence[Bucket], kernels: tuple[Kernel, ...]) -> Program:
    """The program for these buckets."""
    plans = []
    for b in buckets:
        x, rows = Pointer("arena"), Pointer("arena", "", b.tokens * VOCAB * 4)
        step = {
            n: Pointer("step", n) for n in ("token_ids", "query_start", "seq_lens", "sample_rows", "meta")
        }
        table, state = Pointer("step", "table_0"), Pointer("state", "kv")
        tokens = (Extent("T"), 1, 1)
        plans.append(
            Plan(b, (b.tokens + b.rows) * VOCAB * 4, (
                Launch(0, tokens, (step["token_ids"], Pointer("table", "last_token"), step["query_start"], step["seq_lens"],
                                   table, state, step["meta"], Extent("S")), "%0 = kv_write  [model.layers.0]"),
                Launch(1, tokens, (step["query_start"], step["seq_lens"], table, state, step["meta"],
                                   Pointer("param", "embed.weight"), x, Extent("S")), "%1 = paged_attention  [model.layers.0]"),
                Launch(2, (Extent("R"), 1, 1), (step["sample_rows"], x, rows, 1.0), "%2 = gather_rows"),
                Launch(3, (1, 1, 1), (rows, Pointer("param", "lm_head.weight"), Pointer("logits", "0"), Extent("R")),
                       "%3 = linear  [lm_head]"),
            ))
        )  # fmt: skip
    return Program(kernels, tuple(plans))


def parameters() -> list[dict[str, Any]]:
    """Of the manifest: the head is the embedding again."""
    recipe = 'read("embed.weight")'
    return [
        {"name": name, "dtype": "f32", "shape": [VOCAB, VOCAB], "recipe": recipe}
        for name in ("embed.weight", "lm_head.weight")
    ]


class IdentitySource:
    """The checkpoint: an identity matrix."""

    def names(self) -> list[str]:
        return ["embed.weight"]

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return "f32", (VOCAB, VOCAB)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return torch.eye(VOCAB)[start:stop]


def write_artifact(
    folder: Path,
    buckets: Sequence[Bucket],
    max_model_len: int = 128,
    kernels: tuple[Kernel, ...] | None = None,
    sampling: Program | None = None,
) -> dict[str, Any]:
    """An artifact of the program; gives its manifest as it is read back. Without ``kernels`` it is for the interpreter."""
    if sampling is not None:
        (folder / "sampling.json").write_text(json.dumps(sampling.to_json()))
    program = make_program(buckets, kernels or make_kernels(None))
    (folder / "program.json").write_text(json.dumps(program.to_json()))
    write_manifest(
        folder,
        {
            "facts": {}, "vocab_size": VOCAB, "max_model_len": max_model_len, "capability": 90, "target": "sm_90", "level": 2,
            "program": "program.json", "parameters": parameters(), "states": [STATE],
            "groups": [{"name": "full", "index": 0, "addressing": "paged", "window": None}],
            **({} if sampling is None else {"sampling": "sampling.json"}),
        },
    )  # fmt: skip
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def step_of(
    sequences: Sequence[tuple[int, Sequence[int], int, Sequence[int]]], sample: bool = True
) -> StepInputs:
    """One step of sequences (slot, tokens of this step, first position, blocks); each one's last row is sampled."""
    i32 = np.int32
    starts = np.cumsum([0, *(len(tokens) for _, tokens, _, _ in sequences)]).astype(i32)
    width = max(len(blocks) for *_, blocks in sequences)
    tables = np.full((1, len(sequences), width), -1, i32)
    for row, (*_, blocks) in enumerate(sequences):
        tables[0, row, : len(blocks)] = blocks
    return StepInputs(
        token_ids=np.concatenate([np.array(tokens, i32) for _, tokens, _, _ in sequences]),
        positions=np.concatenate([np.arange(p, p + len(t), dtype=i32) for _, t, p, _ in sequences]),
        query_start=starts,
        seq_lens=np.array([p + len(t) for _, t, p, _ in sequences], i32),
        block_tables=tables,
        slots=np.array([slot for slot, *_ in sequences], i32),
        sample_rows=(starts[1:] - 1).astype(i32) if sample else np.empty(0, i32),
        adapter_id=np.zeros(int(starts[-1]), i32),
    )


def greedy(slots: Sequence[int]) -> SampleRows:
    """Greedy rows of these slots."""
    count = len(slots)
    return SampleRows(
        slots=np.array(slots, np.int32),
        bias_start=np.zeros(count + 1, np.int32),
        bias_token=np.empty(0, np.int32),
        bias_value=np.empty(0, np.float32),
        num_logprobs=0,
        penalties=False,
        random=False,
    )
