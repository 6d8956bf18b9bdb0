"""/metrics, read by Prometheus' own parser, and held against the names and buckets of vLLM's."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from compilerllm.runtime.messages import Batch, Ready, Stats
from compilerllm.server.limits import Gate
from compilerllm.server.metrics import Metrics, token_buckets
from compilerllm.server.streams import EngineStreams
from tests.server.conftest import Live, Start
from tests.server.fake_engine import FakeEngine

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"
TEXT = "/v1/completions"
# vLLM 0.33's core metrics.
GAUGES = """engine_sleep_state kv_cache_usage_perc lora_requests_info num_requests_kv_fetch_by_stage num_requests_running
num_requests_waiting num_requests_waiting_by_reason cache_config_info""".split()
COUNTERS = """admission_rejections corrupted_requests estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total
estimated_write_bytes_per_gpu_total external_prefix_cache_hits external_prefix_cache_queries generation_tokens
mm_cache_hits mm_cache_queries num_preemptions prefix_cache_hits prefix_cache_queries prompt_tokens
prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source request_success
spec_decode_num_accepted_tokens_per_pos spec_decode_num_drafts spec_decode_num_draft_tokens
spec_decode_num_accepted_tokens tool_call_parser_invocations watermark_requests""".split()
HISTOGRAMS = """e2e_request_latency_seconds inter_token_latency_seconds iteration_tokens_total
kv_block_idle_before_evict_seconds kv_block_lifetime_seconds kv_block_reuse_gap_seconds request_decode_time_seconds
request_generation_tokens request_inference_time_seconds request_max_num_generation_tokens request_num_preemptions
request_params_max_tokens request_params_n request_prefill_kv_computed_tokens request_prefill_time_seconds
request_prompt_tokens request_queue_time_seconds request_time_per_output_token_seconds
time_to_first_token_seconds""".split()


def families(live: Live) -> dict[str, str]:
    """Name -> type, by the parser, which raises for what is none of its format."""
    text = live.http.get("/metrics").text
    found = {family.name: family.type for family in text_string_to_metric_families(text)}
    # Beside each counter and histogram the client library tells when it was made.
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}


def values(live: Live) -> dict[str, float]:
    text = live.http.get("/metrics").text
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_names_and_types_are_vllm_s_and_the_document_lists_what_is_missing(start: Start) -> None:
    found = families(start({"vllm_metric_names": True}))
    kinds = {**dict.fromkeys(GAUGES, "gauge"), **dict.fromkeys(COUNTERS, "counter")}
    kinds |= dict.fromkeys(HISTOGRAMS, "histogram")
    theirs = {name.removeprefix("vllm:"): kind for name, kind in found.items() if name.startswith("vllm:")}
    ours = {n.removeprefix("compilerllm:"): k for n, k in found.items() if n.startswith("compilerllm:")}
    assert len(theirs) + len(ours) == len(found)
    assert theirs.items() <= kinds.items(), "a name or type that vLLM does not have"
    assert theirs.items() <= ours.items() and len(theirs) >= 26
    text = DOCUMENT.read_text()
    assert not [name for name in kinds if name not in theirs and f"`{name}`" not in text]
    missing = text.partition("Names of vLLM's that are missing")[2]
    assert not [name for name in theirs if f"`{name}`" in missing], "said to be missing, but there"


def test_without_the_switch_there_are_no_names_of_vllm_s(live: Live) -> None:
    assert not [name for name in families(live) if name.startswith("vllm:")]


def test_samples_are_equal_under_both_names(start: Start) -> None:
    live = start({"vllm_metric_names": True})
    assert live.post(TEXT, prompt="hello", max_tokens=4, n=2, ignore_eos=True).status_code == 200
    text = live.http.get("/metrics").text
    for name, number in (
        ("request_params_n_sum", 2.0),
        ("request_params_max_tokens_sum", 4.0),
        ("request_max_num_generation_tokens_sum", 8.0),
        ("request_generation_tokens_sum", 8.0),
        ("request_prompt_tokens_count", 1.0),
        ("request_inference_time_seconds_count", 2.0),
        ("prompt_tokens_cached_total", 6.0),  # three of each sequence's, says the engine
    ):
        for prefix in ("compilerllm", "vllm"):
            assert f'{prefix}:{name}{{engine="0",model_name="fake"}} {number}' in text, name
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="fake"} 2.0' in text


def test_buckets_are_vllm_s(live: Live) -> None:
    bounds: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(live.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bounds.setdefault(family.name.partition(":")[2], []).append(float(sample.labels["le"]))
    assert bounds["time_to_first_token_seconds"][:3] == [0.001, 0.005, 0.01]
    assert bounds["time_to_first_token_seconds"][-4:-1] == [160, 640, 2560]
    assert bounds["inter_token_latency_seconds"][0] == 0.01
    assert bounds["e2e_request_latency_seconds"][-2] == 7680
    assert bounds["request_prompt_tokens"][:-1] == [1, 2, 5, 10, 20, 50, 100, 200, 500]  # of a context of 512
    assert bounds["iteration_tokens_total"][-2] == 16384 and bounds["request_params_n"][:-1] == [
        1,
        2,
        5,
        10,
        20,
    ]
    assert token_buckets(1000) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def test_tokens_of_a_step() -> None:
    class Scripted(FakeEngine):
        async def stream(self):  # type: ignore[no-untyped-def]
            for steps, prompt, generated in ((1, 30, 0), (2, 30, 5), (2, 30, 5), (4, 40, 15), (1, 7, 0)):
                stats = Stats(steps=steps, prompt_tokens=prompt, generation_tokens=generated)
                yield Batch(deltas=[], stats=stats)
            await asyncio.sleep(60)

    async def check() -> None:
        streams = EngineStreams(Scripted(vocab_size=300))
        ready = Ready(
            model="m", target="t", max_model_len=64, vocab_size=9, blocks_total=1, block_size=1, card={}
        )
        metrics = Metrics(streams, ready, "m", Gate(None))
        streams.start()
        while streams.stats.prompt_tokens != 7:
            await asyncio.sleep(0)
        await streams.stop()
        # 30, then 5, then twice 10 as one mean; the engine that begins anew is not counted against the old one.
        assert metrics.registry.get_sample_value(
            "compilerllm:iteration_tokens_total_sum", {"model_name": "m", "engine": "0"}
        ) == pytest.approx(45)

    asyncio.run(check())
