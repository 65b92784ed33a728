"""The /docs page in a browser: it is rendered from the API's description, and its forms send requests. Requirements: see
test_playground.py."""

import shutil

import pytest

from penstock.tests import serving

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
WAIT = 15_000  # milliseconds to wait at most, on a busy machine


def test_docs_page_sends_requests_of_several_routes_and_loads_nothing_from_elsewhere() -> None:
    with serving.serve("--api-key", "k") as server, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page_errors: list[str] = []
        page.on("pageerror", lambda error: page_errors.append(str(error)))
        foreign_requests: list[str] = []
        page.on("request", lambda request: None if request.url.startswith(server.url) else foreign_requests.append(request.url))
        page.goto(f"{server.url}/docs")
        playwright.expect(page.locator("#about")).to_contain_text("asks for an API key", timeout=WAIT)
        page.fill("#key", "k")
        page.click("#access button")
        for route, expected_text in (
            ("post_v1_completions", '"choices"'),
            ("post_generate_stream", '"generated_text"'),
            ("get_info", "router"),
        ):
            page.click(f"#{route} > summary", timeout=WAIT)
            page.click(f"#{route} form button")
            playwright.expect(page.locator(f"#{route} form pre")).to_contain_text(expected_text, timeout=WAIT)
        browser.close()
    assert (page_errors, foreign_requests) == ([], [])
