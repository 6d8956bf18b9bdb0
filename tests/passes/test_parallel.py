"""Tensor parallelism and adapters: shards in lockstep give what one rank gives; adapters touch their rows only."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from compilerllm.ir.graph import Module
from compilerllm.ir.text import parse_module
from compilerllm.ir.types import TensorType
from compilerllm.kernels.reference.collective import ThreadCollective
from compilerllm.passes.add_adapters import AdapterOptions
from compilerllm.passes.errors import CannotAdapt, CannotShard
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.passes.shard import Mesh, shard
from compilerllm.validation.weights import bind, checkpoint, evaluate, random_tensor
from tests.passes.captured import Decoder
from tests.passes.running import SEQUENCES, Served

WORLD = 2


def shards(module: Module, level: int = 1) -> list[Module]:
    return [
        run_pipeline(module, Options(level=level, verify=True, mesh=Mesh(r, WORLD)))[0] for r in range(WORLD)
    ]


def lockstep(modules: list[Module], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Each rank's logits of ``SEQUENCES`` in two steps, the ranks running as threads."""
    mesh = ThreadCollective(len(modules))

    def rank(index: int) -> Tensor:
        served = Served(modules[index], tensors, len(SEQUENCES), mesh.rank(index))
        first = served.step([s[:4] for s in SEQUENCES])
        return torch.cat((first, served.step([s[4:] for s in SEQUENCES])))

    with ThreadPoolExecutor(len(modules)) as pool:
        return list(pool.map(rank, range(len(modules))))


@pytest.mark.parametrize(
    "decoder",
    [
        Decoder(dtype="f32"),
        Decoder(dtype="f32", bias=True, qk_norm=True),
        Decoder(dtype="f32", packed=True),
        Decoder(dtype="f32", weights="q8_0", ffn=128, dim=16, hidden=64),
    ],
    ids=["llama", "bias_and_norms", "packed", "q8_0"],
)
def test_two_shards_reassemble(decoder: Decoder) -> None:
    module = decoder.module()
    tensors = checkpoint(module)
    whole, _ = run_pipeline(module, Options(level=1))
    (want,) = lockstep([whole], tensors)
    for got in lockstep(shards(module), tensors):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_weights_reassemble_and_split_all_projections() -> None:
    """Each element of a split weight is on one rank exactly; the others are whole on both."""
    module = Decoder(dtype="f32", packed=True).module()
    parts = shards(module, level=0)
    index = {n: torch.arange(t.numel()).reshape(t.shape) for n, t in checkpoint(module).items()}
    split = set()
    for a, b in zip(*(m.param_instances() for m in parts), strict=True):
        assert a.name == b.name
        name = a.name
        if name not in index:
            continue
        on_ranks = [evaluate(p.recipe, index).flatten() for p in (a, b)]
        if len(on_ranks[0]) == index[name].numel():
            assert all(torch.equal(x, index[name].flatten()) for x in on_ranks)
            continue
        split.add(name.rpartition("layers.0.")[2])
        assert torch.equal(torch.cat(on_ranks).sort().values, index[name].flatten())
    assert {n for n in split if "layers" not in n} == {
        f"{n}.weight" for n in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }


def test_states_and_all_reduces_of_a_shard() -> None:
    rank0, _ = shards(Decoder().module())
    layer = rank0.functions["layer"]
    assert [str(v.type) for v in layer.states] == ["paged_kv<bf16, heads=1, dim=8>"]
    assert [n.op for n in layer.nodes].count("all_reduce") == 2
    assert "qkv_rope_write" in [n.op for n in layer.nodes], "a shard fuses as the whole does"


def test_experts_are_split_by_width() -> None:
    text = """
func @main(%x: f32[T, 8], %ids: i64[T, 2], %w: f32[T, 2]) {
  dim T in [1, 64]
  param %gate_up : f32[4, 16, 8]
  param %down : f32[4, 8, 8]
  param %gate_up.bias : f32[4, 16]
  param %down.bias : f32[4, 8]
  %y = experts(%x, %ids, %w, %gate_up, %down, %gate_up.bias, %down.bias, act="silu"MORE) : f32[T, 8]
  return %y
}
"""
    from compilerllm.kernels.reference.interpreter import Interpreter

    for more in ("", ", interleaved=true"):
        module = parse_module(text.replace("MORE", more))
        tensors = checkpoint(module)
        generator = torch.Generator().manual_seed(2)
        x, w = torch.randn(5, 8, generator=generator), torch.rand(5, 2, generator=generator)
        ids = torch.randint(0, 4, (5, 2), generator=generator)
        (want,) = Interpreter(module, bind(module, tensors)).run(x, ids, w)
        mesh = ThreadCollective(WORLD)
        parts = [shard(module, Mesh(r, WORLD)) for r in range(WORLD)]

        def rank(
            r: int, parts: list[Module] = parts, mesh: ThreadCollective = mesh, tensors: dict[str, Tensor] = tensors,
            given: tuple[Tensor, ...] = (x, ids, w),
        ) -> Tensor:  # fmt: skip
            run = Interpreter(parts[r], bind(parts[r], tensors), collective=mesh.rank(r)).run
            return run(*given)[0]

        with ThreadPoolExecutor(WORLD) as pool:
            for got in pool.map(rank, range(WORLD)):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_split_is_refused_or_left() -> None:
    module, _ = run_pipeline(Decoder().module(), Options(level=0))
    with pytest.raises(CannotShard, match="rank 2 is not one of 2"):
        shard(module, Mesh(2, 2))
    with pytest.raises(CannotShard, match="no linear of this model can be split over 7 ranks"):
        shard(module, Mesh(0, 7))
    assert shard(module, Mesh(0, 1)) is module
    # Two key heads over four ranks: attention stays whole, the MLP is split.
    layer = shard(module, Mesh(0, 4)).functions["layer"]
    assert [n.op for n in layer.nodes].count("all_reduce") == 1


ADAPTERS = AdapterOptions(("q_proj", "down_proj"), slots=3, rank=2)


def _with_adapters(module: Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint with random adapters in slots 1 and 2."""
    generator = torch.Generator().manual_seed(5)
    found = dict(tensors)
    for instance in module.param_instances():
        if ".adapter_" in instance.name:
            assert isinstance(instance.type, TensorType)
            found[instance.name] = random_tensor(instance.type, generator)
    return found


def test_base_and_adapter_rows_share_a_batch() -> None:
    captured = Decoder(dtype="f32").module()
    base, _ = run_pipeline(captured, Options(level=1))
    adapted, _ = run_pipeline(captured, Options(level=1, verify=True, adapters=ADAPTERS))
    tensors = _with_adapters(adapted, checkpoint(captured))
    chunks = [*SEQUENCES, SEQUENCES[0]]
    plain = torch.split(Served(base, tensors, 3).step(chunks), [7, 10, 7])
    mixed = torch.split(Served(adapted, tensors, 3).step(chunks, adapters=[0, 1, 2]), [7, 10, 7])
    torch.testing.assert_close(mixed[0], plain[0], rtol=1e-5, atol=1e-5)
    for row, slot in ((1, 1), (2, 2)):
        assert (mixed[row] - plain[row]).abs().max() > 0.01
        alone = Served(adapted, tensors, 1).step([chunks[row]], adapters=[slot])
        torch.testing.assert_close(mixed[row], alone, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_the_merged_weight() -> None:
    captured = Decoder(dtype="f32").module()
    base, _ = run_pipeline(captured, Options(level=1))
    adapted, _ = run_pipeline(captured, Options(level=1, adapters=ADAPTERS))
    tensors = _with_adapters(adapted, checkpoint(captured))
    merged = dict(tensors)
    for name in tensors:
        if name.endswith(".adapter_a"):
            path = name.removesuffix(".adapter_a")
            merged[f"{path}.weight"] = (
                tensors[f"{path}.weight"] + tensors[f"{path}.adapter_b"][1] @ tensors[name][1]
            )
    want = Served(base, merged, 1).step([SEQUENCES[1]])
    got = Served(adapted, tensors, 1).step([SEQUENCES[1]], adapters=[1])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_wrong_adapters_are_refused() -> None:
    module = Decoder().module()
    with pytest.raises(CannotAdapt, match=r"no linear with the step is called 'qq_proj'; there are .*q_proj"):
        run_pipeline(module, Options(adapters=AdapterOptions(("qq_proj",), 2, 1)))
    with pytest.raises(CannotAdapt, match="1 slots of rank 4"):
        run_pipeline(module, Options(adapters=AdapterOptions(("q_proj",), 1, 4)))
