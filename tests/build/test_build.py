"""``compilerllm build``: equal bytes from anywhere, resumed where it was killed, nothing done twice, and refusals."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from compilerllm import compiler
from compilerllm.artifact import artifact_path, read_manifest
from compilerllm.building import build
from compilerllm.cli.main import main
from compilerllm.compiler import CompileRequest, artifact_key, ensure_artifact
from tests.build.artifacts import tree, write_artifact
from tests.build.checkouts import copy_checkout, finish, start
from tests.models.tiny import tiny_config, tiny_model

SIZES = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def checkpoint(folder: Path, name: str = "llama") -> Path:
    tiny_model(name, num_hidden_layers=2).save_pretrained(folder)
    return folder


def order(place: Path, output: Path, targets: str, *more: str) -> list[str]:
    return ["build", str(place), "--target", targets, "--output", str(output), *SIZES, *more]


def sites(tmp_path: Path) -> tuple[Path, Path]:
    return copy_checkout(tmp_path / "a"), copy_checkout(tmp_path / "far" / "away" / "b")


def test_two_checkouts_give_the_same_bytes(tmp_path: Path) -> None:
    here, there = sites(tmp_path)
    places = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "another place" / "for it")
    running = [
        start(
            site,
            site / "cache",
            seed,
            *order(place, site / "out", "cpu-generic", "--pack", str(site / "all.cllm")),
        )
        for seed, (site, place) in enumerate(zip((here, there), places, strict=True))
    ]
    for process in running:
        assert "compile" in finish(process)
    first, second = tree(here / "out"), tree(there / "out")
    assert first.keys() == second.keys() and "cpu-generic/program.so" in first
    assert [name for name in first if first[name] != second[name]] == []
    assert (here / "all.cllm").read_bytes() == (there / "all.cllm").read_bytes()
    for name, data in first.items():
        for leak in (str(tmp_path), str(here), "pod-", os.getcwd()):
            assert leak.encode() not in data, f"{name} holds {leak}"


@pytest.mark.slow  # twenty kernels, twice
def test_a_killed_build_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    """sm_90 and a CPU. One build is killed with all its processes, then started again."""
    here, there = sites(tmp_path)
    place = checkpoint(tmp_path / "model", "qwen3")
    whole = start(here, here / "cache", 1, *order(place, here / "out", "sm_90,cpu-avx2"))
    arguments = order(place, there / "out", "cpu-avx2,sm_90", "--jobs", "1")
    killed = start(there, there / "cache", 2, *arguments)
    assert killed.stdout is not None
    for line in killed.stdout:
        if re.search(r"sm_90: compile [5-9]/", line):
            break
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not (there / "out").exists() and not list((there / "cache/artifacts").glob("*/manifest.json"))[1:]
    before = {p: p.stat().st_mtime_ns for p in (there / "cache/kernels").rglob("*.cubin")}
    assert len(before) >= 5
    said = finish(start(there, there / "cache", 3, *arguments))
    assert {p: p.stat().st_mtime_ns for p in before} == before, "what was compiled is not compiled again"
    assert "cpu-avx2: compile" not in said, "the first target was done"
    (begun, _), *_ = re.findall(r"sm_90: compile (\d+)/(\d+)", said)
    assert int(begun) >= 5
    finish(whole)
    first, second = tree(here / "out"), tree(there / "out")
    assert first.keys() == second.keys() and sum(name.endswith(".cubin") for name in first) > 15
    assert [name for name in first if first[name] != second[name]] == []


def test_nothing_is_done_twice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At level 0, which needs no compiler: the second run starts no process and writes no file."""
    place, out = checkpoint(tmp_path / "model"), tmp_path / "out"
    arguments = order(
        place, out, "cpu-generic", "--optimization-level", "0", "--pack", str(tmp_path / "x.cllm")
    )
    assert main(arguments) == 0
    said = capfd.readouterr()
    assert "compiling: cpu-generic: capture" in said.err and "nothing like it" in said.out
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert main(arguments) == 0
    said = capfd.readouterr()
    assert "compiling" not in said.err and "found in the cache" in said.out
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    (place / "config.json").write_text(
        json.dumps(json.loads((place / "config.json").read_text()) | {"rms_norm_eps": 1e-3})
    )
    assert main([*arguments, "--verify"]) == 0
    said = capfd.readouterr()
    assert "model.config.rms_norm_eps (1e-06, now 0.001)" in said.out, "why it was built is told"
    assert "verify" in said.err and "every rewrite" in said.out


def test_verifying_finds_a_wrong_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a build with --verify runs, with a pass that gives norms another epsilon."""
    from compilerllm.building import Builder
    from compilerllm.ir.graph import Graph
    from compilerllm.passes import pipeline
    from compilerllm.validation.errors import RewriteInvalid

    def careless(graph: Graph, report: Any) -> Graph:
        from dataclasses import replace

        nodes = [replace(n, attrs={**n.attrs, "eps": 0.5}) if n.op == "rms_norm" else n for n in graph.nodes]
        return replace(graph, nodes=tuple(nodes))

    place = checkpoint(tmp_path / "model")
    builder, request = Builder(place), CompileRequest(str(place), level=1, target="cpu-generic")
    good = next(p for p in pipeline.PASSES if p.name == "deduplicate")
    bad = pipeline.Pass(good.name, good.phase, good.meaning, good.level, on_graph=careless)
    monkeypatch.setattr(pipeline, "PASSES", tuple(bad if p is good else p for p in pipeline.PASSES))
    with pytest.raises(RewriteInvalid, match="deduplicate"):
        builder.verify(request)


@pytest.mark.usefixtures("unoptimised")
def test_verifying_runs_the_builds_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compilerllm.building import Builder
    from compilerllm.kernels.cpu.target import host_target
    from compilerllm.validation import module_kernels
    from compilerllm.validation.errors import KernelInvalid

    place = checkpoint(tmp_path / "model")
    builder, request = Builder(place), CompileRequest(str(place), target=host_target().name)
    stages: list[str] = []
    monkeypatch.setattr(module_kernels, "compare", lambda *_: "unlike")
    with pytest.raises(KernelInvalid, match=r"embedding.*unlike"):
        builder.verify(request, stages.append)
    assert any(stage.startswith("verify-kernels") for stage in stages)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


def test_a_damaged_artifact_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "model")
    request = CompileRequest(str(tmp_path / "model"), target="cpu-generic", load_format="config")
    key = artifact_key(request, tmp_path / "model")
    place, built = artifact_path(key.digest), []

    def make(*_: object) -> dict[int, Path]:
        write_artifact(place, key=key.to_json())
        built.append(place)
        return {0: place}

    monkeypatch.setattr(compiler, "run_child", make)
    for expected in (False, True):
        assert ensure_artifact(request, tmp_path / "model").hit is expected
    damage(place / "program.so")
    found = ensure_artifact(request, tmp_path / "model")
    assert not found.hit and len(built) == 2
    for text in (found.why, caplog.text):
        assert "program.so does not have the bytes it was written with" in text


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--target", "sm_61"], 1, "unknown CUDA target 'sm_61'"),
        (["--target", "sm_90,avx9"], 1, "unknown target 'avx9'"),
        (["--target", ","], 2, "names no target"),
        (["--target", "sm_90", "--jobs", "0"], 2, "--jobs must be at least 1"),
        (["--target", "sm_90", "--weights", "packed"], 1, "CUDA kernels read dense weights only"),
        (["--target", "sm_90", "--max-num-seqs", "0"], 1, "--max-num-seqs must be"),
    ],
)
def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "model")
    command = [
        "build",
        str(tmp_path / "model"),
        "--output",
        str(tmp_path / "out"),
        "--from-config",
        *arguments,
    ]
    assert main(command) == status
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_has_no_configuration_of_its_own(
    tmp_path: Path, smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*order(smollm2_gguf, tmp_path / "out", "cpu-generic"), "--from-config"]) == 1
    assert "leave out --from-config" in capsys.readouterr().err


def test_weights_are_wanted_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "model")
    assert main(order(tmp_path / "model", tmp_path / "out", "cpu-generic")) == 1
    assert "no .safetensors file" in capsys.readouterr().err


def test_the_manifest_holds_no_time(tmp_path: Path) -> None:
    """Built at level 0; times are beside it."""
    place = checkpoint(tmp_path / "model")
    artifact = build(CompileRequest(str(place), level=0, target="cpu-generic"), place)
    text = (artifact / "manifest.json").read_text()
    assert "seconds" not in text and str(tmp_path) not in text
    manifest = read_manifest(artifact)
    assert manifest is not None and {"captured.ir", "module.ir"} <= manifest["files"].keys()
    log = json.loads(artifact.with_name(artifact.name + ".log.json").read_text())
    assert log["seconds"]["capture"] > 0 and log["model"] == "model" and log["passes"]
