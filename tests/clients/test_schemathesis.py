"""schemathesis over our openapi.json: made-up requests, good and bad, get an answer that the description allows."""

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.server.conftest import Live

assert CHECKS is not None


@pytest.fixture
def described(shared: Live) -> object:
    return schemathesis.openapi.from_url(shared.url + "/openapi.json", wait_for_schema=10)


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_description(case: "schemathesis.Case") -> None:
    case.call_and_validate(
        checks=[not_a_server_error, response_schema_conformance, content_type_conformance], timeout=30
    )
