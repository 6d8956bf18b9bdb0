"""``--config FILE``, and flags that there are not."""

import argparse
import re
from pathlib import Path

import pytest

from compilerllm.cli import serve
from compilerllm.cli.config_file import InvalidConfigFile
from compilerllm.cli.flags import Parser, UsageError, read_config, read_engine_config
from compilerllm.cli.main import main
from compilerllm.cli.other_flags import WHAT_INSTEAD
from compilerllm.server.config import SERVER_PARTS, ServerConfig


def parse(*words: str) -> argparse.Namespace:
    parser = Parser(prog="compilerllm serve")
    serve.add_arguments(parser)
    args, rest = parser.parse_known_args(words)
    parser.refuse_unknown(rest)
    return args


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(
        """# the team's server
model: org/name
max-num-seqs: 64
max_model_len: 4096
port: 9000
api-key: [one, two]
allowed-origins: https://a.example,https://b.example
enable-prefix-caching: false
access-log: true
memory: 24GiB
"""
    )
    return path


def test_a_file_is_as_good_as_flags(file: Path) -> None:
    args = parse("--config", str(file))
    engine, server = read_engine_config(args), read_config(args, ServerConfig)
    assert engine.model.model == "org/name" and engine.model.max_model_len == 4096
    assert engine.scheduler.max_num_seqs == 64 and not engine.cache.enable_prefix_caching
    assert {"max_num_seqs", "max_model_len", "memory"} <= set(engine.given)
    assert server.port == 9000 and server.api_key == ("one", "two") and server.access_log
    assert server.allowed_origins == ("https://a.example", "https://b.example")


@pytest.mark.parametrize("order", [0, 1])
def test_the_command_line_wins(file: Path, order: int) -> None:
    flags = ["--port", "1234", "--api-key", "three", "--no-access-log"]
    config = [f"--config={file}"]
    args = parse("mine.gguf", *(config + flags if order else flags + config))
    server = read_config(args, ServerConfig)
    assert (server.port, server.api_key, server.access_log) == (1234, ("three",), False)
    assert read_engine_config(args).model.model == "mine.gguf" and args.max_num_seqs == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 4", r"server.yaml: unknown flag 'max-num-seq'; did you mean max-num-seqs\?"),
        ("gpu-memory-utilization: 0.9", "here it is memory-utilization"),
        ("tensor_parallel_size: 4", "not yet"),
        ("config: other.yaml", "unknown flag 'config'"),
        ("help: true", "unknown flag 'help'"),
        ("access-log: 1", "access-log must be true or false, but is 1"),
        ("port: true", "port cannot be True"),
        ("port: {a: 1}", "port cannot be"),
        ("port: many", "invalid int value"),
        ("dtype: int3", "invalid choice"),
        ("port: [1, 2]", "port cannot be"),
    ],
)
def test_a_file_with_a_mistake(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        parse("--config", str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "a flag a line"),
        ("just words", "a flag a line"),
        ("a: [", "is not YAML"),
        ("1: 2", "a flag a line"),
        ("port: 1\nport: 2", "line 2: port stands twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "stands twice"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfigFile, match=message):
        parse("--config", str(path))


def test_two_files_are_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="--config can be given once"):
        parse("--config", str(file), f"--config={file}")


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigFile, match="No such file"):
        parse("--config", str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    assert parse("--config", str(tmp_path / "empty")).port == 8000


def test_flags_of_others_name_ours_or_say_not_yet(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="compilerllm serve")
    serve.add_arguments(parser)
    ours = {option for action in parser._actions for option in action.option_strings}
    assert not ours & set(WHAT_INSTEAD), "a flag that there is needs no substitute"
    for flag, text in WHAT_INSTEAD.items():
        for named in re.findall(r"--[a-z][a-z-]+", text):
            assert named in ours | {"--measure"}, f"{flag} points to {named}, which there is not"
    assert main(["serve", "m.gguf", "--gpu-memory-utilization", "0.9"]) == 2
    assert main(["serve", "m.gguf", "-tp", "2"]) == 2
    assert main(["serve", "m.gguf", "--prot", "2"]) == 2
    first, second, third = capsys.readouterr().err.split("compilerllm: ")[1:]
    assert first.startswith("--gpu-memory-utilization: here it is --memory-utilization")
    assert second.startswith("-tp: not yet: a server runs on one GPU") and "docs/cli.md" in second
    assert third.startswith("unknown flag '--prot'; did you mean --port?")


def test_help_has_a_group_for_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert text.startswith("usage: compilerllm serve [MODEL] [FLAGS]\n")
    for title in SERVER_PARTS.values():
        assert f"\n{title}:\n" in text
