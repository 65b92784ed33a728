"""A server whose shard uses the Triton kernels, in Triton's interpreter, answers as one that uses the reference in plain torch."""

import json
import urllib.request
from typing import Any

import pytest

from penstock.tests import serving
from penstock.tests.inprocess import SMALL_MODEL

pytest.importorskip("triton")

SMALL_LIMITS = ("--max-total-tokens=96", "--kv-pages=32", "--max-batch-prefill-tokens=16", "--max-batch-size=2", "--max-best-of=1")
BEAMS = {"inputs": "Once", "parameters": {"max_new_tokens": 4, "details": True, "num_beams": 2}}
GREEDY = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 5, "details": True, "top_n_tokens": 2}}
SAMPLED = {"inputs": "Once", "parameters": {"max_new_tokens": 4, "details": True, "temperature": 1.3, "top_p": 0.95, "seed": 11}}


def answers(*flags: str) -> list[list[int]]:
    def ask(url: str, body: dict[str, Any]) -> list[int]:
        request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [token["id"] for token in json.load(answer)["details"]["tokens"]]

    with serving.serve(str(SMALL_MODEL), *SMALL_LIMITS, *flags) as server:
        return [ask(server.url, body) for body in (GREEDY, SAMPLED, BEAMS)]


def test_server_with_triton_kernels_generates_the_same_tokens_as_with_reference_kernels() -> None:
    """With overlap as on GPUs: a step begins before the previous step's tokens are known on the host."""
    assert answers("--penstock-kernels", "triton", "--overlap", "on") == answers("--penstock-kernels", "reference")
