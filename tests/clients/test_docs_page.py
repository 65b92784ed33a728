"""The page that shows the API's description, in a browser: it is drawn, and its forms send. See test_page.py for what it needs."""

import shutil

import pytest

from penstock.tests import serving

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
WAIT = 15_000  # milliseconds that a busy machine may take


def test_every_route_is_shown_and_can_be_tried() -> None:
    with serving.serve("--api-key", "k") as server, playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        elsewhere: list[str] = []
        page.on("request", lambda request: None if request.url.startswith(server.url) else elsewhere.append(request.url))
        page.goto(f"{server.url}/docs")
        playwright.expect(page.locator("#about")).to_contain_text("asks for an API key", timeout=WAIT)
        page.fill("#key", "k")
        page.click("#access button")
        for route, word in (
            ("post_v1_completions", '"choices"'),
            ("post_generate_stream", '"generated_text"'),
            ("get_info", "router"),
        ):
            page.click(f"#{route} > summary", timeout=WAIT)
            page.click(f"#{route} form button")
            playwright.expect(page.locator(f"#{route} form pre")).to_contain_text(word, timeout=WAIT)
        browser.close()
    assert (faults, elsewhere) == ([], [])
