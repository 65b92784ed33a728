"""A deployment of TGI that has changed its image: TGI's executable, its environment, its routes, all of it real."""

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
LONG = 1300  # tokens: TGI computes 1024 at a time
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving.serve("--max-best-of", "2", environment=ENVIRONMENT) as server:
        yield server.url


def post(url: str, path: str, body: object) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=60) as answer:
        return json.load(answer)


def endless(url: str) -> dict[str, Any]:
    """Parameters under which the demo model never ends by itself."""
    ends = [
        token["id"] for text in ("<|end|>", "</s>") for token in post(url, "/tokenize", {"inputs": text}) if token["text"] == text
    ]
    return {"logit_bias": {str(id): -100.0 for id in ends}}


def test_the_executable_is_installed() -> None:
    [entry] = importlib.metadata.entry_points(group="console_scripts", name="text-generation-launcher")
    assert entry.value == "penstock.launcher.tgi:main"


def test_an_answer_is_as_long_as_was_asked(url: str) -> None:
    parameters = {"max_new_tokens": LONG, "details": True, **endless(url)}
    details = post(url, "/generate", {"inputs": PROMPT, "parameters": parameters})["details"]
    assert (details["generated_tokens"], details["finish_reason"]) == (LONG, "length")
    assert len(details["tokens"]) == LONG


def test_a_seed_says_all(url: str) -> None:
    """Alone, streamed, and among others that come and go."""
    parameters = {"max_new_tokens": 60, "do_sample": True, "seed": 7, "temperature": 1.2, "details": True}
    body = {"inputs": PROMPT, "parameters": parameters}
    alone = post(url, "/generate", body)
    going = {"do_sample": True, **endless(url)}  # others that nobody seeds might say nothing
    with ThreadPoolExecutor(12) as pool:
        others = [{"inputs": PROMPT[:size], "parameters": {"max_new_tokens": 5 * size, **going}} for size in range(1, 12)]
        busy = [pool.submit(post, url, "/generate", other) for other in others]
        among = post(url, "/generate", body)
        assert all(task.result()["generated_text"] for task in busy)
    assert among["generated_text"] == alone["generated_text"]
    assert [token["id"] for token in among["details"]["tokens"]] == [token["id"] for token in alone["details"]["tokens"]]
    assert alone["details"]["seed"] == 7


def test_the_clouds_routes(url: str) -> None:
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


def test_dashboards_find_their_numbers(url: str) -> None:
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


def test_ten_megabytes_get_an_answer_at_once(url: str) -> None:
    """A plain client sends all of it before it reads."""
    host = url.removeprefix("http://")
    for data in (json.dumps({"inputs": "x" * 10_000_000}).encode(), b"[" * 10_000_000):
        connection = http.client.HTTPConnection(host, timeout=10)
        began = time.monotonic()
        connection.request("POST", "/generate", data)
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["error_type"]) == (413, "payload_too_large")
        assert time.monotonic() - began < 9  # not after a wait for anything
        connection.close()
    assert post(url, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}})["generated_text"]
