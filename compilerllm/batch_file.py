"""OpenAI's batch files: a request a line in, an answer a line out. A run that was killed goes on where it was.

In:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
Out: {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

As OpenAI's, a refusal by the server is a response with its status; ``error`` is for a line that was never asked. Lines
are appended whole, in the order in which answers come; ``custom_id`` says which is whose.
"""

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compilerllm.errors import CompilerLLMError
from compilerllm.remote.http import NotHttp, ServerUnreachable
from compilerllm.remote.server import RemoteServer

# Routes that a batch may ask for: POST, JSON in, JSON out.
ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank",
    "/score", "/rerank", "/v2/rerank", "/pooling", "/classify", "/v1/messages",
)  # fmt: skip
_RETRIED = (429, 503)  # the server says that it may have room, or be back, in a moment


class BatchFileInvalid(CompilerLLMError):
    """A file of requests or answers cannot be read or written."""


class ServerGone(CompilerLLMError):
    """The server no longer answers; what is left has no answer yet."""

    def __init__(self, left: int, reason: str) -> None:
        super().__init__(f"{left} requests have no answer yet. {reason} The same command goes on with them.")


@dataclass(frozen=True)
class Task:
    """One request of the file."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line that is no request. It gets an error in the answers."""

    line: int
    custom_id: str
    code: str
    message: str


@dataclass
class Tally:
    """How a run went."""

    answered: int = 0  # with status 200
    refused: int = 0  # by the server
    bad_lines: int = 0
    kept: int = 0  # answered by an earlier run


def read_tasks(path: Path) -> list[Task | BadLine]:
    """The file's requests in order; blank lines are left out. Raises ``BatchFileInvalid``."""
    try:
        with path.open("rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise BatchFileInvalid(f"cannot read {path}: {error.strerror or error}") from error
    found: list[Task | BadLine] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task = _read_task(number, line)
        if task.custom_id in seen:
            text = f"line {number}: the custom_id {task.custom_id!r} was there before"
            task = BadLine(number, f"line-{number}", "duplicate_custom_id", text)
        seen.add(task.custom_id)
        found.append(task)
    return found


def _read_task(number: int, line: bytes) -> Task | BadLine:
    name = f"line-{number}"

    def bad(code: str, message: str) -> BadLine:
        return BadLine(number, name, code, f"line {number}: {message}")

    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return bad("invalid_json_line", f"no JSON: {error}")
    if not isinstance(entry, dict):
        return bad("invalid_request", "a JSON object is wanted")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return bad("missing_custom_id", "custom_id must be a text")
    name = custom_id
    if entry.get("method", "POST") != "POST":
        return bad("invalid_method", f"method must be POST, but is {entry['method']!r}")
    url = entry.get("url")
    if url not in ROUTES:
        return bad("invalid_url", f"url must be one of {', '.join(ROUTES)}, but is {url!r}")
    body = entry.get("body")
    if not isinstance(body, dict):
        return bad("invalid_request", "body must be a JSON object")
    if body.get("stream"):
        return bad("invalid_request", "stream has no meaning in a batch")
    return Task(number, custom_id, url, body)


def read_answered(path: Path) -> set[str]:
    """The custom_ids that ``path`` answers already. A half-written last line, of a run that was killed, is cut off.

    Raises ``BatchFileInvalid`` where the file holds something else than answers.
    """
    if not path.exists():
        return set()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BatchFileInvalid(f"cannot read {path}: {error.strerror or error}") from error
    whole = content.rfind(b"\n") + 1
    answered = set()
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            entry = json.loads(line)
            answered.add(entry["custom_id"])
            entry["response"], entry["error"]
        except (ValueError, KeyError, TypeError) as error:
            raise BatchFileInvalid(
                f"{path}, line {number}, is no answer of a batch, so that the run cannot go on there. Name another "
                "output, or remove it."
            ) from error
    if whole < len(content):
        os.truncate(path, whole)
    return answered


class AnswerFile:
    """Where answers go, a whole line at a time."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise BatchFileInvalid(f"cannot write {path}: {error.strerror or error}") from error

    def write(self, custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        entry = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        line = memoryview(json.dumps(entry, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        while line:
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)


async def run_tasks(
    server: RemoteServer,
    tasks: list[Task],
    answers: AnswerFile,
    concurrency: int,
    tally: Tally,
    model: str,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Ask for all tasks, ``concurrency`` at a time. model: for bodies that name none.

    Raises ``ServerGone`` once the server cannot be reached; what was answered by then is in the file.
    """
    waiting: Iterator[Task] = iter(tasks)
    gone: list[Exception] = []

    async def work() -> None:
        for task in waiting:
            if gone:
                return
            try:
                response = await _ask(server, task, model)
            except (ServerUnreachable, NotHttp) as error:
                gone.append(error)
                return
            ok = response["status_code"] == 200
            answers.write(task.custom_id, response, None)
            tally.answered += ok
            tally.refused += not ok
            on_end()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(tasks))):
            group.create_task(work())
    if gone:
        raise ServerGone(len(tasks) - tally.answered - tally.refused, str(gone[0]))


async def _ask(server: RemoteServer, task: Task, model: str) -> dict[str, Any]:
    body = task.body if "model" in task.body else {**task.body, "model": model}
    for attempt in range(20):
        answer = await server.send(task.url, body)
        text = await answer.read()
        if answer.status not in _RETRIED:
            break
        wait = answer.headers.get("retry-after", "")
        await asyncio.sleep(min(float(wait) if wait.isdecimal() else 0.25 * 2**attempt, 30.0))
    try:
        content = json.loads(text)
    except ValueError:
        content = text.decode(errors="replace")
    number = answer.headers.get("x-request-id") or (content.get("id") if isinstance(content, dict) else None)
    return {"status_code": answer.status, "request_id": number or uuid.uuid4().hex, "body": content}
