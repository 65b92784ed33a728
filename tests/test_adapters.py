"""LoRA adapters over HTTP: a server with two ranks answers as transformers does with the adapter merged into the weights, by TGI's
and OpenAI's routes, also after a shard or the router was killed. Adapters come from flags, or are loaded while the server runs.
"""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from penstock.launcher import hub
from penstock.tests.serving import Server, serve
from penstock.tests.shard import lora

PROMPTS = ("Once upon a time", "One day a girl named Mia", "There was a dog. The dog", "In the forest")
COUNT = 24


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each adapter, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: lora.adapter(hub.DEMO_FOLDER, folder / name, len(name), rank=4, lora_alpha=0.5) for name in ("one", "other")}


@pytest.fixture(scope="module")
def models(adapters: dict[str, Path]) -> dict[str, Any]:
    """transformers' models by adapter name, with the adapter merged into the weights; '' is the base model."""
    transformers.utils.logging.disable_progress_bar()
    folders = {"": hub.DEMO_FOLDER}
    for name, place in adapters.items():
        folders[name] = lora.merged(hub.DEMO_FOLDER, place, place.parent / f"{name}-merged", 0.5 / 4)
    return {name: transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for name, each in folders.items()}


@pytest.fixture(scope="module")
def server(adapters: dict[str, Path]) -> Iterator[Server]:
    adapter_list = ",".join(f"{name}={place}" for name, place in adapters.items())
    with serve("--num-shard", "2", "--page-size", "4", "--lora-adapters", adapter_list) as started:
        yield started


def generate(server: Server, prompt: str, adapter: str) -> list[int]:
    parameters = {"max_new_tokens": COUNT, "details": True, "adapter_id": adapter or None}
    data = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
    request = urllib.request.Request(f"{server.url}/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return [token["id"] for token in json.load(response)["details"]["tokens"]]


def expected_by_transformers(models: dict[str, Any], prompt: str, adapter: str) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(hub.DEMO_FOLDER)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = models[adapter].generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=COUNT)
    found: list[int] = answer[0, tokens.shape[1] :].tolist()
    return found


def test_concurrent_requests_are_answered_by_the_adapter_that_each_names(server: Server, models: dict[str, Any]) -> None:
    """Each request is sent twice, all at once, so that a prefix cached under one adapter would be found by another if mixed up."""
    requests = [(prompt, adapter) for prompt in PROMPTS for adapter in ("", "one", "other")] * 2
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = list(threads.map(lambda each: generate(server, *each), requests))
    expected_answers = [expected_by_transformers(models, prompt, adapter) for prompt, adapter in requests]
    assert answers == expected_answers
    assert expected_answers[0] != expected_answers[1] != expected_answers[2] != expected_answers[0]


def test_openai_client_selects_an_adapter_by_model_name(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    models = client.models.list().data
    assert [model.id for model in models[1:]] == ["one", "other"]
    texts = {
        name: client.completions.create(model=name, prompt=PROMPTS[0], max_tokens=COUNT, temperature=0).choices[0].text
        for name in ("one", "other", models[0].id, "gpt-4")
    }
    assert texts["gpt-4"] == texts[models[0].id]
    assert len(set(texts.values())) == 3


def test_requests_with_adapters_continue_after_a_shard_is_killed(server: Server, models: dict[str, Any]) -> None:
    shard = next(pid for pid, line in server.children().items() if "penstock.shard" in line)
    requests = [(prompt, adapter) for prompt in PROMPTS for adapter in ("", "one", "other")]
    with ThreadPoolExecutor(len(requests)) as threads:
        running = [threads.submit(generate, server, *each) for each in requests]
        os.kill(shard, signal.SIGKILL)
        assert [each.result() for each in running] == [expected_by_transformers(models, *each) for each in requests]


# Adapters that are loaded while the server runs


@pytest.fixture(scope="module")
def dynamic_server() -> Iterator[Server]:
    with serve("--num-shard", "2", "--page-size", "4", "--max-loras", "2", "--max-lora-rank", "4") as started:
        yield started


def post(server: Server, path: str, **body: object) -> tuple[int, str]:
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def load_adapter(server: Server, name: str, folder: Path, **more: object) -> tuple[int, str]:
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(folder), **more)


def loaded_names(server: Server) -> list[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as response:
        return [model["id"] for model in json.load(response)["data"]][1:]


def unload_all(server: Server) -> None:
    for name in loaded_names(server):
        assert post(server, "/v1/unload_lora_adapter", lora_name=name)[0] == 200


def test_adapters_loaded_at_runtime_survive_the_death_of_a_shard_and_of_the_router(
    dynamic_server: Server, adapters: dict[str, Path], models: dict[str, Any]
) -> None:
    """First a shard is killed, so all adapters must be loaded again; then the router, so the new one must find those that are
    loaded."""
    unload_all(dynamic_server)
    for name, folder in adapters.items():
        assert load_adapter(dynamic_server, name, folder) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    requests = [(prompt, adapter) for prompt in PROMPTS for adapter in ("", "one", "other")]
    expected_answers = [expected_by_transformers(models, *each) for each in requests]
    with ThreadPoolExecutor(len(requests)) as threads:
        assert list(threads.map(lambda each: generate(dynamic_server, *each), requests)) == expected_answers
        running = [threads.submit(generate, dynamic_server, *each) for each in requests]
        os.kill(next(pid for pid, line in dynamic_server.children().items() if "penstock.shard" in line), signal.SIGKILL)
        assert [each.result() for each in running] == expected_answers
    router = next(pid for pid, line in dynamic_server.children().items() if "penstock.router" in line)
    os.kill(router, signal.SIGKILL)
    while dynamic_server.health() != 200 or router in dynamic_server.children():
        time.sleep(0.05)
    assert loaded_names(dynamic_server) == ["one", "other"]
    assert generate(dynamic_server, *requests[1]) == expected_answers[1]


def test_a_replaced_adapter_does_not_use_the_prefix_cache_of_the_old_one(
    dynamic_server: Server, adapters: dict[str, Path], models: dict[str, Any]
) -> None:
    """Adapters are unloaded and replaced under the same name; a name that is not loaded gives 404, a full server 409."""
    unload_all(dynamic_server)
    assert [load_adapter(dynamic_server, name, adapters[name])[0] for name in ("one", "other")] == [200, 200]
    assert loaded_names(dynamic_server) == ["one", "other"]
    assert generate(dynamic_server, PROMPTS[0], "one") == expected_by_transformers(models, PROMPTS[0], "one")
    assert load_adapter(dynamic_server, "third", adapters["one"])[0] == 409
    assert post(dynamic_server, "/v1/unload_lora_adapter", lora_name="other")[0] == 200
    assert load_adapter(dynamic_server, "one", adapters["other"], load_inplace=True)[0] == 200
    assert generate(dynamic_server, PROMPTS[0], "one") == expected_by_transformers(models, PROMPTS[0], "other")
    assert post(dynamic_server, "/v1/unload_lora_adapter", lora_name="one")[0] == 200
    status, text = post(dynamic_server, "/v1/completions", model="one", prompt="x", max_tokens=1)
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")
    assert loaded_names(dynamic_server) == []


def test_loading_an_unreadable_adapter_or_one_of_too_high_rank_gives_400(dynamic_server: Server, tmp_path: Path) -> None:
    unload_all(dynamic_server)
    status, text = load_adapter(dynamic_server, "mine", tmp_path)
    assert status == 400
    assert "adapter mine: " in text
    assert "adapter_config.json can't be read" in text
    status, text = load_adapter(dynamic_server, "mine", lora.adapter(hub.DEMO_FOLDER, tmp_path / "high", 1, rank=8))
    assert status == 400
    assert "adapter mine has rank 8, and there is room for 4: start the server with --max-lora-rank 8" in text
