"""Beam searches as a feed: the engine is asked step by step, and each beam comes as one delta when all has ended."""

from collections.abc import Sequence

import msgspec

from compilerllm.runtime.beams import BeamOptions, BeamSearch
from compilerllm.runtime.messages import Delta, Request
from compilerllm.server.streams import EngineStreams, Feed


class BeamFeed(Feed):
    """What ``EngineStreams.submit`` gives, of sequences of which those of one prompt are its beams."""

    def __init__(
        self, streams: EngineStreams, requests: Sequence[Request], width: int, options: BeamOptions
    ) -> None:
        """``requests``: ``width`` for each prompt, in order. Raises ``InvalidParameter`` for too many beams."""
        super().__init__(streams, [], limit=len(requests))
        self._names = [
            [r.request_id for r in requests[i : i + width]] for i in range(0, len(requests), width)
        ]
        self._searches = [BeamSearch(_of_width(first, width), options) for first in requests[::width]]
        self._step: Feed | None = None
        self._first: list[Delta | None] = [None] * len(self._searches)  # what a search's first step took
        self._given = False

    async def read(self) -> list[Delta]:
        """All beams of all prompts, once; the failure of a step as that of the first sequence."""
        if self._given or self._closed:
            return []
        self._given = True
        while running := [search for search in self._searches if not search.done]:
            answers = await self._ask([r for search in running for r in search.requests()])
            if self._closed:
                return []
            failed = next((d for d in answers.values() if d.finish_reason == "error"), None)
            if failed is not None:
                return [msgspec.structs.replace(failed, request_id=self._names[0][0])]
            for i, search in enumerate(self._searches):
                if self._first[i] is None:
                    self._first[i] = answers[search.requests()[0].request_id]
            for search in running:
                search.advance(answers)
        return [delta for i in range(len(self._searches)) for delta in self._ended(i)]

    async def _ask(self, requests: list[Request]) -> dict[str, Delta]:
        """The one delta of each request; less if the feed is closed meanwhile, or one fails."""
        self._step = self._streams.submit(requests)
        answers: dict[str, Delta] = {}
        try:
            while deltas := await self._step.read():
                answers |= {delta.request_id: delta for delta in deltas}
                if any(delta.finish_reason == "error" for delta in deltas):
                    break
        finally:
            self._step.close()
        return answers

    def _ended(self, number: int) -> list[Delta]:
        """The beams of a prompt; the best one's delta tells of the prompt."""
        names = self._names[number]
        found = [
            msgspec.structs.replace(delta, request_id=name)
            for name, (_, delta) in zip(names, self._searches[number].results(), strict=True)
        ]
        first = self._first[number]
        assert first is not None
        told = {n: getattr(first, n) for n in ("num_cached_tokens", "queue_seconds", "prefill_seconds")}
        return [msgspec.structs.replace(found[0], **told), *found[1:]]

    def close(self) -> None:
        super().close()
        if self._step is not None:
            self._step.close()


def _of_width(request: Request, width: int) -> Request:
    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, n=width))
