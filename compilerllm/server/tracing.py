"""OpenTelemetry traces: a span for each request that generates, with the attributes that vLLM's spans have."""

import time
from typing import TYPE_CHECKING, Any

from compilerllm import __version__
from compilerllm.server.errors import TracingNotInstalled
from compilerllm.server.records import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Headers = list[tuple[bytes, bytes]]


class Tracing:
    """Makes spans with ``provider``'s processors, under the trace that a request's ``traceparent`` names."""

    def __init__(self, provider: "TracerProvider", model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("compilerllm", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestRecord, headers: Headers) -> None:
        """Make the span of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        shift = time.time() - time.monotonic()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(record.arrived + shift),
            attributes=self._attributes(record),
        )
        if record.first_token:
            span.add_event("first_token", timestamp=_nanoseconds(record.first_token + shift))
        if record.status >= 500 or "error" in record.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(record.ended + shift))

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "http.request.method": record.method,
            "url.path": record.path,
            "http.response.status_code": record.status,
            "gen_ai.request.id": record.request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            "gen_ai.usage.completion_tokens": record.completion_tokens,
            "gen_ai.latency.e2e": record.ended - record.arrived,
        }
        if (params := record.params) is not None:
            attributes |= {
                "gen_ai.request.n": params.n,
                "gen_ai.request.max_tokens": params.max_tokens or 0,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.usage.num_sequences": record.num_sequences,
                "gen_ai.response.finish_reasons": sorted(record.finish_reasons),
            }
        if record.first_token:
            decode = record.last_token - record.first_token
            attributes |= {
                "gen_ai.latency.time_to_first_token": record.first_token - record.arrived,
                "gen_ai.latency.time_in_queue": record.queue_seconds,
                "gen_ai.latency.time_in_model_prefill": record.prefill_seconds,
                "gen_ai.latency.time_in_model_decode": decode,
                "gen_ai.latency.time_in_model_inference": record.prefill_seconds + decode,
            }
        return attributes

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def open_tracing(endpoint: str, model: str) -> Tracing:
    """Spans are sent to ``endpoint`` in batches, by a thread. Raises ``TracingNotInstalled``."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingNotInstalled() from error
    provider = TracerProvider(resource=Resource.create({"service.name": "compilerllm"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider, model)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
