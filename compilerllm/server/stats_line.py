"""A line of the log every so many seconds: throughput, queue, KV cache, prefix hits. None while nothing happens."""

import asyncio
import logging

from compilerllm.runtime.messages import Stats
from compilerllm.server.streams import EngineStreams

log = logging.getLogger("compilerllm.server")


def stats_line(before: Stats, now: Stats, seconds: float) -> str | None:
    """What happened between two snapshots ``seconds`` apart; None if nothing did, and nothing waits."""
    still = now.steps == before.steps and now.generation_tokens == before.generation_tokens
    if still and not now.num_running and not now.num_waiting:
        return None
    if now.steps < before.steps:  # another engine process, which counts from zero
        before = Stats()
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    shared = f", prefix hits {hits / queries:.0%}" if queries > 0 else ""
    preempted = now.num_preemptions - before.num_preemptions
    return (
        f"Prompt {prompt:.1f} tokens/s, generation {generated:.1f} tokens/s; running {now.num_running}, waiting "
        f"{now.num_waiting}; KV cache {now.blocks_used / max(now.blocks_total, 1):.1%}{shared}"
        + (f", preempted {preempted}" if preempted > 0 else "")
    )


async def log_stats(streams: EngineStreams, interval: float) -> None:
    """Log the line every ``interval`` seconds, until cancelled."""
    clock = asyncio.get_running_loop().time
    before, since = streams.stats, clock()
    while True:
        await asyncio.sleep(interval)
        now, at = streams.stats, clock()
        if line := stats_line(before, now, at - since):
            log.info("%s", line)
        before, since = now, at
