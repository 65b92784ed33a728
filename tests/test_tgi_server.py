"""A deployment of TGI that has switched its image to penstock: TGI's executable, environment variables and routes, with a real
server.
"""

import http.client
import importlib.metadata
import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.tests import serving

ENVIRONMENT = {
    "MODEL_ID": "demo-draft",
    "MAX_CONCURRENT_REQUESTS": "32",
    "HOSTNAME": "pod-0",
    "DEVICE": "cpu",
    "THREADS": "1",
    "USAGE_STATS": "off",
}
PROMPT = "Once upon a time"
LONG = 1300  # tokens: more than the 1024 that TGI computes at a time
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving.serve("--max-best-of", "2", environment=ENVIRONMENT) as server:
        yield server.url


def post(url: str, path: str, body: object) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=60) as answer:
        return json.load(answer)


def no_end_bias(url: str) -> dict[str, Any]:
    """Parameters that forbid the demo model's end tokens."""
    ends = [
        token["id"] for text in ("<|end|>", "</s>") for token in post(url, "/tokenize", {"inputs": text}) if token["text"] == text
    ]
    return {"logit_bias": {str(id): -100.0 for id in ends}}


def test_text_generation_launcher_is_an_entry_point() -> None:
    [entry] = importlib.metadata.entry_points(group="console_scripts", name="text-generation-launcher")
    assert entry.value == "penstock.launcher.tgi:main"


def test_answer_has_exactly_max_new_tokens_tokens(url: str) -> None:
    parameters = {"max_new_tokens": LONG, "details": True, **no_end_bias(url)}
    details = post(url, "/generate", {"inputs": PROMPT, "parameters": parameters})["details"]
    assert (details["generated_tokens"], details["finish_reason"]) == (LONG, "length")
    assert len(details["tokens"]) == LONG


def test_seeded_answer_is_the_same_alone_and_among_concurrent_requests(url: str) -> None:
    """The others are unseeded, and of different lengths."""
    parameters = {"max_new_tokens": 60, "do_sample": True, "seed": 7, "temperature": 1.2, "details": True}
    body = {"inputs": PROMPT, "parameters": parameters}
    alone = post(url, "/generate", body)
    unseeded = {"do_sample": True, **no_end_bias(url)}  # unseeded requests might otherwise end at once
    with ThreadPoolExecutor(12) as pool:
        others = [{"inputs": PROMPT[:size], "parameters": {"max_new_tokens": 5 * size, **unseeded}} for size in range(1, 12)]
        running = [pool.submit(post, url, "/generate", other) for other in others]
        batched = post(url, "/generate", body)
        assert all(task.result()["generated_text"] for task in running)
    assert batched["generated_text"] == alone["generated_text"]
    assert [token["id"] for token in batched["details"]["tokens"]] == [token["id"] for token in alone["details"]["tokens"]]
    assert alone["details"]["seed"] == 7


def test_invocations_vertex_and_chat_tokenize_answer_as_the_other_routes(url: str) -> None:
    parameters = {"max_new_tokens": 6}
    [whole] = post(url, "/invocations", {"inputs": PROMPT, "parameters": parameters})
    text = post(url, "/generate", {"inputs": PROMPT, "parameters": parameters})["generated_text"]
    assert whole["generated_text"] == PROMPT + text
    chat = {**CHAT, "max_tokens": 6, "temperature": 0}
    answer = post(url, "/invocations", chat)["choices"][0]["message"]["content"]
    found = post(url, "/vertex", {"instances": [{"inputs": PROMPT, "parameters": parameters}, chat]})
    assert found == {"predictions": [text, answer]}
    tokens = post(url, "/chat_tokenize", CHAT)
    assert tokens["templated_text"].startswith("".join(token["text"] for token in tokens["tokenize_response"])[:20])
    ids = [token["id"] for token in tokens["tokenize_response"]]
    assert post(url, "/detokenize", {"tokens": ids})["prompt"] == tokens["templated_text"]


def test_tgi_metrics_are_exported(url: str) -> None:
    post(url, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}})
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert values["tgi_request_success"] >= 1
    assert values["tgi_request_count"] >= values["tgi_request_success"]
    assert values["tgi_request_validation_duration_count"] >= 1
    assert 0 < values["tgi_request_validation_duration_sum"] < 60
    assert values["tgi_batch_next_size_sum"] >= 1
    assert values["tgi_batch_max_total_tokens"] > 2048
    assert values["tgi_queue_size"] == 0


def test_body_of_ten_megabytes_is_refused_with_413_at_once(url: str) -> None:
    """A simple client sends the whole body before it reads the response."""
    host = url.removeprefix("http://")
    for data in (json.dumps({"inputs": "x" * 10_000_000}).encode(), b"[" * 10_000_000):
        connection = http.client.HTTPConnection(host, timeout=10)
        began = time.monotonic()
        connection.request("POST", "/generate", data)
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["error_type"]) == (413, "payload_too_large")
        assert time.monotonic() - began < 9  # without waiting for a timeout
        connection.close()
    assert post(url, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}})["generated_text"]
