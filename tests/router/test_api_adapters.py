"""Routes that load and unload LoRA adapters: keys, arguments and errors. Requests during a change: test_adapters.py."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.router.adapters import Adapters, RuntimeAdapter
from penstock.router.config import RouterConfig
from penstock.router.request import Broken, Refused
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import FakeBatcher, make_tokenizer, serving

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = {"lora_name": "sql", "lora_path": "/adapters/sql"}
Send = Callable[..., Awaitable[tuple[int, Any]]]


class FakeReplica:
    """Loads every adapter, but for those in folders that make it fail."""

    def __init__(self) -> None:
        self.adapters: set[str] = set()

    async def load(self, adapter: RuntimeAdapter) -> None:
        if adapter.folder == "/faulty":
            raise Refused(f"adapter {adapter.name}: /faulty/adapter_config.json can't be read: is it an adapter's folder?")
        if adapter.folder == "/deadly":
            raise Broken("shard rank 0 is lost")
        self.adapters.add(adapter.key)

    async def retire(self, key: str) -> None:
        pass

    async def drop(self, key: str) -> None:
        self.adapters.discard(key)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def run(tokenizer: Tokenizer, test: Callable[[Send, FakeBatcher], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        config = RouterConfig(folder="", model="m", **{"max_loras": 2, **settings})
        replica, batcher = FakeReplica(), FakeBatcher(tokenizer)
        adapters = Adapters(config.model, config.adapters, config.max_loras, lambda: [replica])

        async def send(path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            method = "GET" if body is None else "POST"
            async with server.client.request(method, path, json=body, headers=headers) as response:
                return response.status, await (response.json() if response.content_type == "application/json" else response.text())

        async with asyncio.timeout(20), serving(tokenizer, config, batcher, adapters=adapters) as server:
            await test(send, batcher)

    asyncio.run(main())


def test_adapter_is_loaded_used_replaced_and_unloaded(tokenizer: Tokenizer) -> None:
    async def test(send: Send, batcher: FakeBatcher) -> None:
        chat = {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        status, answer = await send("/v1/chat/completions", chat)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
        assert answer["error"]["message"] == "the model `sql` does not exist: this server has `m`"
        status, answer = await send("/vertex", {"instances": [chat]})
        assert (status, answer["error_type"]) == (404, "model_not_found")
        assert answer["error"] == "instances[0]: the model `sql` does not exist: this server has `m`"
        assert await send(LOAD, SQL) == (200, "Success: LoRA adapter 'sql' added successfully.")
        models = (await send("/v1/models"))[1]["data"]
        assert [(model["id"], model.get("parent"), model.get("root")) for model in models] == [
            ("m", None, None),
            ("sql", "m", "/adapters/sql"),
        ]
        assert (await send("/v1/models/sql"))[0] == 200
        for model in ("sql", "m", "tgi"):
            assert (await send("/v1/chat/completions", {**chat, "model": model}))[0] == 200
        assert (await send("/generate", {"inputs": "hi", "parameters": {"adapter_id": "sql"}}))[0] == 200
        first, *others = batcher.requests
        assert first.adapter.startswith("sql#")
        assert [request.adapter for request in others] == ["", "", first.adapter]
        assert (await send(LOAD, {**SQL, "lora_path": "/b", "load_inplace": True}))[0] == 200
        assert (await send("/v1/chat/completions", chat))[0] == 200
        assert batcher.requests[-1].adapter != first.adapter
        assert batcher.requests[-1].cache_key != first.cache_key
        assert await send(UNLOAD, {"lora_name": "sql"}) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert (await send("/v1/chat/completions", chat))[0] == 404
        status, answer = await send("/generate", {"inputs": "hi", "parameters": {"adapter_id": "sql"}})
        assert (status, answer["error_type"]) == (422, "validation")

    run(tokenizer, test)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {"lora_name": "sql"}, 400, "lora_path"),
        (LOAD, {**SQL, "lora_path": " "}, 400, "`lora_path` is empty: name a folder, or OWNER/MODEL"),
        (LOAD, {"lora_name": 3, "lora_path": "/a"}, 400, "lora_name"),
        (LOAD, {**SQL, "lora_name": "a b"}, 400, "`lora_name` must have from 1 to 200"),
        (LOAD, {**SQL, "lora_name": "a,b"}, 400, "no spaces or commas"),
        (LOAD, {**SQL, "lora_name": "m"}, 400, "the model is called m itself"),
        (LOAD, {**SQL, "lora_name": "one"}, 400, "was there from the start"),
        (LOAD, {**SQL, "lora_path": "/faulty"}, 400, "adapter sql: /faulty/adapter_config.json can't be read"),
        (LOAD, {**SQL, "lora_path": "/deadly"}, 503, "shard rank 0 is lost): nothing has changed, try again"),
        (UNLOAD, {"lora_name": "sql"}, 404, "there is no adapter `sql`; loaded are: one"),
        (UNLOAD, {"lora_name": "one"}, 400, "was there from the start"),
        (UNLOAD, {}, 400, "lora_name"),
    ],
)
def test_invalid_load_or_unload_is_refused_with_the_reason(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    async def test(send: Send, batcher: FakeBatcher) -> None:
        found, answer = await send(path, body)
        assert found == status
        assert message in answer["error"]["message"]
        assert [model["id"] for model in (await send("/v1/models"))[1]["data"]] == ["m", "one"]

    run(tokenizer, test, adapters=("one",))


def test_loading_more_adapters_than_max_loras_is_a_409(tokenizer: Tokenizer) -> None:
    async def test(send: Send, batcher: FakeBatcher) -> None:
        assert (await send(LOAD, SQL))[0] == 200
        status, answer = await send(LOAD, {**SQL, "lora_name": "other"})
        assert (status, answer["error"]["code"]) == (409, "conflict")
        assert "all 1 places for adapters are taken: unload one" in answer["error"]["message"]

    run(tokenizer, test, max_loras=1)


def test_max_loras_0_disables_the_routes(tokenizer: Tokenizer) -> None:
    async def test(send: Send, batcher: FakeBatcher) -> None:
        for path in (LOAD, UNLOAD):
            status, answer = await send(path, SQL)
            assert (status, answer["error"]["code"]) == (404, "not_found")
            assert "--max-loras" in answer["error"]["message"]
        assert (await send("/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "hi"}]}))[0] == 200

    run(tokenizer, test, max_loras=0)


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        ({}, ["", "client", "boss"], []),
        ({"api_keys": ("client",)}, ["client"], ["", "boss"]),
        ({"admin_key": "boss"}, ["boss"], ["", "client"]),
        ({"api_keys": ("client",), "admin_key": "boss"}, ["boss"], ["", "client"]),
    ],
)
def test_loading_needs_the_admin_key_or_else_an_api_key(
    tokenizer: Tokenizer, settings: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    async def test(send: Send, batcher: FakeBatcher) -> None:
        for key in refused:
            for path in (LOAD, UNLOAD):
                assert (await send(path, SQL, key))[0] == 401
        for key in allowed:
            assert [(await send(path, SQL, key))[0] for path in (LOAD, LOAD, UNLOAD, UNLOAD)] == [200, 400, 200, 404]

    run(tokenizer, test, **settings)
