"""chat, complete and run-batch against a live server: what they print, and what stops them."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compilerllm.cli.main import main
from compilerllm.remote.own_server import engine_flags
from tests.server.conftest import Live, Start


def run_chat(live: Live, monkeypatch: pytest.MonkeyPatch, said: str, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    return main(["chat", "--url", live.url + "/v1", *flags])


def test_chat_remembers_until_it_is_reset(
    live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "chat.json"
    said = f"abc\n/save {file}\n/reset\n/system rules\ndef\n/exit\nnever read\n"
    assert run_chat(live, monkeypatch, said, "--max-tokens", "3", "--temperature", "0.5") == 0
    saved = json.loads(file.read_text())
    assert [m["role"] for m in saved] == ["user", "assistant"] and saved[0]["content"] == "abc"
    first, last = live.engine.seen[-2:]
    assert (last.params.max_tokens, last.params.temperature) == (3, 0.5)
    answer = capsys.readouterr().out.splitlines()
    assert answer[0] == saved[1]["content"] and "abc".startswith(answer[0][:3])
    assert len(last.prompt_token_ids) != len(first.prompt_token_ids), (
        "the instructions are there, what was said is not"
    )


def test_chat_sends_history_and_only_what_was_given(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(live.engine.seen)
    assert run_chat(live, monkeypatch, "abc\nabc\n", "--max-tokens", "1") == 0
    first, second = live.engine.seen[before:]
    assert len(second.prompt_token_ids) > 2 * len(first.prompt_token_ids) - 1
    assert first.params.temperature == 1.0, "the server's own"


def test_mistakes_in_a_pipe_are_told_and_end_in_status_1(
    live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_chat(live, monkeypatch, "x " * 3000 + "\n/nothing\nabc\n", "--max-tokens", "3") == 1
    out, err = capsys.readouterr()
    assert "maximum context length" in err and "/nothing" in err and out.strip(), "the last line was answered"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--url", "http://127.0.0.1:1"), "Cannot reach"),
        (("--url", "LIVE", "other"), "no model 'other'"),
        (("--url", "LIVE", "--max-num-seqs", "2"), "--max-num-seqs"),
        (("--api-key", "k"), "give --url"),
    ],
)
def test_chat_refuses_in_words(
    live: Live, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    assert main(["chat", *(live.url if f == "LIVE" else f for f in flags)]) in (1, 2)
    assert says in capsys.readouterr().err


def test_complete(live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    url = ("--url", live.url)
    assert main(["complete", *url, "the quick brown ", "--max-tokens", "2"]) == 0
    out = capsys.readouterr().out.rstrip("\n")
    assert out and "the quick brown ".startswith(out)
    monkeypatch.setattr("sys.stdin", io.StringIO("the fox\n\nfox\n"))
    assert main(["complete", *url, "--max-tokens", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_ctrl_c_stops_the_answer_and_not_the_chat(start: Start) -> None:
    live = start(step_seconds=0.02)
    command = [sys.executable, "-m", "compilerllm", "chat", "--url", live.url, "--max-tokens", "400"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("the quick fox\n")
        process.stdin.flush()
        live.wait_until(lambda: live.engine.num_open == 1, 20)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        live.wait_until(lambda: live.engine.num_open == 0)  # the server stopped too
        process.stdin.write("/exit\n")
        process.stdin.close()
        assert process.stdout.read().endswith(" [stopped]\n")
        assert process.wait(20) == 0


LINES: list[Any] = [
    {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}},
    {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "fox", "max_tokens": 2}},
    {"custom_id": "refused", "method": "POST", "url": "/v1/completions", "body": {"prompt": "fox", "max_tokens": -1}},
    {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "fox"}},
    {"custom_id": "route", "method": "POST", "url": "/v1/nothing", "body": {}},
    {"custom_id": "get", "method": "GET", "url": "/v1/models", "body": {}},
    {"custom_id": "stream", "method": "POST", "url": "/v1/completions", "body": {"prompt": "fox", "stream": True}},
    {"custom_id": "body", "method": "POST", "url": "/v1/completions", "body": []},
    {"method": "POST", "url": "/v1/completions", "body": {"prompt": "fox"}},
    "no object",
]  # fmt: skip
BAD = {
    "line-4": "duplicate_custom_id", "route": "invalid_url", "get": "invalid_method", "stream": "invalid_request",
    "body": "invalid_request", "line-9": "missing_custom_id", "line-10": "invalid_request", "line-12": "invalid_json_line",
}  # fmt: skip


def write_batch(path: Path, lines: list[Any], *raw: str) -> None:
    path.write_text("\n".join([*map(json.dumps, lines), *raw]) + "\n")


def read_answers(path: Path) -> dict[str, Any]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({e["custom_id"] for e in entries}) == len(entries), "something was answered twice"
    return {e["custom_id"]: e for e in entries}


def test_a_batch_with_bad_lines(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(requests, LINES, "", '{"custom_id": ')
    assert main(["run-batch", "-i", str(requests), "-o", str(answers), "--url", live.url]) == 0
    found = read_answers(answers)
    assert {i: e["error"]["code"] for i, e in found.items() if e["error"]} == BAD
    assert all(
        e["response"] is None and e["error"]["message"].startswith("line ")
        for e in found.values()
        if e["error"]
    )
    chat, refused = found["chat"]["response"], found["refused"]["response"]
    assert chat["status_code"] == 200 and chat["body"]["model"] == "fake" and chat["request_id"]
    assert (
        chat["body"]["choices"][0]["message"]["content"] and found["text"]["response"]["status_code"] == 200
    )
    assert refused["status_code"] == 400 and refused["body"]["error"]["param"] == "max_tokens"
    assert "2 answered, 1 refused by the server, 8 bad lines, 0 kept" in capsys.readouterr().err
    before = len(live.engine.seen)
    assert main(["run-batch", "-i", str(requests), "-o", str(answers), "--url", live.url]) == 0
    assert read_answers(answers) == found and len(live.engine.seen) == before


def test_a_killed_batch_goes_on(start: Start, tmp_path: Path) -> None:
    live = start(step_seconds=0.005)
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "the quick fox", "max_tokens": 40, "ignore_eos": True}
    write_batch(requests, [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i in range(30)])
    flags = ["run-batch", "-i", str(requests), "-o", str(answers), "--url", live.url, "--concurrency", "4"]
    with subprocess.Popen([sys.executable, "-m", "compilerllm", *flags], start_new_session=True) as process:
        live.wait_until(lambda: answers.exists() and answers.read_bytes().count(b"\n") >= 6, 30)
        os.kill(process.pid, signal.SIGKILL)
    live.wait_until(lambda: live.engine.num_open == 0)
    done = answers.read_bytes()
    assert 6 <= done.count(b"\n") < 30
    answers.write_bytes(done + b'{"custom_id": "29", "resp')  # as a kill within a write leaves it
    before = len(live.engine.seen)
    assert main(flags) == 0
    assert answers.read_bytes().startswith(done) and set(read_answers(answers)) == {str(i) for i in range(30)}
    assert len(live.engine.seen) - before == 30 - done.count(b"\n")


def test_a_batch_whose_server_is_gone_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_batch(tmp_path / "in.jsonl", LINES)
    flags = [
        "-i",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "out.jsonl"),
        "--url",
        "http://127.0.0.1:1",
    ]
    assert main(["run-batch", *flags]) == 1
    assert "Cannot reach" in capsys.readouterr().err


def test_an_output_that_is_something_else_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_batch(tmp_path / "in.jsonl", LINES)
    (tmp_path / "out.jsonl").write_text("a letter\nto my aunt")
    flags = [
        "-i",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "out.jsonl"),
        "--url",
        "http://127.0.0.1:1",
    ]
    assert main(["run-batch", *flags]) == 1
    assert "no answer of a batch" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "a letter\nto my aunt"


def test_flags_travel_to_a_server_of_ones_own() -> None:
    options = {"model": "m", "max_num_seqs": 4, "enable_prefix_caching": False, "dtype": "auto", "port": 1}
    given = {"model", "max_num_seqs", "enable_prefix_caching", "port"}
    assert engine_flags(options, given) == [
        "--max-num-seqs",
        "4",
        "--no-enable-prefix-caching",
    ] or engine_flags(options, given) == ["--no-enable-prefix-caching", "--max-num-seqs", "4"]
