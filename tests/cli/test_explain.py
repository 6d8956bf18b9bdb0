"""compilerllm explain's command line: mistakes are told, with what there is instead."""

from pathlib import Path

import pytest

from compilerllm.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bucket", "decode-1", "--query-len", "3"], "leave out --bucket"),
        (["--query-len", "8", "--context", "4"], "--context 4 is shorter"),
        (["--bandwidth", "-3"], "'-3' is no number above 0"),
        (["--batch-size", "0"], "no whole number"),
        (["--measure", "--from-config"], "leave one out"),
        (["--mesure"], "did you mean --measure"),
    ],
)
def test_flags_that_do_not_go_together(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["explain", str(tmp_path / "model.gguf"), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", str(tmp_path / "nothing.gguf")]) == 1
    assert "nothing.gguf" in capsys.readouterr().err


def test_a_damaged_artifact(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    assert main(["explain", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "manifest.json") in said and "Traceback" not in said


def test_measuring_an_artifact_needs_its_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert main(["explain", str(tmp_path), "--measure"]) == 2
    assert "--checkpoint MODEL" in capsys.readouterr().err
