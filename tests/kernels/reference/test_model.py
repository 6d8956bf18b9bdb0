"""Level O0: the served form of a small model equals its dense form, however the tokens are cut into steps."""

import numpy as np
import pytest
import torch

from compilerllm.ir.step import Bucket, Executable, SampleRows
from compilerllm.ir.text import parse_module
from compilerllm.kernels.reference.errors import FreedBlock, ReferenceFailure
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.model import ReferenceModel
from tests.ir.op_samples import function
from tests.kernels.reference.steps import make_step

VOCAB = 50


def layer(inputs: str, attend: str, window: str, suffix: str = "") -> str:
    body = f"""%p = linear(%x, %qkv) : f32[T, 32]
      {attend}
      %b = reshape(%a, shape=[T, 16]) : f32[T, 16]
      %y = linear_add(%b, %o, %x) : f32[T, 16]"""
    params = "param %qkv : f32[32, 16]\nparam %o : f32[16, 16]"
    state = f"\nstate %kv : paged_kv<f32, heads=2, dim=4{window}>" if "%step" in inputs else ""
    return function(inputs, body, "%y", params + state, f"layer{suffix}")


_DENSE = """%p3 = reshape(%p, shape=[T, 8, 4]) : f32[T, 8, 4]
  %q = slice(%p3, axis=1, start=0, stop=4) : f32[T, 4, 4]
  %k = slice(%p3, axis=1, start=4, stop=6) : f32[T, 2, 4]
  %v = slice(%p3, axis=1, start=6, stop=8) : f32[T, 2, 4]
  %a = attention(%q, %k, %v, scale=0.5, causal=true{}) : f32[T, 4, 4]"""
_PAGED = """%q = qkv_rope_write(%kv, %p, %step, heads=4) : f32[T, 4, 4]
  %a = paged_attention(%q, %kv, %step, scale=0.5{}) : f32[T, 4, 4]"""
_EMBED = "param %embed : f32[50, 16]"
DENSE = function("%ids: i32[T]", """%x = embedding(%ids, %embed) : f32[T, 16]
  %y = call(%x, fn=@layer, params="layers.0") : f32[T, 16]
  %z = call(%y, fn=@layer_local, params="layers.1") : f32[T, 16]
  %l = linear(%z, %embed) : f32[T, 50]""", "%l", _EMBED) + layer("%x: f32[T, 16]", _DENSE.format(""), "") + layer(
    "%x: f32[T, 16]", _DENSE.format(", window=6"), "", "_local")  # fmt: skip
SERVED = function("%step: step", """%ids = step_field(%step, field="token_ids") : i32[T]
  %rows = step_field(%step, field="sample_rows") : i32[R]
  %x = embedding(%ids, %embed) : f32[T, 16]
  %y = call(%x, %step, fn=@layer, params="layers.0", states="0") : f32[T, 16]
  %z = call(%y, %step, fn=@layer_local, params="layers.1", states="1") : f32[T, 16]
  %h = gather_rows(%z, %rows) : f32[R, 16]
  %l = linear(%h, %embed) : f32[R, 50]""", "%l", _EMBED) + layer(
    "%x: f32[T, 16], %step: step", _PAGED.format(""), "") + layer(
    "%x: f32[T, 16], %step: step", _PAGED.format(", window=6"), ", window=6", "_local")  # fmt: skip


def build() -> tuple[ReferenceModel, Interpreter]:
    generator = torch.Generator().manual_seed(0)
    params = {"embed": torch.randn(VOCAB, 16, generator=generator) * 0.3}
    for prefix in ("layers.0", "layers.1"):
        params[f"{prefix}.qkv"] = torch.randn(32, 16, generator=generator) * 0.3
        params[f"{prefix}.o"] = torch.randn(16, 16, generator=generator) * 0.3
    model = ReferenceModel(
        parse_module(SERVED), params, max_model_len=32, buckets=(Bucket(32, 4, 32, 32),), block_size=4
    )
    return model, Interpreter(parse_module(DENSE), params)


def test_it_is_an_executable() -> None:
    model, _ = build()
    executable: Executable = model
    assert (executable.vocab_size, executable.max_model_len) == (VOCAB, 32)
    assert [(g.name, g.block_size, g.bytes_per_block, g.window) for g in executable.groups] == [
        ("kv", 4, 2 * 2 * 4 * 4 * 4, None), ("kv_window_6", 4, 2 * 2 * 4 * 4 * 4, 6),
    ]  # fmt: skip
    with pytest.raises(ReferenceFailure, match="call allocate first"):
        model.forward(make_step([(0, 1)]))


def test_chunks_and_mixed_batches_equal_the_dense_model() -> None:
    model, dense = build()
    model.allocate(num_blocks=16, max_num_seqs=2)
    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    want = [dense.run(row)[0].numpy() for row in ids]
    done = [0, 0]
    for chunk in ((7, 0), (5, 9), (1, 1), (4, 1), (3, 9)):
        tokens = [int(t) for s in (0, 1) for t in ids[s, done[s] : done[s] + chunk[s]]]
        step = make_step(list(zip(done, chunk, strict=True)), groups=2, token_ids=tokens)
        model.forward(step)
        expected = np.concatenate([want[s][done[s] : done[s] + chunk[s]] for s in (0, 1)])
        np.testing.assert_allclose(model.logits(), expected, rtol=1e-4, atol=1e-4)
        done = [a + b for a, b in zip(done, chunk, strict=True)]
    assert done == [20, 20]


def test_negative_id_is_the_slots_last_token() -> None:
    model, dense = build()
    tables = model.allocate(num_blocks=8, max_num_seqs=4)
    model.forward(make_step([(0, 3)], groups=2, token_ids=[4, 9, 2], rows=[2], slots=[3]))
    rows = SampleRows(
        np.array([3], np.int32), np.zeros(2, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), 0, False, False
    )  # fmt: skip
    chosen = int(model.sample(rows).token_ids[0])
    assert (tables.last_token[3], tables.draws[3]) == (chosen, 1)
    model.forward(make_step([(3, 1)], groups=2, token_ids=[-4], slots=[3]))
    (want,) = dense.run(torch.tensor([4, 9, 2, chosen], dtype=torch.int32))
    np.testing.assert_allclose(model.logits()[0], want[3].numpy(), rtol=1e-4, atol=1e-4)


def test_freed_blocks_outside_the_window_are_never_seen() -> None:
    model, dense = build()
    model.allocate(num_blocks=8, max_num_seqs=1)
    ids = list(range(13))
    model.forward(make_step([(0, 12)], groups=2, token_ids=ids[:12], rows=[]))
    step = make_step([(12, 1)], groups=2, token_ids=ids[12:])
    step.block_tables[1, 0, 0] = -1  # tokens 0..3: behind a window of 6 at position 12
    model.forward(step)
    (want,) = dense.run(torch.tensor(ids, dtype=torch.int32))
    np.testing.assert_allclose(model.logits()[0], want[12].numpy(), rtol=1e-4, atol=1e-4)
    step.block_tables[0, 0, 0] = -1
    with pytest.raises(FreedBlock, match="sees a key whose block was freed"):
        model.forward(step)
