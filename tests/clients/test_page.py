"""The page in a browser: streams, probabilities, the keyboard, the key, and that no text becomes markup.

Needs playwright (extra `browser`) and a Chromium of the system; skipped where one of them is missing.
"""

import ast
import asyncio
import inspect
import json
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from penstock.router.config import RouterConfig
from penstock.router.request import Beams, Limits, Overloaded, Refused
from penstock.router.text import Tokenizer
from penstock.tests import serving as real
from penstock.tests.router.fake_batcher import FakeBatcher, make_tokenizer, serving
from penstock.tests.router.vision_models import encoded, make_folder, picture

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MARKUP = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'><b>bold</b>"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
LIMITS = Limits(max_input_tokens=1000, max_total_tokens=2000, vocabulary=300)
WAIT = 15_000  # milliseconds that a busy machine may take


@dataclass
class Served:
    """A server in a thread of its own, whose batcher says what it was told to."""

    url: str
    batcher: FakeBatcher
    loop: asyncio.AbstractEventLoop

    def permit(self, tokens: int) -> None:
        """So many more may leave."""
        assert self.batcher.pace is not None
        for _ in range(tokens):
            self.loop.call_soon_threadsafe(self.batcher.pace.release)

    def prompt(self) -> str:
        """Of the last request."""
        return self.batcher.tokenizer.decode(self.batcher.requests[-1].prompt)


@contextmanager
def served(tokenizer: Tokenizer, settings: dict[str, Any] | None = None, **behaviour: Any) -> Iterator[Served]:
    ready, stop = threading.Event(), asyncio.Event()
    found: list[Served] = []

    async def run() -> None:
        batcher = FakeBatcher(tokenizer, **{"limits": LIMITS, **behaviour})
        async with serving(tokenizer, RouterConfig(**{"folder": "", "model": "some/model", **(settings or {})}), batcher) as server:
            _, _, response = await server.get("/health")
            found.append(Served(str(response.url.origin()), batcher, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=[run()])
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        if found:
            found[0].loop.call_soon_threadsafe(stop.set)
        thread.join(20)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Containers have no user namespaces for the sandbox, and this browser sees nothing but our own page.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def errors() -> list[str]:
    """What the browser complained of."""
    return []


@pytest.fixture
def new_page(browser: Any, errors: list[str]) -> Iterator[Any]:
    """Opens the page of a server. What it logs must be nothing but statuses that a test asks for."""
    contexts = []

    def open_page(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [error for error in errors if not error.startswith("Failed to load resource")] == []


def run(page: Any, text: str) -> None:
    """Sends it and waits for all answers."""
    page.fill("#prompt", text)
    page.click("#run")
    expect(page.locator("#run")).not_to_have_text("Stop", timeout=WAIT)
    expect(page.locator("article[aria-busy=true]")).to_have_count(0)


def test_an_answer_streams_token_by_token(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, pace=asyncio.Semaphore(0), says="Hello</s>") as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#model")).to_have_text("some/model")
        page.fill("#prompt", "hi")
        page.click("#run")
        expect(page.locator("#run")).to_have_text("Stop")
        server.permit(2)
        expect(page.locator(".answer .text")).to_have_text("He")
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
        server.permit(4)
        expect(page.locator(".answer .text")).to_have_text("Hello")
        expect(page.locator(".facts")).to_contain_text("finished · 6 tokens")
        expect(page.locator("#said")).to_contain_text("Answer: finished")
        assert page.locator(".token").count() == 6
        surprise = page.locator(".token").first.evaluate("token => token.style.getPropertyValue('--surprise')")
        assert float(surprise) == pytest.approx(0.5 / 0.6931 / 7, abs=1e-3)


def test_stopping_closes_the_stream(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, pace=asyncio.Semaphore(3)) as server:
        page = new_page(server.url)
        page.fill("#prompt", "hi")
        page.click("#run")
        expect(page.locator(".answer .text")).to_have_text("Hel")
        page.keyboard.press("Escape")
        expect(page.locator(".facts")).to_contain_text("stopped · 3 tokens")
        expect(page.locator("#run")).to_have_text("Run")
        page.wait_for_timeout(200)
        assert server.batcher.closed == 1


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_no_text_becomes_markup(tokenizer: Tokenizer, new_page: Any, mode: str) -> None:
    with served(tokenizer, says=MARKUP + "</s>") as server:
        page = new_page(server.url)
        page.click(f"[name=mode][value={mode}] + span")
        run(page, MARKUP)
        assert page.locator(".answer .text").text_content() == MARKUP
        if mode == "chat":
            assert page.locator(".user").text_content() == MARKUP
        page.locator(".token").first.hover()
        expect(page.locator("#card code").first).to_have_text("<")
        page.click("#code-open")
        expect(page.locator("#code-text")).to_contain_text("<script>window.hit = 1</script>")
        page.click("#code-close")
        server.batcher.refuses = Refused(MARKUP, "temperature")
        run(page, MARKUP)
        assert MARKUP in page.locator("#problem").text_content()
        assert page.locator("main :is(script, img, b), #card img, #code img").count() == 0
        assert page.evaluate("window.hit") is None


def test_the_keyboard_goes_from_token_to_token_and_on_from_an_alternative(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        run(page, "hi")
        page.locator(".answer .text").focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        expect(page.locator(".token.shown")).to_have_text("l")
        expect(page.locator("#card .token-head")).to_have_text("l60.7 %")
        expect(page.locator("#said")).to_contain_text("l 60.7 %; otherwise ! 5.0 %")
        page.keyboard.press("Escape")
        expect(page.locator("#card")).to_be_hidden()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.keyboard.press("ArrowDown")
        expect(page.locator("#card button:focus")).to_have_text('"1.8 %')
        page.keyboard.press("Enter")
        expect(page.locator(".answer .text")).to_have_text('Hel"Hello you')
        expect(page.locator(".token.given")).to_have_text('"')
        assert server.prompt() == 'hiHel"'


def test_a_chat_goes_on_from_the_chosen_sample_and_from_an_alternative(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, says="Yo</s>") as server:
        page = new_page(server.url)
        page.click("[name=mode][value=chat] + span")
        page.fill("#system", "Be brief")
        page.fill("#n", "3")
        run(page, "hi")
        assert page.locator(".answer .text").all_text_contents() == ["Yo", "1Yo", "2Yo"]
        page.get_by_role("button", name="Go on with this").nth(1).click()
        page.fill("#n", "1")
        run(page, "and?")
        assert server.prompt() == "[system]Be brief[user]hi[assistant]1Yo[user]and?[assistant]"
        page.locator(".turn").first.locator(".token").nth(1).click()
        page.locator("#card button:enabled").first.click()
        expect(page.locator(".turn")).to_have_count(1)
        expect(page.locator(".answer .text").first).to_have_text("Y!Yo")
        assert server.prompt() == "[system]Be brief[user]hi[assistant]Y!"
        run(page, "so?")
        assert server.prompt() == "[system]Be brief[user]hi[assistant]Y!Yo[user]so?[assistant]"


def test_what_is_refused_to_go_on_takes_nothing_away(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, says="Yo</s>") as server:
        page = new_page(server.url)
        page.click("[name=mode][value=chat] + span")
        for prompt in ("hi", "and?"):
            run(page, prompt)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body="bad gateway"))
        page.locator(".turn").first.locator(".token").nth(1).click()
        page.locator("#card button:enabled").first.click()
        expect(page.locator("#problem")).to_have_text("The server answered with status 502.")
        assert page.locator(".answer .text").all_text_contents() == ["Yo", "Yo"]
        page.unroute("**/v1/chat/completions")
        run(page, "so?")
        assert server.prompt() == "[user]hi[assistant]Yo[user]and?[assistant]Yo[user]so?[assistant]"


def test_what_is_refused_to_go_on_leaves_all_that_was_known(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        for width in ("1", "2"):
            page.fill("#num_beams", width)
            run(page, "hi")
            known = page.locator(".facts").text_content(), page.locator(".beam").count(), page.locator(".token.end").count()
            assert (known[1] > 0, known[2]) == (width == "2", 1)
            page.route(re.compile("completions|generate"), lambda route: route.fulfill(status=502, body="bad gateway"))
            page.locator(".token").nth(1).click()
            page.locator("#card button:enabled").first.click()
            expect(page.locator("#problem")).to_have_text("The server answered with status 502.")
            expect(page.locator(".beam")).to_have_count(known[1])
            expect(page.locator(".token.end")).to_have_count(known[2])
            expect(page.locator(".facts")).to_have_text(known[0])
            page.unroute_all()


def test_a_stream_that_ends_early_is_said(tokenizer: Tokenizer, new_page: Any) -> None:
    event = {"choices": [{"index": 0, "text": "Yo", "logprobs": None, "finish_reason": None}]}
    with served(tokenizer) as server:
        page = new_page(server.url)
        cut = {"content_type": "text/event-stream", "body": f"data: {json.dumps(event)}\n\n"}
        page.route("**/v1/completions", lambda route: route.fulfill(status=200, **cut))
        run(page, "hi")
        expect(page.locator("#problem")).to_have_text("The connection to the server broke: it ended before the answer did")
        expect(page.locator(".answer .text")).to_have_text("Yo")
        expect(page.locator(".facts")).to_contain_text("failed")


def stream_of(events: list[Any]) -> dict[str, str]:
    """What a route is fulfilled with."""
    return {"content_type": "text/event-stream", "body": "".join(f"data: {json.dumps(event)}\n\n" for event in events)}


def test_a_long_answer_is_shown_as_it_comes_and_its_end_stays_in_sight(tokenizer: Tokenizer, new_page: Any) -> None:
    """To look after every token where its end is took half a minute for 2000 of them, and four times that for twice as many."""
    logprobs = {"tokens": [" word"], "token_logprobs": [-1.0]}
    events = [{"choices": [{"index": 0, "text": " word", "logprobs": logprobs}]}] * 4000
    stream = stream_of([*events, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}])
    stream["body"] += "data: [DONE]\n\n"
    with served(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/v1/completions", lambda route: route.fulfill(**stream))
        run(page, "hi")
        assert page.locator(".token").count() == 4000
        expect(page.locator(".facts")).to_be_in_viewport()


def test_a_long_search_is_shown_as_it_grows_and_its_end_stays_in_sight(tokenizer: Tokenizer, new_page: Any) -> None:
    live = [{"parent": row, "id": 5, "text": " word", "score": -1.0} for row in range(8)]
    token = {"token": {"id": 5, "text": " word", "logprob": -1.0, "special": False}}
    last = {**token, "details": {"finish_reason": "length", "input_length": 1}}
    stream = stream_of([{"live": live, "complete": []}, token] * 999 + [last])
    with served(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/generate_stream", lambda route: route.fulfill(**stream))
        page.fill("#num_beams", "8")
        run(page, "hi")
        assert (page.locator(".token").count(), page.locator(".beam").count()) == (1000, 8 * 999)
        expect(page.locator(".facts")).to_be_in_viewport()
        expect(page.locator(".beam").last).to_be_in_viewport()


def test_a_search_that_is_cut_is_no_answer(tokenizer: Tokenizer, new_page: Any) -> None:
    token = {"id": 5, "text": "Yo", "logprob": -1.0, "special": False}
    stream = stream_of([{"live": [], "complete": []}, {"token": token, "details": None}])
    with served(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/generate_stream", lambda route: route.fulfill(**stream))
        page.fill("#num_beams", "2")
        run(page, "hi")
        expect(page.locator("#problem")).to_have_text("The connection to the server broke: it ended before the answer did")
        expect(page.locator(".facts")).to_contain_text("failed")


def test_alternatives_are_told_the_most_probable_first(tokenizer: Tokenizer, new_page: Any) -> None:
    """A browser sorts names that are numbers."""
    top = {"9": -0.5, "7": -1.0, "x": -1.5, "3": -2.0, "1": -3.0}
    logprobs = {"tokens": ["9"], "token_logprobs": [-0.5], "top_logprobs": [top]}
    stream = stream_of([{"choices": [{"index": 0, "text": "9", "logprobs": logprobs, "finish_reason": "stop"}]}])
    stream["body"] += "data: [DONE]\r\n\r\n"
    with served(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/v1/completions", lambda route: route.fulfill(**stream))
        run(page, "hi")
        expect(page.locator("#problem")).to_be_hidden()
        page.locator(".answer .text").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#said")).to_have_text("9 60.7 %; otherwise 7 36.8 %, x 22.3 %, 3 13.5 %")


def test_a_knob_that_is_not_shown_does_not_stop_a_request(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        page.fill("#num_beams", "2")
        page.fill("#length_penalty", "1.234")
        page.fill("#num_beams", "1")
        run(page, "hi")
        expect(page.locator(".answer .text")).to_have_text("Hello you")


def test_a_knob_is_blamed_until_the_next_request(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, refuses=Refused("`top_p` is odd", "top_p")) as server:
        page = new_page(server.url)
        run(page, "hi")
        expect(page.locator("#top_p")).to_have_attribute("aria-invalid", "true")
        server.batcher.refuses = None
        run(page, "hi")
        expect(page.locator("[aria-invalid]")).to_have_count(0)


def test_clearing_one_mode_leaves_the_other(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, says="Yo</s>") as server:
        page = new_page(server.url)
        page.click("[name=mode][value=chat] + span")
        run(page, "hi")
        page.click("[name=mode][value=completion] + span")
        page.click("#clear")
        page.click("[name=mode][value=chat] + span")
        expect(page.locator(".user")).to_have_text("hi")
        run(page, "and?")
        assert server.prompt() == "[user]hi[assistant]Yo[user]and?[assistant]"
        page.click("#clear")
        run(page, "so?")
        assert server.prompt() == "[user]so?[assistant]"


def test_a_refused_message_goes_back_to_the_chat(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        held: list[Any] = []
        page.route("**/v1/chat/completions", lambda route: held.append(route))
        page.click("[name=mode][value=chat] + span")
        page.fill("#prompt", "hi")
        page.click("#run")
        expect(page.locator("#run")).to_have_text("Stop")
        page.click("[name=mode][value=completion] + span")
        page.fill("#prompt", "")
        held[0].fulfill(status=502, body="bad gateway")
        expect(page.locator("#problem")).to_be_visible()
        expect(page.locator("#prompt")).to_have_value("")
        page.click("[name=mode][value=chat] + span")
        expect(page.locator("#prompt")).to_have_value("hi")


def test_the_card_goes_with_its_answer(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        for gone in ("Clear", "Run"):
            run(page, "hi")
            page.locator(".answer .text").focus()
            page.keyboard.press("ArrowRight")
            page.keyboard.press("Enter")
            expect(page.locator("#card button:focus")).to_be_visible()
            page.get_by_role("button", name=gone).press("Enter")
            expect(page.locator("#run")).not_to_have_text("Stop")
            expect(page.locator("#card")).to_be_hidden()


def test_who_has_no_key_is_asked_once(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, settings={"api_keys": ("secret",)}) as server:
        page = new_page(server.url)
        expect(page.locator("#key")).to_be_visible()
        page.keyboard.press("Escape")
        with page.expect_response("**/stats"):
            pass
        page.wait_for_timeout(200)
        expect(page.locator("#key")).to_be_hidden()
        page.click("#key-open")
        page.fill("#key-text", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key")).to_be_visible()


def test_a_key_that_no_header_can_carry_is_refused_at_once(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, settings={"api_keys": ("secret",)}) as server:
        page = new_page(server.url)
        page.fill("#key-text", "ключ")
        page.keyboard.press("Enter")
        expect(page.locator("#key")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


def test_parts_of_a_character_are_shown_when_it_is_whole(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, says="né!</s>") as server:
        page = new_page(server.url)
        run(page, "hi")
        assert page.locator(".token").all_text_contents() == ["n", "", "é", "!", ""]
        page.locator(".token").nth(3).click()
        page.locator("#card button:enabled").first.click()
        expect(page.locator(".answer .text")).to_have_text('né"né!')
        assert server.prompt() == 'hiné"'


def test_reasoning_is_shown_and_not_sent_back(tokenizer: Tokenizer, new_page: Any) -> None:
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"reasoning_content": "m.", "content": "Yes"},
        {"content": "!"},
        {},
    ]
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    choices[-1]["finish_reason"] = "stop"
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    events = [*({"choices": [choice]} for choice in choices), {"choices": [], "usage": usage}]
    body = "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in events) + "data: [DONE]\n\n"
    with served(tokenizer) as server:
        page = new_page(server.url)
        asked: list[Any] = []

        def answer(route: Any) -> None:
            asked.append(route.request.post_data_json)
            route.fulfill(status=200, content_type="text/event-stream", body=body)

        page.route("**/v1/chat/completions", answer)
        page.click("[name=mode][value=chat] + span")
        run(page, "hi")
        assert page.locator(".answer .text").text_content() == "Hmm.Yes!"
        assert page.locator(".token.thought").all_text_contents() == ["Hm", "m."]
        expect(page.locator(".notes")).to_have_text("prompt of 9 tokens, 5 of them from the cache")
        run(page, "and?")
        assert [message["content"] for message in asked[1]["messages"]] == ["hi", "Yes!", "and?"]


def test_a_refused_request_names_its_knob_and_gives_the_text_back(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, refuses=Overloaded("full", 3.0)) as server:
        page = new_page(server.url)
        page.click("[name=mode][value=chat] + span")
        run(page, "hi")
        expect(page.locator("#problem")).to_have_text("Model is overloaded")
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#prompt")).to_have_value("hi")
        server.batcher.refuses = Refused("`top_p` is odd", "top_p")
        run(page, "hi")
        expect(page.locator("#top_p")).to_have_attribute("aria-invalid", "true")
        server.batcher.refuses = None
        run(page, "hi")
        expect(page.locator("#problem")).to_be_hidden()


def test_the_key_stays_in_the_tab_and_texts_stay_nowhere(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, settings={"api_keys": ("secret",)}) as server:
        page = new_page(server.url)
        expect(page.locator("#key")).to_be_visible()
        expect(page.locator("#state")).to_have_text("needs a key")
        page.fill("#key-text", "secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("ready")
        run(page, "a private text")
        expect(page.locator(".answer .text")).to_have_text("Hello you")
        kept = page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie, location.href]")
        assert kept == ['{"penstock-key":"secret"}', "{}", "", f"{server.url}/"]
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        assert "private" not in page.content()
        assert page.input_value("#prompt") != "a private text"


def test_the_code_does_what_the_page_did(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        page.fill("#n", "2")
        page.fill("#top_k", "7")
        page.fill("#seed", "3")
        page.fill("#stop", "it's\\nover\nend")
        page.select_option("#priority", "interactive")
        run(page, """it's "quoted" \\ and $HOME `x` é""")
        page.click("#code-open")
        subprocess.run(["bash", "-c", page.text_content("#code-text")], check=True, capture_output=True, timeout=20)
        page.click("text=Python")
        code = page.text_content("#code-text")
        exec(
            compile(code.replace("from openai import OpenAI", "from types import SimpleNamespace"), "code", "exec"),
            stand_in(server),
        )
        first, second, third = (msgspec.structs.replace(request, arrived=0.0) for request in server.batcher.requests)
        assert first.choices == 2
        assert (first.sampling.top_k, first.sampling.seed, first.stop) == (7, 3, ("it's\nover", "end"))
        assert first == second == third


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_the_code_gives_the_client_what_it_takes(tokenizer: Tokenizer, new_page: Any, mode: str) -> None:
    """Every knob's field is either one of the method's own or in `extra_body`."""
    openai = pytest.importorskip("openai")
    resources = openai.resources.Completions, openai.resources.chat.Completions
    with served(tokenizer) as server:
        page = new_page(server.url)
        page.click(f"[name=mode][value={mode}] + span")
        for knob in page.locator("#parameters [type=number]:visible").all():
            knob.fill(knob.get_attribute("max") or "2")
        page.fill("#stop", "a")
        page.select_option("#priority", "batch")
        for grammar in ("json_object", "json_schema", "regex"):
            page.select_option("#grammar", grammar)
            page.click("#code-open")
            page.click("text=Python")
            found = [ast.parse(page.text_content("#code-text")).body[2]]
            page.click("#code-close")
            [call] = [node.value for node in found if isinstance(node, ast.Assign)]
            assert isinstance(call, ast.Call)
            given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            assert len(given) > 8
            assert given["extra_body"]["top_k"] == 2
            assert given.keys() <= inspect.signature(resources[mode == "chat"].create).parameters.keys()


def stand_in(server: Served) -> dict[str, Any]:
    """OpenAI's client, as far as the code uses it: what it is called with goes out as JSON."""

    class Completions:
        def create(self, extra_body: dict[str, Any], **body: Any) -> list[Any]:
            data = json.dumps(body | extra_body).encode()
            with urllib.request.urlopen(f"{server.url}/v1/completions", data, timeout=20) as response:
                response.read()
            return []

    class OpenAI:
        def __init__(self, base_url: str, api_key: str) -> None:
            assert base_url == f"{server.url}/v1"
            self.completions = Completions()

    return {"OpenAI": OpenAI}


@pytest.mark.parametrize(
    "options", [PHONE, {"viewport": {"width": 800, "height": 600}}, {"viewport": {"width": 1400, "height": 900}}]
)
def test_nothing_is_wider_than_the_screen_and_everything_has_a_name(
    tokenizer: Tokenizer, new_page: Any, options: dict[str, Any]
) -> None:
    with served(tokenizer, says="word " * 20 + "x" * 90 + "</s>") as server:
        page = new_page(server.url, **options)
        if options is PHONE:
            page.click("#knobs > summary")
        page.fill("#n", "3")
        run(page, "w" * 200)
        width = options["viewport"]["width"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        nameless = """() => [...document.querySelectorAll("button, input, select, textarea, [role=group]")]
            .filter((one) => !one.labels?.length && !one.textContent && !one.getAttribute("aria-label") && !one.ariaHidden)
            .map((one) => one.outerHTML)"""
        assert page.evaluate(nameless) == []


def test_the_live_view_counts_only_while_somebody_looks(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        expect(page.locator("#live-waiting")).to_have_text("1")
        expect(page.locator("#live-pages")).to_have_attribute("aria-label", re.compile("Of 3 pages"))
        with page.expect_event("requestfailed", predicate=lambda request: request.url.endswith("/stats")):
            page.evaluate("""() => {
                Object.defineProperty(document, "hidden", {value: true, configurable: true});
                document.dispatchEvent(new Event("visibilitychange"));
            }""")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(2500)
        assert asked == []
        with page.expect_request("**/stats"):
            page.evaluate("""() => {
                Object.defineProperty(document, "hidden", {value: false, configurable: true});
                document.dispatchEvent(new Event("visibilitychange"));
            }""")
        expect(page.locator("#state")).to_have_text("ready")


def test_both_pages_work_under_a_path_of_a_proxys(tokenizer: Tokenizer, new_page: Any) -> None:
    def proxy(route: Any) -> None:
        route.fulfill(response=route.fetch(url=route.request.url.replace("/llm/", "/")))

    with served(tokenizer) as server:
        asked: list[str] = []
        page = new_page(server.url)
        page.route(re.compile("/llm/(?!stats)"), proxy)  # what never ends can't be passed on here
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{server.url}/llm/")
        run(page, "hi")
        expect(page.locator(".answer .text")).to_have_text("Hello you")
        page.click("text=Docs")
        page.click("#post_v1_completions > summary")
        page.click("#post_v1_completions form button")
        expect(page.locator("#post_v1_completions form pre")).to_contain_text('"choices"')
        assert all(url.startswith(f"{server.url}/llm/") for url in asked)


def test_a_description_that_does_not_come_is_said(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/openapi.json", lambda route: route.fulfill(status=502, body="bad gateway"))
        page.goto(f"{server.url}/docs")
        expect(page.locator("#about")).to_have_text("There is no description: The server answered with status 502.")


def test_the_description_is_no_wider_than_a_phone(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(f"{server.url}/docs", **PHONE)
        expect(page.locator("#post_v1_completions")).to_be_visible()
        for _ in range(3):  # what is opened has more to open
            page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
            page.wait_for_timeout(300)
        expect(page.locator("#post_v1_completions form pre")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]


def test_a_lost_server_is_said(tokenizer: Tokenizer, new_page: Any, errors: list[str]) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#state")).to_have_text("no connection", timeout=WAIT)


def test_with_the_demo_model(new_page: Any) -> None:
    """Everything in earnest: tokens, alternatives that are better than none, numbers that move."""
    with real.serve() as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        page.fill("#n", "2")
        page.fill("#seed", "5")
        run(page, "Once upon a time, there was")
        texts = page.locator(".answer .text").all_text_contents()
        assert len(set(texts)) == 2
        assert all(len(text) > 40 for text in texts)
        token = page.locator(".answer").first.locator(".token").nth(2)
        token.hover()
        shares = [float(text.strip("< %")) for text in page.locator("#card li span").all_text_contents()]
        assert shares == sorted(shares, reverse=True)
        assert len(shares) >= 5
        chosen = page.locator("#card button:enabled").first
        word = chosen.locator("code").text_content().replace("␣", " ")
        chosen.click()
        expect(page.locator("#run")).to_have_text("Run", timeout=WAIT)
        after = page.locator(".answer .text").first.text_content()
        assert after != texts[0]
        assert page.locator(".token.given").text_content() == word
        assert len(after) > 40
        assert page.locator(".answer .text").nth(1).text_content() == texts[1]
        expect(page.locator("#live-cached")).not_to_have_text("0", timeout=WAIT)
        page.select_option("#grammar", "regex")
        page.fill("#grammar-source", "(yes|no), [a-z]{3}")
        page.fill("#n", "1")
        run(page, "Well")
        assert re.fullmatch("(yes|no), [a-z]{3}", page.locator(".answer .text").text_content())
        page.fill("#grammar-source", "(")
        run(page, "Well")
        expect(page.locator("#problem")).to_contain_text("unclosed group")
        expect(page.locator("#grammar-source")).to_have_attribute("aria-invalid", "true")


def test_beams_are_seen_as_they_grow(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, pace=asyncio.Semaphore(0), says="Hello</s>") as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        assert page.locator("#length_penalty").is_hidden()
        page.fill("#num_beams", "3")
        expect(page.locator("#temperature")).to_have_value("0")
        page.fill("#length_penalty", "2")
        page.fill("#n", "2")
        page.fill("#prompt", "hi")
        page.click("#run")
        server.permit(3)
        beams = page.locator(".beams .beam")
        expect(beams).to_have_count(9)
        expect(page.locator(".beams figcaption")).to_contain_text("3 beams · 3 steps · 0 complete")
        expect(page.locator(".beams .beam.best > text")).to_have_text(["H", "e", "l"])
        # The second step's first beam, which says the same as the best, has no heir, and so has the one that it goes on from.
        expect(page.locator(".beams .beam.dropped > text")).to_have_text(['"', "e"])
        expect(page.locator(".beams path")).to_have_count(6)
        expect(page.locator(".beams path.dropped")).to_have_count(1)
        expect(page.locator(".beams .dropped.best")).to_have_count(0)
        assert "H · score −0.500" in page.locator(".beams .beam title").first.evaluate("title => title.textContent")
        server.permit(10)
        expect(page.locator(".answer .text")).to_have_text(["Hello", "Hello1"])
        expect(page.locator(".answer .facts").first).to_contain_text("score −0.250")
        expect(page.locator(".beams .beam.best")).to_have_count(6)
        expect(page.locator(".beams .beam.complete.best > text")).to_have_text(["</s>"])
        request = server.batcher.requests[-1]
        assert request.beams == Beams(width=3, length_penalty=2.0, watched=True)
        assert (request.choices, request.sampling.temperature) == (2, 0.0)
        server.permit(100)
        page.click("input[value=chat] + span")
        run(page, "hi")
        expect(page.locator("#chat .answer .text")).to_have_text(["Hello", "Hello1"])
        assert server.batcher.requests[-1].beams == Beams(width=3, length_penalty=2.0)
        page.fill("#num_beams", "1")
        expect(page.locator("#temperature")).to_have_value("0.8")
        run(page, "hi")
        assert server.batcher.requests[-1].beams is None


def test_answers_that_are_not_there_are_named_as_such(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer, finds=1) as server:
        page = new_page(server.url)
        page.fill("#num_beams", "2")
        page.fill("#n", "2")
        run(page, "hi")
        expect(page.locator(".answer .facts").last).to_contain_text("there is no other")


def test_what_beams_are_refused_for_is_marked(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        page.fill("#num_beams", "2")
        page.fill("#n", "3")
        run(page, "hi")
        expect(page.locator("#problem")).to_contain_text("`num_return_sequences` must be > 0 and <= 2 (`num_beams`). Given: 3")
        expect(page.locator("#n")).to_have_attribute("aria-invalid", "true")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("seeing")
    tokenizer = make_folder(folder)
    return str(folder), tokenizer


def chosen(*pictures: Any, form: str = "PNG") -> list[dict[str, Any]]:
    """As files that somebody has chosen."""
    kind = {"name": "a.png", "mimeType": f"image/{form.lower()}"}
    return [{**kind, "buffer": encoded(picture, form)} for picture in pictures]


def test_images_go_with_a_message(seeing: tuple[str, Tokenizer], new_page: Any) -> None:
    """And with those that follow; the chat shows them."""
    folder, tokenizer = seeing
    with served(tokenizer, {"folder": folder, "max_images": 2}, limits=replace(LIMITS, images=True)) as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#image-add")).to_be_hidden()  # a completion has no place for one
        page.click("text=Chat")
        expect(page.locator("#image-add")).to_be_visible()
        page.set_input_files("#image-files", chosen(picture(112, 56), picture(56, 56, seed=1), picture(56, 56, seed=2)))
        expect(page.locator("#images img")).to_have_count(2)
        expect(page.locator("#problem")).to_have_text("A chat has at most 2 images here.")
        page.click("#images button >> nth=1")
        expect(page.locator("#images img")).to_have_count(1)
        page.click("#code-open")
        assert "data:image/png;base64," in page.text_content("#code-text")
        assert len(page.text_content("#code-text")) < 1000
        page.click("#code-close")
        run(page, "What is this?")
        expect(page.locator("#images")).to_be_hidden()
        expect(page.locator(".user img")).to_have_count(1)
        assert page.evaluate("document.querySelector('.user img').naturalWidth") == 112
        [first] = server.batcher.requests[-1].images
        assert (first.rows, first.columns) == (2, 4)
        run(page, "And now?")
        assert server.batcher.requests[-1].images[0].pixels == first.pixels
        page.set_input_files("#image-files", chosen(picture(56, 56)))
        run(page, "")  # without a word
        assert len(server.batcher.requests[-1].images) == 2
        page.set_input_files("#image-files", chosen(picture(56, 56)))
        expect(page.locator("#problem")).to_have_text("A chat has at most 2 images here.")


def test_large_images_are_made_smaller_and_others_are_no_images(seeing: tuple[str, Tokenizer], new_page: Any) -> None:
    folder, tokenizer = seeing
    limits = replace(LIMITS, images=True, max_input_tokens=3000, max_total_tokens=4000)
    with served(tokenizer, {"folder": folder, "max_images": 2, "payload_limit": 2_000_000}, limits=limits) as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        page.click("text=Chat")
        page.set_input_files("#image-files", {"name": "b.png", "mimeType": "image/png", "buffer": b"nothing"})
        expect(page.locator("#problem")).to_have_text("b.png is no image that this browser can read.")
        page.set_input_files("#image-files", chosen(picture(2400, 1800)))
        run(page, "What is this?")
        [found] = server.batcher.requests[-1].images
        assert 0.95 < found.rows / found.columns / 0.75 < 1.05
        assert 700_000 < len(found.pixels) // 3 <= 1 << 20


def test_without_a_model_that_sees_there_is_no_place_for_images(tokenizer: Tokenizer, new_page: Any) -> None:
    with served(tokenizer) as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        page.click("text=Chat")
        expect(page.locator("#image-add")).to_be_hidden()
