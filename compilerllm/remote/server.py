"""A server of OpenAI's API: ask it, stream from it, and its refusals as errors."""

import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from compilerllm.errors import CompilerLLMError
from compilerllm.remote.http import HttpClient, Response


class ServerRefused(CompilerLLMError):
    """The server answered with an error. ``status``: of HTTP; 200 where the error came within a stream."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answered {status}: {message}" if status != 200 else f"{url}: {message}")
        self.status, self.message = status, message


class NoModel(CompilerLLMError):
    """The server serves no model, or none that was asked for."""


class RemoteServer:
    """One server, for one event loop. Paths are the API's, such as /v1/models, whatever path the URL has before its /v1."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """url: with /v1, which is added where the URL has no path. Raises ``InvalidParameter``."""
        url = url.rstrip("/")
        self.url = url if "://" not in url or urlsplit(url).path else url + "/v1"
        self._before = urlsplit(self.url).path.removesuffix("/v1")
        self.http = HttpClient(self.url, {"Authorization": f"Bearer {api_key}"} if api_key else {})

    async def close(self) -> None:
        await self.http.close()

    async def send(self, path: str, body: Any) -> Response:
        """The answer, whatever its status. Raises ``ServerUnreachable``."""
        return await self.http.request("POST", self._before + path, json.dumps(body).encode())

    async def ask(self, path: str, body: Any = None) -> Any:
        """The answer's JSON; without a body it is a GET. Raises ``ServerRefused`` or ``ServerUnreachable``."""
        answer = await (
            self.http.request("GET", self._before + path) if body is None else self.send(path, body)
        )
        return await self._read(answer)

    async def stream(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """The events' data, until [DONE] or the end. Raises ``ServerRefused``, also where an event is an error.

        Left early, the connection is closed, and the server stops generating.
        """
        answer = await self.send(path, {**body, "stream": True})
        if answer.status != 200 or "text/event-stream" not in answer.headers.get("content-type", ""):
            await self._read(answer)
            raise ServerRefused(self.url, answer.status, "no stream came where one was asked for")
        async for event in events_of(answer):
            if isinstance(event, dict) and event.get("error"):
                answer.close()
                raise ServerRefused(self.url, 200, _message(event))
            yield event

    async def find_model(self, wanted: str | None) -> str:
        """``wanted``, or the first model that the server lists. Raises ``NoModel``."""
        listed = await self.ask("/v1/models")
        names = [m["id"] for m in listed.get("data", []) if isinstance(m, dict) and "id" in m]
        if wanted is None and not names:
            raise NoModel(f"{self.url} lists no model. Name one with --model.")
        if wanted is not None and names and wanted not in names:
            raise NoModel(f"{self.url} has no model {wanted!r}; it has {', '.join(names)}.")
        return wanted or str(names[0])

    async def _read(self, answer: Response) -> Any:
        text = await answer.read()
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if answer.status != 200:
            message = _message(content) if content is not None else text[:200].decode(errors="replace")
            raise ServerRefused(self.url, answer.status, message)
        if content is None:
            raise ServerRefused(self.url, answer.status, "its answer is no JSON. Check --url")
        return content


async def events_of(answer: Response) -> AsyncIterator[dict[str, Any]]:
    """What follows ``data:`` in an event stream, parsed, until [DONE]."""
    lines = answer.lines()
    done = False
    try:
        async for line in lines:  # also after [DONE]: read to its end, the connection can be used again
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data:") and not done:
                yield msgspec.json.decode(line[5:])
    except msgspec.DecodeError as error:
        raise ServerRefused(answer.client.url, 200, f"an event of its stream is no JSON: {error}") from error
    finally:
        await lines.aclose()  # type: ignore[attr-defined]


def _message(content: Any) -> str:
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
