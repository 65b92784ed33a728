"""Adapters from outside: a server of two ranks answers by each of them, by all routes, also after a shard was killed."""

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
    """Folders by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: lora.adapter(hub.DEMO_FOLDER, folder / name, len(name), rank=4, lora_alpha=0.5) for name in ("one", "other")}


@pytest.fixture(scope="module")
def models(adapters: dict[str, Path]) -> dict[str, Any]:
    """transformers' models, with each adapter in their weights."""
    transformers.utils.logging.disable_progress_bar()
    folders = {"": hub.DEMO_FOLDER}
    for name, place in adapters.items():
        folders[name] = lora.merged(hub.DEMO_FOLDER, place, place.parent / f"{name}-merged", 0.5 / 4)
    return {name: transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for name, each in folders.items()}


@pytest.fixture(scope="module")
def server(adapters: dict[str, Path]) -> Iterator[Server]:
    named = ",".join(f"{name}={place}" for name, place in adapters.items())
    with serve("--num-shard", "2", "--page-size", "4", "--lora-adapters", named) as with_two:
        yield with_two


def ask(server: Server, prompt: str, adapter: str) -> list[int]:
    parameters = {"max_new_tokens": COUNT, "details": True, "adapter_id": adapter or None}
    data = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
    request = urllib.request.Request(f"{server.url}/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return [token["id"] for token in json.load(response)["details"]["tokens"]]


def expected(models: dict[str, Any], prompt: str, adapter: str) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(hub.DEMO_FOLDER)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = models[adapter].generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=COUNT)
    found: list[int] = answer[0, tokens.shape[1] :].tolist()
    return found


def test_each_request_by_its_own(server: Server, models: dict[str, Any]) -> None:
    """All at once, some of them twice, so that what one has left in the cache would be found by another."""
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in ("", "one", "other")] * 2
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(lambda each: ask(server, *each), asked))
    told = [expected(models, prompt, adapter) for prompt, adapter in asked]
    assert found == told
    assert told[0] != told[1] != told[2] != told[0]


def test_openais_client_names_it_as_the_model(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    models = client.models.list().data
    assert [model.id for model in models[1:]] == ["one", "other"]
    texts = {
        name: client.completions.create(model=name, prompt=PROMPTS[0], max_tokens=COUNT, temperature=0).choices[0].text
        for name in ("one", "other", models[0].id, "gpt-4")
    }
    assert texts["gpt-4"] == texts[models[0].id]
    assert len(set(texts.values())) == 3


def test_it_goes_on_where_a_shard_was_killed(server: Server, models: dict[str, Any]) -> None:
    shard = next(pid for pid, line in server.children().items() if "penstock.shard" in line)
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in ("", "one", "other")]
    with ThreadPoolExecutor(len(asked)) as threads:
        going = [threads.submit(ask, server, *each) for each in asked]
        os.kill(shard, signal.SIGKILL)
        assert [each.result() for each in going] == [expected(models, *each) for each in asked]


# Those that come while it runs


@pytest.fixture(scope="module")
def roomy() -> Iterator[Server]:
    with serve("--num-shard", "2", "--page-size", "4", "--max-loras", "2", "--max-lora-rank", "4") as with_two:
        yield with_two


def post(server: Server, path: str, **body: object) -> tuple[int, str]:
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def load(server: Server, name: str, folder: Path, **more: object) -> tuple[int, str]:
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(folder), **more)


def named(server: Server) -> list[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as response:
        return [model["id"] for model in json.load(response)["data"]][1:]


def clear(server: Server) -> None:
    for name in named(server):
        assert post(server, "/v1/unload_lora_adapter", lora_name=name)[0] == 200


def test_they_come_while_it_runs_and_go_on_where_processes_were_killed(
    roomy: Server, adapters: dict[str, Path], models: dict[str, Any]
) -> None:
    """A shard first, so that all are loaded anew; then the router, so that another one finds those that there are."""
    clear(roomy)
    for name, folder in adapters.items():
        assert load(roomy, name, folder) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in ("", "one", "other")]
    told = [expected(models, *each) for each in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        assert list(threads.map(lambda each: ask(roomy, *each), asked)) == told
        going = [threads.submit(ask, roomy, *each) for each in asked]
        os.kill(next(pid for pid, line in roomy.children().items() if "penstock.shard" in line), signal.SIGKILL)
        assert [each.result() for each in going] == told
    router = next(pid for pid, line in roomy.children().items() if "penstock.router" in line)
    os.kill(router, signal.SIGKILL)
    while roomy.health() != 200 or router in roomy.children():
        time.sleep(0.05)
    assert named(roomy) == ["one", "other"]
    assert ask(roomy, *asked[1]) == told[1]


def test_they_go_and_others_take_their_names(roomy: Server, adapters: dict[str, Path], models: dict[str, Any]) -> None:
    """What one has left in the cache is not found by who takes its name."""
    clear(roomy)
    assert [load(roomy, name, adapters[name])[0] for name in ("one", "other")] == [200, 200]
    assert named(roomy) == ["one", "other"]
    assert ask(roomy, PROMPTS[0], "one") == expected(models, PROMPTS[0], "one")
    assert load(roomy, "third", adapters["one"])[0] == 409
    assert post(roomy, "/v1/unload_lora_adapter", lora_name="other")[0] == 200
    assert load(roomy, "one", adapters["other"], load_inplace=True)[0] == 200
    assert ask(roomy, PROMPTS[0], "one") == expected(models, PROMPTS[0], "other")
    assert post(roomy, "/v1/unload_lora_adapter", lora_name="one")[0] == 200
    status, text = post(roomy, "/v1/completions", model="one", prompt="x", max_tokens=1)
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")
    assert named(roomy) == []


def test_one_that_can_not_be_loaded(roomy: Server, tmp_path: Path) -> None:
    clear(roomy)
    status, text = load(roomy, "mine", tmp_path)
    assert status == 400
    assert "adapter mine: " in text
    assert "adapter_config.json can't be read" in text
    status, text = load(roomy, "mine", lora.adapter(hub.DEMO_FOLDER, tmp_path / "high", 1, rank=8))
    assert status == 400
    assert "adapter mine has rank 8, and there is room for 4: start the server with --max-lora-rank 8" in text
