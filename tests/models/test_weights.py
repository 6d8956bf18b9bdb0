"""Parameters made from saved checkpoints equal the model's own tensors, bit for bit."""

from pathlib import Path

import pytest
import torch

from compilerllm.ir.recipe import Concat, Convert, Permute, Read, Recipe, Reshape, Shift, Slice
from compilerllm.kernels.launch.errors import WrongShape
from compilerllm.kernels.launch.weights import SourceSpec, execute
from compilerllm.models.capture import build_skeleton, parameter_types
from compilerllm.models.errors import WeightMismatch
from compilerllm.models.model import capture_checkpoint
from compilerllm.models.resolve import resolve
from compilerllm.models.weights import Names, conversion_table, simplify

from .test_architectures import StateDict
from .tiny import TINY, captured, tiny_config, tiny_model


@pytest.mark.parametrize("name", TINY)
def test_saved_checkpoint_gives_the_same_parameters(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    capture = captured(name)
    source = SourceSpec("safetensors", str(tmp_path)).open()
    types, tied = capture.types, capture.tied
    names = Names(conversion_table(capture.skeleton, source), types, tied, source)
    own = StateDict(model)
    for param in capture.module.param_instances():
        bound = names.bind(param)
        got = execute(bound.recipe, source, shape=tuple(param.type.shape), name=param.name)
        want = execute(param.recipe, own, name=param.name)
        assert torch.equal(got, want), param.name


def test_bfloat16_model_from_a_float32_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    loaded = capture_checkpoint(resolve(tmp_path, dtype="bfloat16"))
    source = loaded.weights.open()
    own = StateDict(model)
    for param in loaded.module.param_instances():
        got = execute(loaded.names.bind(param).recipe, source, name=param.name)
        want = execute(param.recipe, own, name=param.name)
        assert torch.equal(got, want if param.name.endswith("inv_freq") else want.to(torch.bfloat16)), (
            param.name
        )


def test_recipes_need_no_model_at_run_time(tmp_path: Path) -> None:
    """Every leaf names a tensor of the files, also where transformers merges and concatenates experts."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    loaded = capture_checkpoint(resolve(tmp_path))
    stored = set(loaded.weights.open().names())
    from compilerllm.ir.recipe import reads

    bound = loaded.names.bind_all(loaded.module)
    assert {name for p in bound for name in reads(p.recipe)} <= stored
    experts = next(p for p in bound if p.name.endswith("experts.gate_up_proj"))
    assert len(list(reads(experts.recipe))) == 8  # 4 experts, gate and up


def test_dummy_weights_are_the_same_every_time() -> None:
    a, b = (capture_checkpoint(resolve(tiny_config("llama"))) for _ in range(2))
    one, two = a.weights.open(), SourceSpec.from_json(b.weights.to_json()).open()
    for param in a.names.bind_all(a.module):
        assert torch.equal(execute(param.recipe, one), execute(param.recipe, two))
    norm = one.read("model.norm.weight")
    assert abs(float(norm.mean()) - 1) < 0.1 and float(one.read("model.embed_tokens.weight").std()) < 0.05


class TestRecipes:
    """``execute``, step by step, on a small source."""

    source = StateDict(type("Model", (), {"state_dict": lambda self: {"a": torch.arange(24.0).view(4, 6)}})())

    def test_steps(self) -> None:
        a = torch.arange(24.0).view(4, 6)
        cases: list[tuple[Recipe, torch.Tensor]] = [
            (Slice(Read("a"), 0, 1, 3), a[1:3]),
            (Slice(Read("a"), 1, 2, 6), a[:, 2:6]),
            (Concat((Read("a"), Slice(Read("a"), 0, 0, 1)), 0), torch.cat((a, a[:1]))),
            (Permute(Reshape(Read("a"), (2, 2, 6)), (1, 0, 2)), a.view(2, 2, 6).transpose(0, 1)),
            (Shift(Read("a"), -1.0), a - 1),
            (Convert(Read("a"), "bf16"), a.to(torch.bfloat16)),
        ]
        for recipe, want in cases:
            assert torch.equal(execute(recipe, self.source), want), recipe

    @pytest.mark.parametrize(
        ("recipe", "says"),
        [
            (Slice(Read("a"), 0, 2, 9), "outside axis 0"),
            (Reshape(Read("a"), (5, 5)), "invalid for input of size 24"),
        ],
    )
    def test_impossible_steps_name_the_parameter(self, recipe: Slice | Reshape, says: str) -> None:
        with pytest.raises(WrongShape, match=says) as caught:
            execute(recipe, self.source, name="w")
        assert "parameter w" in str(caught.value)

    def test_wrong_shape(self) -> None:
        with pytest.raises(WrongShape, match=r"must be \[6, 4\], but the checkpoint gives \[4, 6\]"):
            execute(Read("a"), self.source, shape=(6, 4), name="w")

    def test_cancelling_steps_are_taken_out(self) -> None:
        assert simplify(Permute(Permute(Read("a"), (1, 0)), (1, 0))) == Read("a")
        assert simplify(Reshape(Reshape(Read("a"), (2, 12)), (24,))) == Reshape(Read("a"), (24,))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    source = SourceSpec("safetensors", str(tmp_path)).open()
    capture = captured("qwen2")  # has q, k and v biases that llama lacks
    names = Names(conversion_table(capture.skeleton, source), capture.types, {}, source)
    with pytest.raises(WeightMismatch, match=r"no weights for model.layers.0.self_attn.q_proj.bias"):
        names.recipe("model.layers.0.self_attn.q_proj.bias")


def test_types_and_ties_of_a_skeleton() -> None:
    types, tied = parameter_types(build_skeleton(tiny_config("llama"), torch.float32))
    assert str(types["model.layers.2.mlp.down_proj.weight"]) == "f32[64, 96]"
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
