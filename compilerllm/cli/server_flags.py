"""Flags of commands that talk with a running server, and text from it piece by piece."""

import argparse
import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from compilerllm.cli.flags import UsageError
from compilerllm.config import CONFIG_PARTS, flag_of

if TYPE_CHECKING:
    pass

DEFAULT_URL = "http://127.0.0.1:8000/v1"
# Flags of ``add_sampling_flags`` that are fields of a request, under the same name.
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


class Piece(NamedTuple):
    """A piece of an answer. ``thought``: of the reasoning that stands before it."""

    text: str
    thought: bool = False


def add_server_flags(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    group = parser.add_argument_group("a running server")
    group.add_argument(
        "--url", metavar="URL", default=default,
        help="Of any server with OpenAI's API, such as http://127.0.0.1:8000/v1.",
    )  # fmt: skip
    group.add_argument("--api-key", metavar="KEY", help="Sent as a bearer token.")


def refuse_engine_flags(args: argparse.Namespace) -> None:
    """Raise ``UsageError`` where a flag is for an engine of this machine, but a server is asked."""
    names = {f.name for part in CONFIG_PARTS.values() for f in dataclasses.fields(part)} - {"model"}
    if wrong := sorted(names & args.given):
        raise UsageError(f"{flag_of(wrong[0])} is for a model of this machine; with --url it has no effect")


@contextmanager
def server_of(args: argparse.Namespace) -> Iterator[str]:
    """The URL of --url's server, or of one for MODEL and the engine's flags that ends with the block."""
    if args.url is not None:
        refuse_engine_flags(args)
        yield args.url
        return
    if args.api_key is not None:
        raise UsageError("--api-key is for a server that runs: give --url too")
    from compilerllm.remote.own_server import engine_flags, own_server

    with own_server(args.model, engine_flags(vars(args), args.given)) as url:
        yield url


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Fields for a request: only what was given, so that the server's own defaults hold for the rest."""
    return {name: getattr(args, name) for name in SAMPLING if name in args.given}


class Conversation:
    """A server, and what is asked of it, for one thread at a time."""

    def __init__(self, url: str, api_key: str | None, model: str | None, options: dict[str, Any]) -> None:
        """Raises ``ServerUnreachable``, ``ServerRefused`` or ``NoModel`` at once, not at the first question."""
        from compilerllm.remote.server import RemoteServer

        self._runner = asyncio.Runner()
        self._server: RemoteServer = RemoteServer(url, api_key)
        self._options = options
        try:
            self.model: str = self._runner.run(self._server.find_model(model))
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return self._server.url

    def close(self) -> None:
        self._runner.run(self._server.close())
        self._runner.close()

    def chat(self, messages: list[dict[str, Any]]) -> Iterator[Piece]:
        for choice in self._choices("/v1/chat/completions", {"messages": messages}):
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                yield Piece(thought, True)
            if text := delta.get("content"):
                yield Piece(text)

    def complete(self, prompt: str) -> Iterator[Piece]:
        for choice in self._choices("/v1/completions", {"prompt": prompt}):
            if text := choice.get("text"):
                yield Piece(text)

    def _choices(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """An interrupt ends the request before it is raised here, so that the server stops too."""
        events = self._server.stream(path, {"model": self.model, **body, **self._options})

        async def following() -> dict[str, Any] | None:
            return await anext(events, None)

        try:
            while (event := self._runner.run(following())) is not None:
                yield from event.get("choices") or ()
        finally:
            self._runner.run(events.aclose())  # type: ignore[attr-defined]
