"""Artifacts that are refused before anything is served, and what the refusal says; and what is accepted all the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compilerllm import LLM, SamplingParams
from compilerllm.artifact import ArtifactInvalid, read_manifest, write_manifest
from compilerllm.building import build
from compilerllm.bundle import WrongTarget
from compilerllm.cache import is_usable
from compilerllm.compiled_cuda import CudaModel, CudaOptions
from compilerllm.compiler import CompileRequest
from compilerllm.config import EngineConfig
from compilerllm.coverage import (
    ArtifactIncomplete,
    ArtifactTooSmall,
    Limits,
    check_coverage,
    needed_buckets,
    smallest_bucket,
)
from compilerllm.cuda_artifact import cuda_buckets
from compilerllm.errors import CompilerLLMError, InvalidParameter
from compilerllm.ir.step import Bucket
from compilerllm.loading import load_engine_model
from compilerllm.matching import ModelMismatch
from compilerllm.serving_artifact import ArtifactDiffers, ArtifactMissing, find_artifact, settle
from tests.artifact.conftest import LIMITS, VOCAB, Built, save_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 9, 14, 3, 22]
Manifest = dict[str, Any]


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def changed(built: Built, folder: Path, change: Callable[[Manifest], object]) -> Path:
    """A copy of the artifact whose manifest says something else, as if it had been built so."""
    shutil.copytree(built.artifact, folder)
    manifest = read_manifest(folder)
    assert manifest is not None
    change(manifest)
    write_manifest(folder, {k: v for k, v in manifest.items() if k not in ("files", "id")})
    return folder


def start(built: Built, artifact: Path, **options: Any) -> EngineConfig:
    """What a face does before it starts an engine."""
    config = EngineConfig.create(model=str(built.model), artifact=str(artifact), **options)
    return settle(config, find_artifact(config))


def test_an_artifact_serves_as_the_build_does(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, or a bundle: the same tokens as what the cache finds. Nothing may start a child."""
    monkeypatch.setattr("compilerllm.compiler.run_child", lambda *_: pytest.fail("a build was started"))
    with LLM(str(built.model), num_blocks=20, **LIMITS) as llm:
        wanted = tokens(llm)
        assert llm.card["artifact"].endswith("found in the cache")
    for place in (built.artifact, built.bundle):
        with LLM(str(built.model), artifact=str(place), num_blocks=20) as llm:
            assert tokens(llm) == wanted
            assert llm.card["artifact"].endswith(f"from {place}") and llm.max_model_len == 128
            assert llm.card["compile"].startswith("nothing;")
            assert llm.model is not None and len(llm.model.buckets) == 5


def test_lower_limits_need_fewer_buckets(built: Built) -> None:
    with LLM(
        str(built.model), artifact=str(built.bundle), num_blocks=20, max_num_seqs=2, max_model_len=40
    ) as llm:
        assert llm.model is not None
        assert [b.sequences for b in llm.model.buckets if b.max_query == 1] == [1, 2]
        assert llm.max_model_len == 40 and len(llm.generate([PROMPT] * 5, GREEDY)) == 5


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_num_seqs": 9}, ArtifactTooSmall, "--max-num-seqs is 9, and it was built for at most 8"),
        ({"max_num_batched_tokens": 65, "max_model_len": 500}, ArtifactTooSmall,
         "--max-num-batched-tokens is 65, and it was built for at most 64; --max-model-len is 500, and it was built for at most 128"),
        ({"optimization_level": 3}, ArtifactDiffers, "--optimization-level is 3, and it was built with 2"),
        ({"dtype": "bfloat16"}, ArtifactDiffers, "--dtype is bfloat16, and it was built with float32"),
        ({"load_format": "dummy"}, ArtifactDiffers, "--load-format is dummy"),
        ({"device": "cuda"}, CompilerLLMError, "cuda"),
    ],
)  # fmt: skip
def test_flags_that_it_was_not_built_for(
    built: Built, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        start(built, built.bundle, **options)


def set_to(name: str, value: Any) -> Callable[[Manifest], object]:
    return lambda manifest: manifest.__setitem__(name, value)


CHANGES: dict[str, tuple[Callable[[Manifest], object], str]] = {
    "another version": (set_to("version", "0.0.9"), "built by version 0.0.9"),
    "instructions": (lambda m: m["features"].append("avx9000"), "this processor has no avx9000"),
    "a GPU's": (set_to("target", "sm_90"), "built for sm_90, but this machine has no GPU"),
    "made-up weights": (set_to("source", {"kind": "dummy"}), "built for made-up weights"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_artifacts_for_something_else(built: Built, tmp_path: Path, change: str) -> None:
    if change == "a GPU's" and __import__("torch").cuda.is_available():
        pytest.skip("this machine has one")
    edit, says = CHANGES[change]
    with pytest.raises(ArtifactInvalid, match=says):
        start(built, changed(built, tmp_path / "artifact", edit))


def drop_plan(manifest: Manifest) -> None:
    del manifest["program"]["plans"][-1]


INCOMPLETE: dict[str, tuple[Callable[[Manifest], object], str]] = {
    "a plan": (drop_plan, "lacks the plan of the mixed bucket of 64 tokens, 8 sequences and 64 rows"),
    "a library": (set_to("library", "gone.so"), "lacks the file gone.so"),
    "a package": (
        lambda m: m["program"]["host_calls"].append({"where": "x", "package": "group_0.pt2"}), "the file group_0.pt2",
    ),
    "an entry": (lambda m: m.pop("parameters"), "lacks 'parameters' in the manifest"),
    "prompts": (lambda m: m["buckets"].pop(), "--max-num-batched-tokens is 64, and it was built for at most 8"),
}  # fmt: skip


@pytest.mark.parametrize("what", INCOMPLETE)
def test_what_an_engine_would_miss_later_is_named_at_the_start(
    built: Built, tmp_path: Path, what: str
) -> None:
    edit, says = INCOMPLETE[what]
    with pytest.raises((ArtifactIncomplete, ArtifactTooSmall), match=says):
        load_engine_model(
            start(built, changed(built, tmp_path / "artifact", edit), max_num_batched_tokens=64)
        )


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "program.so").write_bytes((f / "program.so").read_bytes()[:-1] + b"x"), "SHA-256 differs"),
        (lambda f: (f / "program.so").write_bytes(b"short"), "has 5 bytes instead of"),
        (lambda f: (f / "module.ir").unlink(), "module.ir is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "manifest.json").unlink(), "has neither manifest.json nor bundle.json"),
    ],
)  # fmt: skip
def test_damaged_artifacts(built: Built, tmp_path: Path, damage: Callable[[Path], object], says: str) -> None:
    shutil.copytree(built.artifact, tmp_path / "artifact")
    damage(tmp_path / "artifact")
    with pytest.raises(ArtifactInvalid, match=says):
        start(built, tmp_path / "artifact")


def test_another_models_weights(built: Built, tmp_path: Path) -> None:
    """Another architecture, and the same one with another size, before a weight is read."""
    for name, options in (("qwen2", {}), ("llama", {"intermediate_size": 80})):
        other = save_model(tmp_path / name, name, **options)
        config = EngineConfig.create(model=str(other), artifact=str(built.bundle))
        with pytest.raises(ModelMismatch, match="built for another model"):
            load_engine_model(settle(config, find_artifact(config)))


def test_made_up_weights_need_no_model(tmp_path: Path, built: Built) -> None:
    artifact = build(CompileRequest(str(built.model), load_format="dummy", **LIMITS), built.model)
    with LLM(artifact=str(artifact), load_format="dummy", num_blocks=20) as llm:
        assert all(0 <= t < VOCAB for t in tokens(llm))
    with pytest.raises(InvalidParameter, match="holds no weights"):
        EngineConfig.create(artifact=str(artifact))


def test_nothing_is_built_where_that_is_forbidden(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has it, or it is refused with what the nearest one differs in; a damaged one is refused too, not rebuilt."""
    monkeypatch.setattr("compilerllm.compiler.run_child", lambda *_: pytest.fail("a build was started"))
    config = EngineConfig.create(model=str(built.model), require_artifact=True, **LIMITS)
    assert find_artifact(config).path == built.artifact
    other = EngineConfig.create(
        model=str(built.model), require_artifact=True, **{**LIMITS, "max_num_seqs": 7}
    )
    with pytest.raises(ArtifactMissing, match=r"max_num_seqs \(8, now 7\).*--require-artifact forbids"):
        find_artifact(other)
    module = built.artifact / "module.ir"
    kept = module.read_bytes()
    try:
        module.write_bytes(kept[:-1])
        with pytest.raises(ArtifactInvalid, match="instead of"):
            find_artifact(config)
    finally:
        module.write_bytes(kept)
    assert is_usable(built.artifact)


# What is covered, on a GPU's buckets: no GPU is needed to know.


@pytest.mark.parametrize(
    "limits", [Limits(256, 8192, 4096), Limits(1, 16, 4096), Limits(12, 700, 300), Limits(300, 64, 64), Limits(17, 513, 8)]
)  # fmt: skip
def test_needed_buckets_are_those_that_some_step_runs_in(limits: Limits) -> None:
    """Every step within the limits finds among them the bucket that it finds among all; and each is found by some step."""
    buckets = cuda_buckets(256, 8192)
    needed = needed_buckets(buckets, limits)
    seen = set()
    edges = {1, *(n + d for b in buckets for n in (b.tokens, b.sequences) for d in (0, 1))}
    for tokens_ in sorted(
        t for t in edges | {limits.max_num_batched_tokens} if t <= limits.max_num_batched_tokens
    ):
        most = min(limits.max_num_seqs, tokens_)
        for sequences in sorted(s for s in edges | {most} if s <= min(most, 256)):
            for rows in {1, sequences // 2 or 1, sequences}:
                queries = {min(tokens_ - sequences + 1, limits.max_model_len)} | (
                    {1} if tokens_ == sequences else set()
                )
                for query in queries:
                    wanted = smallest_bucket(buckets, tokens_, sequences, rows, query)
                    assert (
                        wanted is not None
                        and smallest_bucket(needed, tokens_, sequences, rows, query) == wanted
                    )
                    seen.add(wanted)
    assert seen == set(needed)


GPU_BUCKETS = (Bucket(1, 1, 1, 1), Bucket(4, 4, 4, 1), Bucket(64, 4, 4, 64))


def gpu_artifact(folder: Path) -> Manifest:
    """A CUDA artifact as far as coverage reads it: cubins are named, never loaded."""
    from compilerllm.kernels.triton.emit_sampling import draft_sampling, finish_sampling
    from compilerllm.kernels.triton.target import find_cuda_target
    from tests.kernels.gpu.tiny import write_artifact

    pytest.importorskip("triton")
    sampling = finish_sampling(*draft_sampling(16, [1, 4], find_cuda_target("sm_90")))
    manifest = write_artifact(folder, GPU_BUCKETS, sampling=sampling)
    more = {
        "version": "1", "features": [], "source": {"kind": "dummy"}, "tokenizer": False,
        "buckets": [vars(b) for b in GPU_BUCKETS],
    }  # fmt: skip
    return write_manifest(folder, {k: v for k, v in (manifest | more).items() if k not in ("files", "id")})


def test_a_gpus_programs_are_looked_through(tmp_path: Path) -> None:
    manifest = gpu_artifact(tmp_path)
    whole, some = Limits(4, 64, 128), Limits(1, 64, 128)
    assert check_coverage(tmp_path, manifest, whole) == GPU_BUCKETS
    assert check_coverage(tmp_path, manifest, some) == (GPU_BUCKETS[0], GPU_BUCKETS[2])
    program = json.loads((tmp_path / "program.json").read_text())
    sampling = json.loads((tmp_path / "sampling.json").read_text())

    def refused(says: str, limits: Limits = whole) -> None:
        with pytest.raises(ArtifactIncomplete, match=says):
            check_coverage(tmp_path, manifest, limits)

    program["kernels"][0]["key"] = "abc"
    (tmp_path / "program.json").write_text(json.dumps(program))
    refused(r"the file kernels/abc\.cubin")
    program["kernels"][0] |= {"key": "", "constexprs": [["library", "cutlass_7"]]}
    del program["plans"][1]
    (tmp_path / "program.json").write_text(json.dumps(program))
    refused("the plan of the decode bucket of 4 tokens, 4 sequences and 4 rows; the file cutlass_7.so")
    program["kernels"][0]["constexprs"] = []
    (tmp_path / "program.json").write_text(json.dumps(program))
    check_coverage(tmp_path, manifest | {"buckets": [vars(GPU_BUCKETS[0]), vars(GPU_BUCKETS[2])]}, whole)
    for variant in ("greedy", "sampled", "full"):
        left = [p for p in sampling["plans"] if p["variant"] != variant or p["bucket"]["rows"] < 4]
        (tmp_path / "sampling.json").write_text(json.dumps(sampling | {"plans": left}))
        refused(f"the sampling variant '{variant}' for 4 rows")
    del manifest["sampling"]
    refused("the sampling program")


def test_a_gpus_model_has_the_needed_buckets_alone(tmp_path: Path) -> None:
    from tests.kernels.gpu.greedy import GreedySampler
    from tests.kernels.gpu.tiny import IdentitySource

    interpreted = pytest.importorskip("compilerllm.kernels.triton.interpreted_backend")
    manifest = gpu_artifact(tmp_path)
    needed = check_coverage(tmp_path, manifest, Limits(1, 64, 128))
    model = CudaModel.load(
        tmp_path, IdentitySource(), backend=interpreted.InterpretedBackend(), sampler=GreedySampler,
        options=CudaOptions(buckets=needed),
    )  # fmt: skip
    assert model.buckets == needed


def test_a_bundle_without_this_machines_target_says_what_it_has(built: Built, tmp_path: Path) -> None:
    """One target that needs an instruction nobody has."""
    from compilerllm.bundle import write_bundle

    odd = changed(
        built, tmp_path / "odd", lambda m: (m["features"].append("avx9000"), m.update(target="cpu-avx9000"))
    )
    write_bundle(tmp_path / "bundle", {"cpu-avx9000": odd})
    with pytest.raises(WrongTarget, match=r"no artifact that runs here \(cpu\).*it has cpu-avx9000"):
        start(built, tmp_path / "bundle")
