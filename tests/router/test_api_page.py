"""The playground page's routes over real HTTP: content negotiation, caching, content security policy, API key, statistics."""

import asyncio
import json
import re
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest

from penstock.router.api import page
from penstock.router.config import RouterConfig
from penstock.router.metrics import Metrics
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import FakeBatcher, Server, make_tokenizer, serve, serving
from penstock.tests.timing import fastest_of_several

CHROME_ACCEPT = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8"
BROWSER_HEADERS = {"Accept": CHROME_ACCEPT}
EVENTS = {"Accept": "text/event-stream"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (CHROME_ACCEPT, True),
        ("text/html", True),
        ("TEXT/HTML;charset=utf-8", True),
        ("text/html, */*", True),
        ("text/html;q=0.4, */*;q=0.1", True),
        ("", False),
        ("*/*", False),
        ("text/*", False),
        ("application/json, text/html", False),
        ("application/json, text/html;q=0.9", False),
        ("text/html;q=0", False),
        ("text/html;q=x", False),
        ("text/event-stream", False),
        ("x;q=nan, text/html", True),
        ("text/html;q=nan", False),
        ("text/html;q=inf, x", False),
        (",,;;=", False),
    ],
)
def test_prefers_html_follows_the_accept_header(accept: str, expected: bool) -> None:
    assert page.prefers_html(accept) is expected


def test_root_is_the_page_for_a_browser_and_empty_for_a_probe(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, response = await server.get("/", headers=BROWSER_HEADERS)
        assert status == 200
        assert b"<title>penstock</title>" in body
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert response.headers["Vary"] == "Accept"
        for headers in ({"Accept": "*/*"}, {"Accept": ""}, {"Accept": "application/json"}):
            status, body, response = await server.get("/", headers=headers)
            assert (status, body, response.headers["Vary"]) == (200, b"", "Accept")
        for headers in (BROWSER_HEADERS, {"Accept": "*/*"}):
            async with server.client.head("/", headers=headers) as response:
                assert (response.status, await response.read()) == (200, b"")

    serve(tokenizer, test)


def test_while_loading_a_probe_gets_503_and_a_browser_the_page(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert (await server.get("/"))[0] == 503
        assert (await server.get("/", headers=BROWSER_HEADERS))[0] == 200
        status, body, _ = await server.get("/stats")
        stats = json.loads(body)
        assert (status, stats["ready"], stats["stage"], stats["limits"]["max_total_tokens"]) == (200, False, "reading weights", 0)

    serve(tokenizer, test, ready=False, stage="reading weights", limits=None)


def test_page_needs_no_api_key_and_its_statistics_do(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        assert (await server.get("/", headers=BROWSER_HEADERS))[0] == 200
        for path in page.FILES:
            assert (await server.get(path))[0] == 200
        for accept in ({}, EVENTS):
            assert (await server.get("/stats", headers=accept))[0] == 401
        assert (await server.get("/stats", headers={"Authorization": "Bearer secret"}))[0] == 200
        assert (await server.get("/page/../app.py"))[0] in (401, 404)
        assert (await server.get("/page/missing.js"))[0] in (401, 404)

    serve(tokenizer, test, settings={"api_keys": ("secret",)})


def test_content_security_policy_allows_only_the_servers_own_files(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for path in ("/", *page.FILES):
            _, _, response = await server.get(path, headers=BROWSER_HEADERS)
            policy = dict(rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; "))
            assert policy["default-src"] == "'none'"
            assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
            assert policy["img-src"] == "'self' data:"
            assert policy["require-trusted-types-for"] == "'script'"
            assert not any("unsafe" in rule for rule in policy.values())
            assert response.headers["X-Content-Type-Options"] == "nosniff"

    serve(tokenizer, test)


def test_files_are_revalidated_by_etag(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for path in ("/", *page.FILES):
            _, body, response = await server.get(path, headers=BROWSER_HEADERS)
            assert body
            assert response.headers["Cache-Control"] == "no-cache"
            again, body, response = await server.get(path, headers={**BROWSER_HEADERS, "If-None-Match": response.headers["ETag"]})
            assert (again, body) == (304, b"")
            assert "Content-Security-Policy" in response.headers

    serve(tokenizer, test)


def test_stats_map_metrics_to_fields_and_pages_add_up(tokenizer: Tokenizer) -> None:
    """Each of the fake's samples is its index in the list of names."""

    async def test(server: Server) -> None:
        status, body, response = await server.get("/stats")
        assert (status, response.headers["Content-Type"]) == (200, "application/json")
        assert response.headers["Cache-Control"] == "no-store"
        stats = json.loads(body)
        sample_index = {name: index for index, name in enumerate(page.SAMPLES)}
        assert stats["model"] == "some/model"
        assert stats["requests"] == {name: sample_index[f"penstock_{name}"] for name in ("running", "waiting", "paused")}
        assert stats["counted"]["generated_tokens"] == sample_index["penstock_generated_tokens_total"]
        assert stats["counted"]["step_seconds"] == sample_index["penstock_step_seconds_sum"]
        pages = stats["pages"]
        assert pages["held"] + pages["cached"] + pages["free"] == pages["total"] == sample_index["penstock_pages_total"]
        assert stats["limits"] == {
            "max_input_tokens": 100,
            "max_total_tokens": 128,
            "choices": 8,
            "beams": 4,
            "stop_sequences": 4,
            "top_tokens": 5,
            "images": 0,
        }

    serve(tokenizer, test, settings={"max_best_of": 8, "max_num_beams": 4})


def test_every_sample_of_the_page_is_an_existing_metric() -> None:
    """By name in /metrics: a metric that is renamed would otherwise be 0 on the page."""
    assert set(Metrics().samples(page.SAMPLES)) == set(page.SAMPLES)


def test_samples_are_summed_over_labels() -> None:
    metrics = Metrics()
    metrics.failed("overloaded")
    metrics.failed("generation")
    assert metrics.samples(["tgi_request_failure_total", "tgi_no_such_thing"]) == {"tgi_request_failure_total": 2.0}


def test_watchers_share_one_snapshot_per_second_and_none_is_taken_without_watchers(tokenizer: Tokenizer) -> None:
    async def watch(server: Server, seconds: float) -> list[Any]:
        found = []
        end = monotonic() + seconds
        async with server.client.get("/stats", headers=EVENTS) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            while monotonic() < end:
                line = await response.content.readline()
                if line.startswith(b"data: "):
                    found.append(json.loads(line[6:]))
        return found

    async def test(server: Server) -> None:
        assert server.metrics.samplings == 0
        snapshots = await asyncio.gather(*(watch(server, 2.2) for _ in range(5)))
        assert all(3 <= len(found) <= 5 for found in snapshots)
        assert server.metrics.samplings <= 5
        samplings = server.metrics.samplings
        await asyncio.sleep(1.5)
        assert server.metrics.samplings == samplings

    serve(tokenizer, test)


def test_open_statistics_stream_does_not_delay_shutdown(tokenizer: Tokenizer) -> None:
    """The runner would wait for open handlers, a second here."""

    async def run() -> float:
        config = RouterConfig(folder="", model="some/model")
        async with asyncio.timeout(20), aiohttp.ClientSession() as session:
            async with serving(tokenizer, config, FakeBatcher(tokenizer)) as server:
                _, _, response = await server.get("/stats")
                stream = await session.get(response.url, headers=EVENTS)
                await stream.content.readline()
                start = monotonic()
            seconds = monotonic() - start
            stream.close()
            return seconds

    assert asyncio.run(fastest_of_several(0.8, run)) < 0.8


def test_page_loads_nothing_external_and_writes_no_html() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in (page.INDEX, *page.FILES.values())}
    for name, text in texts.items():
        assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text.replace("http://www.w3.org/2000/svg", "")), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage", text), (
            name
        )
    loaded = re.findall(r'(?:src|href)="(page/[^"]+)"', texts["index.html"])
    imported = [f"page/{name}" for text in texts.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {f"/{path}" for path in (*loaded, *imported)} == set(page.FILES)
    assert not re.search(r"<[^>]+ (?:style|on[a-z]+)=", texts["index.html"])
    assert sum(len(text) for text in texts.values()) < 90_000


def test_each_form_control_has_a_label() -> None:
    text = page.INDEX.read_text(encoding="utf-8")
    labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', text))
    controls = set(re.findall(r'<(?:input|select|textarea)[^>]* id="([^"]+)"', text))
    assert controls - labelled == {"colours"}  # is inside its label


def test_served_files_are_those_in_the_folder() -> None:
    folder = Path(page.__file__).parent / "page"
    assert {path.name for path in folder.iterdir()} == {path.name for path in page.FILES.values()} | {"index.html"}
