"""Prometheus metrics, under vLLM's names with the prefix ``compilerllm:``."""

import os
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from compilerllm import compile_watch
from compilerllm.runtime.messages import Ready
from compilerllm.server.streams import EngineStreams

_PREFIX = "compilerllm:"
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_LONG_SECONDS = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (1, 2, 5, 10, 20)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class _EngineCollector(Collector):
    """What the engine counts itself, read at each scrape."""

    def __init__(self, streams: EngineStreams, ready: Ready, model: str) -> None:
        self._streams, self._ready, self._model = streams, ready, model

    def collect(self) -> Iterator[Metric]:
        stats, ready = self._streams.stats, self._ready
        gauges = {
            "num_requests_running": ("Requests in the running batch.", stats.num_running),
            "num_requests_waiting": ("Requests that wait to be scheduled.", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Share of KV blocks in use, 0 to 1.",
                stats.blocks_used / max(stats.blocks_total, 1),
            ),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up among shared blocks.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in shared blocks.", stats.prefix_hits),
            "num_preemptions": ("Requests preempted to free blocks.", stats.num_preemptions),
            "prompt_tokens": ("Prompt tokens computed.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "engine_steps": ("Steps the engine ran.", stats.steps),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        events = CounterMetricFamily(
            _PREFIX + "compile_events",
            "Compilations by server and engine since their start; a warm server has none.",
            labels=["model_name", "kind"],
        )
        for kind, value in self._compile_events().items():
            events.add_metric([self._model, kind], value)
        yield events
        info = GaugeMetricFamily(
            _PREFIX + "cache_config_info",
            "The KV cache.",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        info.add_metric([self._model, str(ready.block_size), str(ready.blocks_total)], 1)
        yield info

    def _compile_events(self) -> dict[str, int]:
        """By kind, of this process and the engine's; an engine in this process has counted for both."""
        engine = self._streams.stats.compile_events
        here = self._ready.pid == os.getpid()
        return compile_watch.add(engine, {} if here else compile_watch.counts())


class Metrics:
    """What the server observes of each request. One registry an app, so that tests can have several."""

    def __init__(self, streams: EngineStreams, ready: Ready, model: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineCollector(streams, ready, model))
        self._model = model
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens.", _SECONDS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _SECONDS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _LONG_SECONDS)
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Arrival to first scheduling.", _LONG_SECONDS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Scheduling to first token.", _LONG_SECONDS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "First token to last.", _LONG_SECONDS
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens generated.", _TOKENS)
        self.params_n = self._histogram("request_params_n", "Sequences asked for.", _COUNTS)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens asked for.", _TOKENS
        )
        self._success = Counter(
            _PREFIX + "request_success",
            "Requests that ended, by finish reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(_PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(model_name=self._model)

    def finished(self, reason: str) -> None:
        self._success.labels(model_name=self._model, finished_reason=reason).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
