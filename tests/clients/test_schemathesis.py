"""Requests that schemathesis generates from the OpenAPI document, valid and invalid: no server error, and no response that is
not in the document.

Needs schemathesis (extra `clients`).
"""

import warnings
from collections.abc import Iterator

import pytest

from penstock.tests import serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the libraries' own warnings
    schemathesis = pytest.importorskip("schemathesis")
    import hypothesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

# Not whether everything is accepted that the types allow: they don't express value ranges, which are reported by 422 messages.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 15  # for each route; four times as many found no other faults
NO_DEADLINE = 3600.0  # seconds
TOKEN_LIMIT_FIELDS = {"max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "min_tokens"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving.serve("--max-total-tokens", "256") as server:
        yield server.url


def cheap(body: object) -> object:
    """The same body with at most 8 tokens requested, to save time, and with no deadline that could be missed: that is a 504."""
    if isinstance(body, list):
        return [cheap(each) for each in body]
    if not isinstance(body, dict):
        return body
    return {name: _limited(name, value) if type(value) in (int, float) else cheap(value) for name, value in body.items()}


def _limited(name: str, value: float) -> float:
    if name == "timeout" and value > 0:
        return max(value, NO_DEADLINE)
    return min(value, 8) if name in TOKEN_LIMIT_FIELDS and type(value) is int else value


def routes() -> list[str]:
    from penstock.router.api.openapi import OPERATIONS

    return [operation.path for operation in OPERATIONS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", routes())
def test_responses_to_generated_requests_conform_to_the_openapi_document(url: str, path: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for operation in schema.get_all_operations():
        example = operation.ok()
        if example.path != path:
            continue

        @hypothesis.settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=example.as_strategy())
        def one(case: "schemathesis.Case") -> None:
            case.body = cheap(case.body)
            case.call_and_validate(timeout=60, checks=CHECKS)

        one()
