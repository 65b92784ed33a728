"""A server whose shard computes by Triton's kernels, in the interpreter, answers as one that computes by plain torch."""

import json
import urllib.request
from typing import Any

import pytest

from penstock.tests import serving
from penstock.tests.inprocess import LIGHT

pytest.importorskip("triton")

SMALL = ("--max-total-tokens=96", "--kv-pages=32", "--max-batch-prefill-tokens=16", "--max-batch-size=2", "--max-best-of=1")
BEAMS = {"inputs": "Once", "parameters": {"max_new_tokens": 4, "details": True, "num_beams": 2}}
ASKED = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 5, "details": True, "top_n_tokens": 2}}
SAMPLED = {"inputs": "Once", "parameters": {"max_new_tokens": 4, "details": True, "temperature": 1.3, "top_p": 0.95, "seed": 11}}


def answers(*flags: str) -> list[list[int]]:
    def ask(url: str, asked: dict[str, Any]) -> list[int]:
        request = urllib.request.Request(f"{url}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [token["id"] for token in json.load(answer)["details"]["tokens"]]

    with serving.serve(str(LIGHT), *SMALL, *flags) as server:
        return [ask(server.url, asked) for asked in (ASKED, SAMPLED, BEAMS)]


def test_the_same_tokens_by_triton() -> None:
    """As a GPU's shard does it: with steps that are begun before the last one's tokens are known."""
    assert answers("--penstock-kernels", "triton", "--overlap", "on") == answers("--penstock-kernels", "reference")
