"""CUTLASS instances: their text, keys, refusals, and the C ABI's error codes, none of which needs a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compilerllm.kernels.cutlass import build
from compilerllm.kernels.cutlass.candidates import (
    candidates,
    gated_candidates,
    gemm_fixed,
    grouped_candidates,
)
from compilerllm.kernels.cutlass.instances import TARGET, Instance, of_spec, table_source
from compilerllm.kernels.errors import ArtifactError, BuildFailed, UnsupportedByTarget
from compilerllm.kernels.launch.gpu.cutlass import CutlassError, CutlassLibrary
from compilerllm.kernels.spec import KernelSpec

PLAIN = Instance("bf16", "bf16", (64, 128, 64), schedule="pingpong")


def test_the_text_holds_what_the_instance_says() -> None:
    text = replace(PLAIN, activation="silu", bias=True, cluster=(2, 1)).source()
    assert "cute::Shape<cute::_64, cute::_128, cute::_64>" in text
    assert "cute::Shape<cute::_2, cute::_1, cute::_1>" in text
    assert "LinCombPerColBiasEltAct<cutlass::epilogue::thread::SiLu, " in text
    assert "KernelTmaWarpSpecializedPingpong>" in text and "bias_ptr" in text and "$" not in text
    assert "beta = 1.0f" in replace(PLAIN, residual=True).source()
    assert "StreamKScheduler" in replace(PLAIN, tile=(128, 128, 64), schedule="stream_k").source()
    assert "FP8FastAccum" in Instance("f8e4m3", "bf16", (128, 128, 128)).source()
    grouped = Instance("bf16", "bf16", (128, 128, 64), grouped=True)
    assert "KernelPtrArrayTmaWarpSpecializedCooperative" in grouped.source() and "$" not in grouped.source()
    gated = Instance("bf16", "bf16", (128, 224, 64), (2, 1), activation="silu", gated=True).source()
    assert (
        "rounded(Silu{}(rounded(gate)))" in gated and "Int<224 / (2 * kEach)>" in gated and "$" not in gated
    )


def test_names_and_texts_differ_where_instances_do() -> None:
    made = [i for m in (16, 256, 2048) for i in candidates(m, 4096, 4096)]
    made += [
        *candidates(16, 4096, 4096, "f8e4m3"),
        *grouped_candidates(4096, 4096),
        replace(PLAIN, residual=True),
        *gated_candidates(256, 4096, 4096, "silu"),
        *gated_candidates(256, 4096, 4096, "gelu"),
    ]
    distinct = list(dict.fromkeys(made))
    assert len({i.name for i in distinct}) == len({i.source() for i in distinct}) == len(distinct)
    table = table_source(distinct)
    assert all(f"&{i.name}" in table for i in distinct)


def test_a_spec_gives_its_instance_back() -> None:
    wanted = replace(PLAIN, bias=True, activation="gelu")
    config = tuple(sorted((k, str(v)) for k, v in wanted.config().items()))
    spec = KernelSpec("linear", (), (), TARGET, "library:cutlass_gemm", config)
    assert of_spec(spec) == wanted
    with pytest.raises(UnsupportedByTarget, match="sm_90 only"):
        of_spec(replace(spec, target="cuda-sm_80"))
    with pytest.raises(UnsupportedByTarget, match="not whole"):
        of_spec(replace(spec, config=(("operand", "bf16"),)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operand": "f16"}, "no operand 'f16'"),
        ({"activation": "relu7"}, "no activation"),
        ({"schedule": "cooperative"}, "take pingpong"),
        ({"tile": (48, 128, 64)}, "64 x 16"),
        ({"residual": True, "activation": "silu"}, "before the activation"),
        ({"grouped": True, "bias": True}, "no epilogue"),
    ],
)
def test_refusals_say_why(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedByTarget, match=message):
        replace(PLAIN, **change)  # type: ignore[arg-type]


def test_candidates_refuse_unaligned_rows() -> None:
    with pytest.raises(UnsupportedByTarget, match="K = 100"):
        candidates(16, 4096, 100)
    with pytest.raises(UnsupportedByTarget, match="K = 4104"):
        candidates(16, 4096, 4104, "f8e4m3")
    assert gemm_fixed(PLAIN, 8, 16)["name"] == PLAIN.name


def test_keys_follow_sources_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "headers", lambda: ((), "4.2"))
    monkeypatch.setattr(build, "compiler", lambda: ("nvcc", "release 13.0"))
    key = build.library_key([PLAIN])
    assert key == build.library_key([PLAIN]) != build.library_key([replace(PLAIN, bias=True)])
    monkeypatch.setattr(build, "compiler", lambda: ("nvcc", "release 13.1"))
    assert key != build.library_key([PLAIN])


def test_missing_tools_and_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    build.compiler.cache_clear()
    with pytest.raises(BuildFailed, match="'no-such-nvcc' is not on the PATH"):
        build.compiler()
    with pytest.raises(ArtifactError, match=r"missing\.so"):
        CutlassLibrary(tmp_path / "missing.so")


@pytest.mark.slow
def test_a_library_is_built_and_refuses_bad_calls(tmp_path: Path) -> None:
    try:
        build.compiler(), build.headers()
    except BuildFailed as e:
        pytest.skip(str(e))
    seen: list[tuple[int, int, str]] = []
    library = build.build_library([PLAIN], tmp_path, lambda *x: seen.append(x))
    elsewhere = build.build_library([PLAIN], tmp_path / "another" / "cache")
    assert elsewhere.read_bytes() == library.read_bytes(), "equal bytes wherever it is built"
    made = CutlassLibrary(library)
    assert made.names == (PLAIN.name,) and seen == [(1, 1, PLAIN.name)]
    for instance, k, groups, message in (
        (1, 64, 0, "no such instance"),
        (0, 60, 0, "16 bytes"),
        (0, 64, 2, "no such"),
    ):
        with pytest.raises(CutlassError, match=message):
            made.workspace(instance, 16, 128, k, groups)
    with pytest.raises(CutlassError, match="missing"):
        made.run(0, 0, 0, 0, 0, 0, 16, 128, 64, 0, 0, 0, 0)
    with pytest.raises(CutlassError, match="16 bytes"):
        made.run(0, 4097, 4096, 0, 0, 4096, 16, 128, 64, 0, 0, 0, 0)
    if not torch.cuda.is_available():
        with pytest.raises(CutlassError, match="no GPU"):
            made.run(0, 4096, 4096, 0, 0, 4096, 16, 128, 64, 0, 0, 0, 0)
