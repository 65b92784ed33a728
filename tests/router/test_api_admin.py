"""Admin routes that add, drain and remove replicas: keys, arguments and errors. Requests during a change: test_fleet.py."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from penstock.router.api.openapi import document
from penstock.router.config import RouterConfig
from penstock.router.replica import Conflict, Replica, Unknown
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import FakeBatcher, make_tokenizer, serving

KEY = {"Authorization": "Bearer boss"}
CLIENT = {"Authorization": "Bearer client"}
Send = Callable[..., Awaitable[tuple[int, Any]]]


class FakeReplicas:
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    @property
    def replicas(self) -> list[Replica]:
        return [self._one("0"), self._one("1")]

    def _one(self, name: str) -> Replica:
        if name == "nobody":
            raise Unknown("there is no replica nobody; there are: 0")
        state = "drained" if name == "1" else "ready"
        return Replica(
            name=name, addresses=("unix:/b" if name == "1" else "unix:/a",), state=state, stage=state, requests=1, load=20, pages=64
        )

    def serves(self, name: str) -> bool:
        return self._one(name).name == "0"

    def join(self, addresses: Sequence[str], name: str = "") -> Replica:
        self.calls.append(("join", *addresses, name))
        if name == "0":
            raise Conflict("there is a replica 0 already: choose another name")
        return self._one(name or "1")

    def retire(self, name: str, move: bool = False) -> Replica:
        self.calls.append(("retire", name, move))
        return self._one(name)

    async def remove(self, name: str) -> None:
        self.calls.append(("remove", name))
        self._one(name)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def run(tokenizer: Tokenizer, test: Callable[[Send, FakeReplicas], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        replicas = FakeReplicas()
        config = RouterConfig(folder="", model="m", **{"admin_key": "boss", **settings})

        async def send(method: str, path: str, **options: Any) -> tuple[int, Any]:
            async with server.client.request(method, path, **{"headers": KEY, **options}) as response:
                return response.status, await response.json() if response.content_type == "application/json" else None

        async with asyncio.timeout(20), serving(tokenizer, config, FakeBatcher(tokenizer), replicas) as server:
            await test(send, replicas)

    asyncio.run(main())


ROUTES = [("GET", ""), ("POST", ""), ("POST", "/0/drain"), ("DELETE", "/0")]


@pytest.mark.parametrize("hostname", ["0.0.0.0", "127.0.0.1", "::1", "localhost"])
def test_admin_routes_are_404_without_an_admin_key(tokenizer: Tokenizer, hostname: str) -> None:
    """Also from the same machine: the client may be a proxy, which by default doesn't tell for whom it asks."""

    async def test(send: Send, replicas: FakeReplicas) -> None:
        for method, path in ROUTES:
            for headers in ({}, {"Authorization": "Bearer "}, KEY):
                status, answer = await send(method, f"/admin/replicas{path}", headers=headers, json={"address": "h:1"})
                assert (status, answer["error_type"]) == (404, "not_found")
                assert "--admin-key" in answer["error"]
        assert replicas.calls == []

    run(tokenizer, test, hostname=hostname, admin_key="")


def test_admin_routes_need_the_admin_key_and_other_routes_an_api_key(tokenizer: Tokenizer) -> None:
    async def test(send: Send, replicas: FakeReplicas) -> None:
        for method, path in ROUTES:
            for headers in ({}, CLIENT, {"Authorization": "Bearer bos"}, {"Authorization": "boss"}):
                status, answer = await send(method, f"/admin/replicas{path}", headers=headers, json={"address": "h:1"})
                assert (status, answer["error_type"]) == (401, "unauthorized")
        assert replicas.calls == []
        status, answer = await send("GET", "/admin/replicas", headers=KEY)
        assert (status, answer["replicas"][0]["name"]) == (200, "0")
        assert (await send("GET", "/info", headers=KEY))[0] == 401  # the admin key is no API key
        assert (await send("GET", "/info", headers=CLIENT))[0] == 200

    run(tokenizer, test, admin_key="boss", api_keys=("client",), hostname="0.0.0.0")


def test_api_key_does_not_open_admin_routes_without_an_admin_key(tokenizer: Tokenizer) -> None:
    async def test(send: Send, replicas: FakeReplicas) -> None:
        for method, path in ROUTES:
            assert (await send(method, f"/admin/replicas{path}", headers=CLIENT, json={"address": "h:1"}))[0] == 404
        assert replicas.calls == []

    run(tokenizer, test, api_keys=("client",), admin_key="")


def test_join_drain_and_remove_reach_the_fleet(tokenizer: Tokenizer) -> None:
    async def test(send: Send, replicas: FakeReplicas) -> None:
        body = {"address": "10.0.0.1:8000, [fd00::1]:8001", "name": "far"}
        status, answer = await send("POST", "/admin/replicas", json=body)
        assert (status, answer["name"], answer["addresses"]) == (202, "far", ["unix:/a"])
        assert (await send("POST", "/admin/replicas/0/drain"))[0] == 202
        assert (await send("POST", "/admin/replicas/0/drain", json={"move": True}))[0] == 202
        status, answer = await send("DELETE", "/admin/replicas/0")
        assert (status, len(answer["replicas"])) == (200, 2)
        assert replicas.calls == [
            ("join", "10.0.0.1:8000", "[fd00::1]:8001", "far"),
            ("retire", "0", False),
            ("retire", "0", True),
            ("remove", "0"),
        ]

    run(tokenizer, test)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "", {"address": "h:1", "name": "0"}, 409, "choose another name"),
        ("POST", "", {"address": "somewhere"}, 422, "host:port or unix:/path of each rank"),
        ("POST", "", {"address": "127.0.0.1:99999"}, 422, "the port of 127.0.0.1:99999 is none"),
        ("POST", "", {"address": "h:1,h:1"}, 422, "the same rank is named twice"),
        ("POST", "", {"address": "h:1", "name": "a/b"}, 422, "`name`: up to 64 letters"),
        ("POST", "", {"address": "h:1", "weight": 2}, 422, "weight"),
        ("POST", "", {}, 422, "address"),
        ("POST", "/nobody/drain", {}, 404, "there are: 0"),
        ("DELETE", "/nobody", {}, 404, "there are: 0"),
        ("POST", "/0/drain", {"move": 1}, 422, "move"),
    ],
)
def test_invalid_change_of_replicas_is_refused_with_the_reason(
    tokenizer: Tokenizer, method: str, path: str, body: dict[str, object], status: int, message: str
) -> None:
    async def test(send: Send, replicas: FakeReplicas) -> None:
        found, answer = await send(method, f"/admin/replicas{path}", json=body)
        assert (found, message in answer["error"]) == (status, True), answer

    run(tokenizer, test)


def test_readiness_probe_may_name_a_replica(tokenizer: Tokenizer) -> None:
    async def test(send: Send, replicas: FakeReplicas) -> None:
        found = [(await send("GET", f"/health/ready?replica={name}"))[0] for name in ("0", "1", "nobody")]
        assert found == [200, 503, 404]
        assert (await send("GET", "/health/ready?replica=1"))[1] == {"ready": False, "stage": "drained", "progress": None}
        assert (await send("GET", "/health/ready"))[0] == 200
        described = document(RouterConfig(folder="", model="some/model"))["paths"]["/health/ready"]["get"]
        assert [parameter["name"] for parameter in described["parameters"]] == ["replica", "group"]
        assert {str(status) for status in found} == set(described["responses"])

    run(tokenizer, test)


def test_readiness_probe_may_name_a_rank_group_whatever_its_replica_is_called(tokenizer: Tokenizer) -> None:
    async def test(send: Send, replicas: FakeReplicas) -> None:
        found = [(await send("GET", f"/health/ready?group={number}"))[0] for number in ("0", "1", "2", "3", "-1", "x", "")]
        assert found == [404, 503, 200, 404, 404, 404, 404]
        answer = (await send("GET", "/health/ready?group=0"))[1]
        assert answer == {"error": "no replica is of rank group 0 now", "error_type": "not_found"}

    run(tokenizer, test, groups=(("unix:/left",), ("unix:/b",), ("unix:/a",)))
