"""schemathesis over our openapi.json: made-up requests, good and bad, get an answer that the description allows."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.server.conftest import Live


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_breaks_the_description(shared: Live, mode: str) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    checks = [not_a_server_error, response_schema_conformance, content_type_conformance]
    described = schemathesis.openapi.from_url(shared.url + "/openapi.json", wait_for_schema=10)
    tried = []
    for result in described.get_all_operations():
        operation = result.ok()
        if mode == "NEGATIVE" and not operation.body:
            continue  # nothing of it can be made wrong
        tried.append(operation.label)

        @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
        def ask(case: Any) -> None:
            case.call_and_validate(checks=checks, timeout=30)

        ask()
    assert "POST /v1/chat/completions" in tried and shared.http.get("/health").status_code == 200
