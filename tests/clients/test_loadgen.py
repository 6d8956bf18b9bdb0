"""MLPerf's load generator, Server and Offline scenarios: it decides when samples come, and what counts as valid."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

loadgen: Any = pytest.importorskip("mlperf_loadgen")

from tests.clients.conftest import Served  # noqa: E402

pytestmark = pytest.mark.weights
SAMPLES = 64


class System:
    """The system under test: each sample is one completion of 8 tokens, streamed."""

    def __init__(self, served: Served) -> None:
        self._served, self._pool = served, ThreadPoolExecutor(16)
        self._http = httpx.Client(timeout=120)
        self.answered = 0
        self._lock = threading.Lock()

    def issue(self, samples: list[Any]) -> None:
        for sample in samples:
            self._pool.submit(self._answer, sample)

    def _answer(self, sample: Any) -> None:
        body = {"model": self._served.model, "prompt": [100 + sample.index] * 16, "max_tokens": 8, "temperature": 0,
                "ignore_eos": True, "stream": True}  # fmt: skip
        count = 0
        with self._http.stream("POST", self._served.url + "/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if count == 0:
                    loadgen.FirstTokenComplete([loadgen.QuerySampleResponse(sample.id, 0, 0)])
                count += 1
        with self._lock:
            self.answered += answer.status_code == 200
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(sample.id, 0, 0, 8)])

    def close(self) -> None:
        self._pool.shutdown()
        self._http.close()


@pytest.mark.parametrize("scenario", ["Server", "Offline"])
def test_loadgen(served: Served, scenario: str, tmp_path: Path) -> None:
    system = System(served)
    settings = loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, scenario)
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.use_token_latencies = True
    settings.min_duration_ms = 0
    if scenario == "Server":
        settings.server_target_qps = 8
        settings.server_target_latency_percentile = 0.9  # of which so few samples can be certain
        settings.ttft_latency = settings.tpot_latency = 60_000_000_000  # ns: that it ends well, not how fast
        settings.min_query_count = settings.max_query_count = SAMPLES
    else:
        settings.offline_expected_qps = SAMPLES
        settings.min_query_count = SAMPLES  # samples of the one query
    output = loadgen.LogSettings()
    output.log_output.outdir = str(tmp_path)
    sut = loadgen.ConstructSUT(system.issue, lambda: None)
    qsl = loadgen.ConstructQSL(SAMPLES, SAMPLES, lambda _: None, lambda _: None)
    try:
        loadgen.StartTestWithLogSettings(sut, qsl, settings, output)
    finally:
        loadgen.DestroyQSL(qsl)
        loadgen.DestroySUT(sut)
        system.close()
    summary = (tmp_path / "mlperf_log_summary.txt").read_text()
    assert "Result is : VALID" in summary, summary
    entries = (tmp_path / "mlperf_log_detail.txt").read_text().splitlines()
    found = {e["key"]: e["value"] for e in (json.loads(line.removeprefix(":::MLLOG ")) for line in entries)}
    assert found["result_validity"] == "VALID" and system.answered >= SAMPLES
