"""Every pass on its cases, and in whole builds of the tiny models; what they are tried on."""

import pytest
import torch

from compilerllm.cuda_artifact import bucket_passes, cuda_buckets
from compilerllm.ir.graph import Module
from compilerllm.ir.text import print_module
from compilerllm.kernels.cpu.target import CpuTarget, find_target
from compilerllm.kernels.triton.target import CudaTarget, find_cuda_target
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.validation.build import verify_build
from compilerllm.validation.corpus import captured, cases, exercised, models, stages
from compilerllm.validation.inputs import KINDS, Kind, make_trial
from compilerllm.validation.rewrites import every_pass, validate_pass, verify_pipeline
from compilerllm.validation.running import Runner
from compilerllm.validation.shrink import thin
from compilerllm.validation.weights import Weights
from tests.models.tiny import TINY, tiny_config
from tests.passes.captured import Decoder

CASES = cases()
BUCKETS = cuda_buckets(256, 2048)
QUICK = (
    "gpt_neox",
    "qwen3_moe",
)  # parallel residuals; experts, one layer dense


@pytest.mark.parametrize("name,module,passes", CASES, ids=[c[0].replace("/", "-") for c in CASES])
def test_case(name: str, module: Module, passes: tuple[str, ...]) -> None:
    for each in passes:
        assert validate_pass(every_pass()[each], module) == []


def test_every_pass_matches_in_some_case() -> None:
    assert exercised(CASES) == every_pass().keys()


def test_every_pass_of_a_bucket_is_known() -> None:
    used = {run.__name__ for bucket in BUCKETS for run in bucket_passes(bucket)}
    assert len(used) > 4 and used <= every_pass().keys()


def build(name: str, level: int, target: CudaTarget | CpuTarget) -> None:
    report = verify_build(captured(name), target, level, BUCKETS)
    report.require()
    assert len(report.verdicts) >= 10


@pytest.mark.parametrize("name", QUICK)
def test_build(name: str) -> None:
    build(name, 2, find_cuda_target("sm_90"))


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(TINY))
def test_build_slow(name: str, level: int) -> None:
    build(name, level, find_target("cpu") if level == 1 else find_cuda_target("sm_90"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY))
def test_tiny_models_at_every_stage(name: str) -> None:
    """As they are, not made small; attributes and variations of all that passes take away included."""
    for stage, module, passes in stages():
        if stage.startswith(f"{name}/"):
            for each in passes:
                assert validate_pass(every_pass()[each], module) == [], stage


def test_the_corpus_has_every_tiny_model() -> None:
    assert models() == sorted(TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY))
def test_the_corpus_is_what_capture_gives(name: str) -> None:
    from compilerllm.models.capture import capture

    found = capture(tiny_config(name), torch.bfloat16).module
    assert print_module(found, origins=True) == print_module(captured(name), origins=True)


@pytest.mark.slow
@pytest.mark.weights
def test_a_real_model() -> None:
    from compilerllm.checkpoint import demo_model
    from compilerllm.models.model import capture_checkpoint
    from compilerllm.models.resolve import resolve

    module = capture_checkpoint(resolve(demo_model(), dtype="bfloat16"), keep_packed=True).module
    verify_build(module, find_cuda_target("sm_90"), 2, BUCKETS).require()
    kinds = [k for k in KINDS if k.name in ("random", "padded")]
    assert verify_pipeline(thin(module), Options(level=2), kinds=kinds) == []  # two layers at their own sizes


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_inputs_are_what_their_kind_says(kind: Kind) -> None:
    module, _ = run_pipeline(Decoder(window=4).module())
    trial, again = make_trial(module, kind, 3), make_trial(module, kind, 3)
    assert trial is not None and again is not None and trial.step is not None and again.step is not None
    assert trial.step.token_ids.tolist() == again.step.token_ids.tolist(), "the same seed gives the same step"
    assert len(trial.step.token_ids) == kind.valid + kind.pads
    kept = [s.data.float() for s in trial.states.values()]
    context = sum(c for c, _ in kind.sequences)
    assert all(int((~k.isnan()).any(-1).any(-1).any(-1).sum()) == context for k in kept)
    (logits,) = Runner(module, Weights(module)).run(trial).outputs
    assert bool(logits.isfinite().all()) or kind.name == "large"
