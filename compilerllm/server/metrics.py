"""Prometheus metrics, under vLLM's names with the prefix ``compilerllm:``, and if asked for ``vllm:`` too."""

import os
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from compilerllm import compile_watch
from compilerllm.runtime.messages import Ready, Stats
from compilerllm.server.limits import Gate
from compilerllm.server.streams import EngineStreams

_PREFIX = "compilerllm:"
_VLLM_PREFIX = "vllm:"
_LABELS = ("model_name", "engine")
_ENGINE = "0"  # one engine a server
# The bounds of vLLM's buckets, by which its dashboards compute quantiles.
_FIRST_TOKEN_SECONDS = (
    *(
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
    ),
    *(160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
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
    ),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COUNTS = (1, 2, 5, 10, 20)
_REASONS = ("stop", "length", "abort", "error")
_OURS = frozenset(("engine_steps", "compile_events", "http_requests_open"))  # vLLM has none such
CONTENT_TYPE = CONTENT_TYPE_LATEST


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``most``."""
    bounds = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= most)


class _EngineCollector(Collector):
    """What the engine counts itself, read at each scrape."""

    def __init__(self, streams: EngineStreams, ready: Ready, model: str, gate: Gate) -> None:
        self._streams, self._ready, self._gate = streams, ready, gate
        self._names = [model, _ENGINE]

    def collect(self) -> Iterator[Metric]:
        stats, ready = self._streams.stats, self._ready
        gauges = {
            "num_requests_running": ("Requests in the running batch.", stats.num_running),
            "num_requests_waiting": ("Requests that wait to be scheduled.", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Share of KV blocks in use, 0 to 1.",
                stats.blocks_used / max(stats.blocks_total, 1),
            ),
            "http_requests_open": ("HTTP requests that are being answered.", self._gate.num_open),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up among shared blocks.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in shared blocks.", stats.prefix_hits),
            "num_preemptions": ("Requests preempted to free blocks.", stats.num_preemptions),
            "prompt_tokens": ("Prompt tokens computed.", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "engine_steps": ("Steps the engine ran.", stats.steps),
            "admission_rejections": (
                "Requests refused because too many are open or wait.",
                self._gate.num_refused + self._streams.num_refused,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            gauge.add_metric(self._names, value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
            counter.add_metric(self._names, value)
            yield counter
        events = CounterMetricFamily(
            _PREFIX + "compile_events",
            "Compilations by server and engine since their start; a warm server has none.",
            labels=[*_LABELS, "kind"],
        )
        for kind, value in self._compile_events().items():
            events.add_metric([*self._names, kind], value)
        yield events
        info = GaugeMetricFamily(
            _PREFIX + "cache_config_info",
            "The KV cache.",
            labels=[*_LABELS, "block_size", "num_gpu_blocks"],
        )
        info.add_metric([*self._names, str(ready.block_size), str(ready.blocks_total)], 1)
        yield info

    def _compile_events(self) -> dict[str, int]:
        """By kind, of this process and the engine's; an engine in this process has counted for both."""
        engine = self._streams.stats.compile_events
        here = self._ready.pid == os.getpid()
        return compile_watch.add(engine, {} if here else compile_watch.counts())


class Histogram(Collector):
    """A histogram that one thread observes: a bisection and two additions, where prometheus_client's own takes locks and
    walks through the buckets, for every token of every stream."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: dict[str, str],
        buckets: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(
            list(self._labels.values()), list(zip(bounds, accumulate(self._counts), strict=True)), self._sum
        )
        yield family


class _Renamed(Collector):
    """The families of a registry that vLLM has too, under its prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            name = family.name.removeprefix(_PREFIX)
            if name in _OURS:
                continue
            renamed = Metric(_VLLM_PREFIX + name, family.documentation, family.type)
            for sample in family.samples:
                sample = sample._replace(name=_VLLM_PREFIX + sample.name.removeprefix(_PREFIX))
                renamed.samples.append(sample)
            yield renamed


class Metrics:
    """What the server observes of each request. One registry an app, so that tests can have several."""

    def __init__(
        self, streams: EngineStreams, ready: Ready, model: str, gate: Gate, *, vllm_names: bool = False
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineCollector(streams, ready, model, gate))
        self._vllm = CollectorRegistry(auto_describe=False) if vllm_names else None
        if self._vllm is not None:
            self._vllm.register(_Renamed(self.registry))
        self._names = {"model_name": model, "engine": _ENGINE}
        seconds, tokens = self._histogram, token_buckets(ready.max_model_len)
        self.time_to_first_token = seconds(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_SECONDS
        )
        self.inter_token_latency = seconds(
            "inter_token_latency_seconds", "Between two tokens.", _TOKEN_SECONDS
        )
        self.time_per_output_token = seconds(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_SECONDS
        )
        self.e2e = seconds("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_SECONDS)
        self.queue_time = seconds(
            "request_queue_time_seconds", "Arrival to first scheduling.", _REQUEST_SECONDS
        )
        self.prefill_time = seconds(
            "request_prefill_time_seconds", "Scheduling to first token.", _REQUEST_SECONDS
        )
        self.decode_time = seconds("request_decode_time_seconds", "First token to last.", _REQUEST_SECONDS)
        self.inference_time = seconds(
            "request_inference_time_seconds", "Scheduling to last token.", _REQUEST_SECONDS
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were computed, not shared.", tokens
        )
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens generated.", tokens)
        self.max_num_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Most tokens that a request's sequences may have.", tokens
        )
        self.params_n = self._histogram("request_params_n", "Sequences asked for.", _COUNTS)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens asked for.", tokens
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed or generated in a step.", _STEP_TOKENS
        )
        self._cached = Counter(
            _PREFIX + "prompt_tokens_cached",
            "Prompt tokens that were shared, not computed.",
            _LABELS,
            registry=self.registry,
        ).labels(**self._names)
        self._success = Counter(
            _PREFIX + "request_success",
            "Requests that ended, by finish reason.",
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        for reason in _REASONS:  # so that a rate over one that has not come yet is 0, not nothing
            self._success.labels(**self._names, finished_reason=reason)
        self._last = Stats()
        streams.on_stats = self._observe_step

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, self._names, buckets, self.registry)

    def finished(self, reason: str) -> None:
        self._success.labels(**self._names, finished_reason=reason).inc()

    def prompt_computed(self, tokens: int, cached: int) -> None:
        """A prompt of ``tokens`` was computed, but for the ``cached`` ones that were shared."""
        self._cached.inc(cached)
        self._computed.observe(tokens - cached)

    def _observe_step(self, stats: Stats) -> None:
        """The engine's counts after a step. Where several came at once, their mean stands for one."""
        before, self._last = self._last, stats
        steps = stats.steps - before.steps
        if steps > 0:  # else it idles, or began to count anew
            done = (
                stats.prompt_tokens
                + stats.generation_tokens
                - before.prompt_tokens
                - before.generation_tokens
            )
            self._step_tokens.observe(max(done, 0) / steps)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry) + (
            generate_latest(self._vllm) if self._vllm is not None else b""
        )
