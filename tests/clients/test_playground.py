"""The playground in a browser: streams, token probabilities, keyboard, API key, beams, images, and that no text is inserted as
markup.

Needs playwright (extra `browser`) and an installed Chromium; skipped where one of them is missing.
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
from penstock.tests import serving as real_server
from penstock.tests.router.fake_batcher import FakeBatcher, make_tokenizer, serving
from penstock.tests.router.vision_models import encoded, make_image_model, noise_image

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

MARKUP = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'><b>bold</b>"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
LIMITS = Limits(max_input_tokens=1000, max_total_tokens=2000, vocabulary=300)
WAIT = 15_000  # milliseconds to wait at most, on a busy machine


@dataclass
class PlaygroundServer:
    """A server in a separate thread, whose fake batcher generates the text that a test sets."""

    url: str
    batcher: FakeBatcher
    loop: asyncio.AbstractEventLoop

    def release_tokens(self, tokens: int) -> None:
        """Lets the fake batcher send `tokens` more tokens."""
        assert self.batcher.token_permits is not None
        for _ in range(tokens):
            self.loop.call_soon_threadsafe(self.batcher.token_permits.release)

    def prompt(self) -> str:
        """The prompt of the last request."""
        return self.batcher.tokenizer.decode(self.batcher.requests[-1].prompt)


@contextmanager
def serve_playground(tokenizer: Tokenizer, settings: dict[str, Any] | None = None, **behaviour: Any) -> Iterator[PlaygroundServer]:
    ready, stop = threading.Event(), asyncio.Event()
    found: list[PlaygroundServer] = []

    async def run() -> None:
        batcher = FakeBatcher(tokenizer, **{"limits": LIMITS, **behaviour})
        async with serving(tokenizer, RouterConfig(**{"folder": "", "model": "some/model", **(settings or {})}), batcher) as server:
            _, _, response = await server.get("/health")
            found.append(PlaygroundServer(str(response.url.origin()), batcher, asyncio.get_running_loop()))
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
        # Containers have no user namespaces for the sandbox, and this browser only loads our own page.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def errors() -> list[str]:
    """Errors and warnings that the browser logged."""
    return []


@pytest.fixture
def new_page(browser: Any, errors: list[str]) -> Iterator[Any]:
    """Opens a server's page. At the end, the browser must have logged no errors but failed responses that tests cause."""
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
    """Sends a prompt and waits for all answers."""
    page.fill("#prompt", text)
    page.click("#run")
    expect(page.locator("#run")).not_to_have_text("Stop", timeout=WAIT)
    expect(page.locator("article[aria-busy=true]")).to_have_count(0)


def test_answer_is_shown_token_by_token_with_its_probabilities(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, token_permits=asyncio.Semaphore(0), generates="Hello</s>") as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#model")).to_have_text("some/model")
        page.fill("#prompt", "hi")
        page.click("#run")
        expect(page.locator("#run")).to_have_text("Stop")
        server.release_tokens(2)
        expect(page.locator(".answer .text")).to_have_text("He")
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
        server.release_tokens(4)
        expect(page.locator(".answer .text")).to_have_text("Hello")
        expect(page.locator(".facts")).to_contain_text("finished · 6 tokens")
        expect(page.locator("#said")).to_contain_text("Answer: finished")
        assert page.locator(".token").count() == 6
        surprise = page.locator(".token").first.evaluate("token => token.style.getPropertyValue('--surprise')")
        assert float(surprise) == pytest.approx(0.5 / 0.6931 / 7, abs=1e-3)


def test_escape_stops_the_answer_and_closes_the_stream(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, token_permits=asyncio.Semaphore(3)) as server:
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
def test_no_text_is_inserted_as_markup(tokenizer: Tokenizer, new_page: Any, mode: str) -> None:
    with serve_playground(tokenizer, generates=MARKUP + "</s>") as server:
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
        server.batcher.fails_with = Refused(MARKUP, "temperature")
        run(page, MARKUP)
        assert MARKUP in page.locator("#problem").text_content()
        assert page.locator("main :is(script, img, b), #card img, #code img").count() == 0
        assert page.evaluate("window.hit") is None


def test_keyboard_moves_between_tokens_and_continues_from_an_alternative(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
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


def test_chat_continues_from_the_chosen_sample_and_from_an_alternative(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, generates="Yo</s>") as server:
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


def test_failed_continuation_keeps_the_turns_of_a_chat(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, generates="Yo</s>") as server:
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


def test_failed_continuation_keeps_statistics_beams_and_end_token(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        for width in ("1", "2"):
            page.fill("#num_beams", width)
            run(page, "hi")
            before = page.locator(".facts").text_content(), page.locator(".beam").count(), page.locator(".token.end").count()
            assert (before[1] > 0, before[2]) == (width == "2", 1)
            page.route(re.compile("completions|generate"), lambda route: route.fulfill(status=502, body="bad gateway"))
            page.locator(".token").nth(1).click()
            page.locator("#card button:enabled").first.click()
            expect(page.locator("#problem")).to_have_text("The server answered with status 502.")
            expect(page.locator(".beam")).to_have_count(before[1])
            expect(page.locator(".token.end")).to_have_count(before[2])
            expect(page.locator(".facts")).to_have_text(before[0])
            page.unroute_all()


def test_interrupted_stream_is_reported_and_its_text_is_kept(tokenizer: Tokenizer, new_page: Any) -> None:
    event = {"choices": [{"index": 0, "text": "Yo", "logprobs": None, "finish_reason": None}]}
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        truncated = {"content_type": "text/event-stream", "body": f"data: {json.dumps(event)}\n\n"}
        page.route("**/v1/completions", lambda route: route.fulfill(status=200, **truncated))
        run(page, "hi")
        expect(page.locator("#problem")).to_have_text("The connection to the server broke: it ended before the answer did")
        expect(page.locator(".answer .text")).to_have_text("Yo")
        expect(page.locator(".facts")).to_contain_text("failed")


def event_stream(events: list[Any]) -> dict[str, str]:
    """Arguments of route.fulfill: a response with these server-sent events."""
    return {"content_type": "text/event-stream", "body": "".join(f"data: {json.dumps(event)}\n\n" for event in events)}


def test_answer_of_4000_tokens_is_rendered_and_its_end_stays_in_view(tokenizer: Tokenizer, new_page: Any) -> None:
    """When the page measured the position of the end after every token, 2000 tokens took half a minute, and twice as many four
    times that."""
    logprobs = {"tokens": [" word"], "token_logprobs": [-1.0]}
    events = [{"choices": [{"index": 0, "text": " word", "logprobs": logprobs}]}] * 4000
    stream = event_stream([*events, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}])
    stream["body"] += "data: [DONE]\n\n"
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/v1/completions", lambda route: route.fulfill(**stream))
        run(page, "hi")
        assert page.locator(".token").count() == 4000
        expect(page.locator(".facts")).to_be_in_viewport()


def test_beam_search_of_999_steps_is_rendered_and_its_end_stays_in_view(tokenizer: Tokenizer, new_page: Any) -> None:
    live = [{"parent": row, "id": 5, "text": " word", "score": -1.0} for row in range(8)]
    token = {"token": {"id": 5, "text": " word", "logprob": -1.0, "special": False}}
    last = {**token, "details": {"finish_reason": "length", "input_length": 1}}
    stream = event_stream([{"live": live, "complete": []}, token] * 999 + [last])
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/generate_stream", lambda route: route.fulfill(**stream))
        page.fill("#num_beams", "8")
        run(page, "hi")
        assert (page.locator(".token").count(), page.locator(".beam").count()) == (1000, 8 * 999)
        expect(page.locator(".facts")).to_be_in_viewport()
        expect(page.locator(".beam").last).to_be_in_viewport()


def test_interrupted_beam_search_is_reported_as_failed(tokenizer: Tokenizer, new_page: Any) -> None:
    token = {"id": 5, "text": "Yo", "logprob": -1.0, "special": False}
    stream = event_stream([{"live": [], "complete": []}, {"token": token, "details": None}])
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/generate_stream", lambda route: route.fulfill(**stream))
        page.fill("#num_beams", "2")
        run(page, "hi")
        expect(page.locator("#problem")).to_have_text("The connection to the server broke: it ended before the answer did")
        expect(page.locator(".facts")).to_contain_text("failed")


def test_alternatives_are_listed_by_probability_though_their_texts_are_numbers(tokenizer: Tokenizer, new_page: Any) -> None:
    """JavaScript sorts an object's integer keys."""
    top = {"9": -0.5, "7": -1.0, "x": -1.5, "3": -2.0, "1": -3.0}
    logprobs = {"tokens": ["9"], "token_logprobs": [-0.5], "top_logprobs": [top]}
    stream = event_stream([{"choices": [{"index": 0, "text": "9", "logprobs": logprobs, "finish_reason": "stop"}]}])
    stream["body"] += "data: [DONE]\r\n\r\n"
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/v1/completions", lambda route: route.fulfill(**stream))
        run(page, "hi")
        expect(page.locator("#problem")).to_be_hidden()
        page.locator(".answer .text").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#said")).to_have_text("9 60.7 %; otherwise 7 36.8 %, x 22.3 %, 3 13.5 %")


def test_invalid_value_in_a_hidden_control_does_not_block_a_request(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        page.fill("#num_beams", "2")
        page.fill("#length_penalty", "1.234")
        page.fill("#num_beams", "1")
        run(page, "hi")
        expect(page.locator(".answer .text")).to_have_text("Hello you")


def test_refused_parameter_is_marked_invalid_until_the_next_request(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, fails_with=Refused("`top_p` is odd", "top_p")) as server:
        page = new_page(server.url)
        run(page, "hi")
        expect(page.locator("#top_p")).to_have_attribute("aria-invalid", "true")
        server.batcher.fails_with = None
        run(page, "hi")
        expect(page.locator("[aria-invalid]")).to_have_count(0)


def test_clearing_the_completion_keeps_the_chat(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, generates="Yo</s>") as server:
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


def test_refused_chat_message_returns_to_the_chats_prompt_after_a_change_of_mode(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
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


def test_token_card_closes_when_its_answer_is_removed(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        for button in ("Clear", "Run"):
            run(page, "hi")
            page.locator(".answer .text").focus()
            page.keyboard.press("ArrowRight")
            page.keyboard.press("Enter")
            expect(page.locator("#card button:focus")).to_be_visible()
            page.get_by_role("button", name=button).press("Enter")
            expect(page.locator("#run")).not_to_have_text("Stop")
            expect(page.locator("#card")).to_be_hidden()


def test_api_key_dialog_stays_closed_after_escape_and_reopens_after_a_wrong_key(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, settings={"api_keys": ("secret",)}) as server:
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


def test_api_key_with_characters_that_a_header_cannot_hold_is_not_stored(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, settings={"api_keys": ("secret",)}) as server:
        page = new_page(server.url)
        page.fill("#key-text", "ключ")
        page.keyboard.press("Enter")
        expect(page.locator("#key")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


def test_character_of_several_tokens_is_shown_when_it_is_complete(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, generates="né!</s>") as server:
        page = new_page(server.url)
        run(page, "hi")
        assert page.locator(".token").all_text_contents() == ["n", "", "é", "!", ""]
        page.locator(".token").nth(3).click()
        page.locator("#card button:enabled").first.click()
        expect(page.locator(".answer .text")).to_have_text('né"né!')
        assert server.prompt() == 'hiné"'


def test_reasoning_is_shown_but_not_sent_back(tokenizer: Tokenizer, new_page: Any) -> None:
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
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        bodies: list[Any] = []

        def answer(route: Any) -> None:
            bodies.append(route.request.post_data_json)
            route.fulfill(status=200, content_type="text/event-stream", body=body)

        page.route("**/v1/chat/completions", answer)
        page.click("[name=mode][value=chat] + span")
        run(page, "hi")
        assert page.locator(".answer .text").text_content() == "Hmm.Yes!"
        assert page.locator(".token.thought").all_text_contents() == ["Hm", "m."]
        expect(page.locator(".notes")).to_have_text("prompt of 9 tokens, 5 of them from the cache")
        run(page, "and?")
        assert [message["content"] for message in bodies[1]["messages"]] == ["hi", "Yes!", "and?"]


def test_refused_request_marks_its_parameter_and_returns_the_prompt(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, fails_with=Overloaded("full", 3.0)) as server:
        page = new_page(server.url)
        page.click("[name=mode][value=chat] + span")
        run(page, "hi")
        expect(page.locator("#problem")).to_have_text("Model is overloaded")
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#prompt")).to_have_value("hi")
        server.batcher.fails_with = Refused("`top_p` is odd", "top_p")
        run(page, "hi")
        expect(page.locator("#top_p")).to_have_attribute("aria-invalid", "true")
        server.batcher.fails_with = None
        run(page, "hi")
        expect(page.locator("#problem")).to_be_hidden()


def test_api_key_is_kept_in_session_storage_and_texts_are_stored_nowhere(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, settings={"api_keys": ("secret",)}) as server:
        page = new_page(server.url)
        expect(page.locator("#key")).to_be_visible()
        expect(page.locator("#state")).to_have_text("needs a key")
        page.fill("#key-text", "secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("ready")
        run(page, "a private text")
        expect(page.locator(".answer .text")).to_have_text("Hello you")
        stored = page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie, location.href]")
        assert stored == ['{"penstock-key":"secret"}', "{}", "", f"{server.url}/"]
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        assert "private" not in page.content()
        assert page.input_value("#prompt") != "a private text"


def test_generated_curl_and_python_code_send_the_same_request_as_the_page(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
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
            fake_openai_module(server),
        )
        first, second, third = (msgspec.structs.replace(request, arrived=0.0) for request in server.batcher.requests)
        assert first.choices == 2
        assert (first.sampling.top_k, first.sampling.seed, first.stop) == (7, 3, ("it's\nover", "end"))
        assert first == second == third


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_generated_python_code_passes_only_arguments_that_the_client_has(tokenizer: Tokenizer, new_page: Any, mode: str) -> None:
    """The field of every control is a parameter of the client's method, or is in `extra_body`."""
    openai = pytest.importorskip("openai")
    resources = openai.resources.Completions, openai.resources.chat.Completions
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        page.click(f"[name=mode][value={mode}] + span")
        for control in page.locator("#parameters [type=number]:visible").all():
            control.fill(control.get_attribute("max") or "2")
        page.fill("#stop", "a")
        page.select_option("#priority", "batch")
        for grammar in ("json_object", "json_schema", "regex"):
            page.select_option("#grammar", grammar)
            page.click("#code-open")
            page.click("text=Python")
            statements = [ast.parse(page.text_content("#code-text")).body[2]]
            page.click("#code-close")
            [call] = [node.value for node in statements if isinstance(node, ast.Assign)]
            assert isinstance(call, ast.Call)
            arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            assert len(arguments) > 8
            assert arguments["extra_body"]["top_k"] == 2
            assert arguments.keys() <= inspect.signature(resources[mode == "chat"].create).parameters.keys()


def fake_openai_module(server: PlaygroundServer) -> dict[str, Any]:
    """OpenAI's client as far as the generated code uses it: sends its arguments to the server as JSON."""

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
def test_page_fits_the_screens_width_and_every_control_has_an_accessible_name(
    tokenizer: Tokenizer, new_page: Any, options: dict[str, Any]
) -> None:
    with serve_playground(tokenizer, generates="word " * 20 + "x" * 90 + "</s>") as server:
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


def test_live_view_sends_no_requests_while_the_page_is_hidden(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        expect(page.locator("#live-waiting")).to_have_text("1")
        expect(page.locator("#live-pages")).to_have_attribute("aria-label", re.compile("Of 3 pages"))
        with page.expect_event("requestfailed", predicate=lambda request: request.url.endswith("/stats")):
            page.evaluate("""() => {
                Object.defineProperty(document, "hidden", {value: true, configurable: true});
                document.dispatchEvent(new Event("visibilitychange"));
            }""")
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.wait_for_timeout(2500)
        assert urls == []
        with page.expect_request("**/stats"):
            page.evaluate("""() => {
                Object.defineProperty(document, "hidden", {value: false, configurable: true});
                document.dispatchEvent(new Event("visibilitychange"));
            }""")
        expect(page.locator("#state")).to_have_text("ready")


def test_playground_and_docs_page_work_behind_a_proxys_path_prefix(tokenizer: Tokenizer, new_page: Any) -> None:
    def proxy(route: Any) -> None:
        route.fulfill(response=route.fetch(url=route.request.url.replace("/llm/", "/")))

    with serve_playground(tokenizer) as server:
        urls: list[str] = []
        page = new_page(server.url)
        page.route(re.compile("/llm/(?!stats)"), proxy)  # route.fetch can't forward an endless stream
        page.on("request", lambda request: urls.append(request.url))
        page.goto(f"{server.url}/llm/")
        run(page, "hi")
        expect(page.locator(".answer .text")).to_have_text("Hello you")
        page.click("text=Docs")
        page.click("#post_v1_completions > summary")
        page.click("#post_v1_completions form button")
        expect(page.locator("#post_v1_completions form pre")).to_contain_text('"choices"')
        assert all(url.startswith(f"{server.url}/llm/") for url in urls)


def test_docs_page_reports_that_the_description_could_not_be_loaded(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        page.route("**/openapi.json", lambda route: route.fulfill(status=502, body="bad gateway"))
        page.goto(f"{server.url}/docs")
        expect(page.locator("#about")).to_have_text("There is no description: The server answered with status 502.")


def test_docs_page_with_everything_open_fits_a_phones_width(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
        page = new_page(f"{server.url}/docs", **PHONE)
        expect(page.locator("#post_v1_completions")).to_be_visible()
        for _ in range(3):  # opened elements contain others to open
            page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
            page.wait_for_timeout(300)
        expect(page.locator("#post_v1_completions form pre")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]


def test_lost_connection_to_the_server_is_shown(tokenizer: Tokenizer, new_page: Any, errors: list[str]) -> None:
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#state")).to_have_text("no connection", timeout=WAIT)


def test_playground_with_a_real_server_and_the_demo_model(new_page: Any) -> None:
    """Samples, alternatives, continuation from one of them, live counters, and a regex grammar."""
    with real_server.serve() as server:
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


def test_beams_are_drawn_as_they_grow(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, token_permits=asyncio.Semaphore(0), generates="Hello</s>") as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        assert page.locator("#length_penalty").is_hidden()
        page.fill("#num_beams", "3")
        expect(page.locator("#temperature")).to_have_value("0")
        page.fill("#length_penalty", "2")
        page.fill("#n", "2")
        page.fill("#prompt", "hi")
        page.click("#run")
        server.release_tokens(3)
        beams = page.locator(".beams .beam")
        expect(beams).to_have_count(9)
        expect(page.locator(".beams figcaption")).to_contain_text("3 beams · 3 steps · 0 complete")
        expect(page.locator(".beams .beam.best > text")).to_have_text(["H", "e", "l"])
        # The second step's first beam, which has the same text as the best, is not continued, and neither is the beam that it
        # extends.
        expect(page.locator(".beams .beam.dropped > text")).to_have_text(['"', "e"])
        expect(page.locator(".beams path")).to_have_count(6)
        expect(page.locator(".beams path.dropped")).to_have_count(1)
        expect(page.locator(".beams .dropped.best")).to_have_count(0)
        assert "H · score −0.500" in page.locator(".beams .beam title").first.evaluate("title => title.textContent")
        server.release_tokens(10)
        expect(page.locator(".answer .text")).to_have_text(["Hello", "Hello1"])
        expect(page.locator(".answer .facts").first).to_contain_text("score −0.250")
        expect(page.locator(".beams .beam.best")).to_have_count(6)
        expect(page.locator(".beams .beam.complete.best > text")).to_have_text(["</s>"])
        request = server.batcher.requests[-1]
        assert request.beams == Beams(width=3, length_penalty=2.0, watched=True)
        assert (request.choices, request.sampling.temperature) == (2, 0.0)
        server.release_tokens(100)
        page.click("input[value=chat] + span")
        run(page, "hi")
        expect(page.locator("#chat .answer .text")).to_have_text(["Hello", "Hello1"])
        assert server.batcher.requests[-1].beams == Beams(width=3, length_penalty=2.0)
        page.fill("#num_beams", "1")
        expect(page.locator("#temperature")).to_have_value("0.8")
        run(page, "hi")
        assert server.batcher.requests[-1].beams is None


def test_beam_search_that_finds_fewer_answers_than_n_says_so(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer, max_beams_found=1) as server:
        page = new_page(server.url)
        page.fill("#num_beams", "2")
        page.fill("#n", "2")
        run(page, "hi")
        expect(page.locator(".answer .facts").last).to_contain_text("there is no other")


def test_parameter_that_a_beam_search_is_refused_for_is_marked_invalid(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        page.fill("#num_beams", "2")
        page.fill("#n", "3")
        run(page, "hi")
        expect(page.locator("#problem")).to_contain_text("`num_return_sequences` must be > 0 and <= 2 (`num_beams`). Given: 3")
        expect(page.locator("#n")).to_have_attribute("aria-invalid", "true")


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("seeing")
    tokenizer = make_image_model(folder)
    return str(folder), tokenizer


def uploads(*pictures: Any, form: str = "PNG") -> list[dict[str, Any]]:
    """Image files as set_input_files takes them."""
    kind = {"name": "a.png", "mimeType": f"image/{form.lower()}"}
    return [{**kind, "buffer": encoded(picture, form)} for picture in pictures]


def test_images_are_sent_with_a_message_and_all_later_ones(vision_model: tuple[str, Tokenizer], new_page: Any) -> None:
    """The chat shows them, and limits their number."""
    folder, tokenizer = vision_model
    with serve_playground(tokenizer, {"folder": folder, "max_images": 2}, limits=replace(LIMITS, images=True)) as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#image-add")).to_be_hidden()  # completions take no images
        page.click("text=Chat")
        expect(page.locator("#image-add")).to_be_visible()
        page.set_input_files(
            "#image-files", uploads(noise_image(112, 56), noise_image(56, 56, seed=1), noise_image(56, 56, seed=2))
        )
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
        page.set_input_files("#image-files", uploads(noise_image(56, 56)))
        expect(page.locator("#images img")).to_have_count(1)
        run(page, "")  # an image without text
        assert len(server.batcher.requests[-1].images) == 2
        page.set_input_files("#image-files", uploads(noise_image(56, 56)))
        expect(page.locator("#problem")).to_have_text("A chat has at most 2 images here.")


def test_large_images_are_scaled_down_and_unreadable_files_are_refused(vision_model: tuple[str, Tokenizer], new_page: Any) -> None:
    folder, tokenizer = vision_model
    limits = replace(LIMITS, images=True, max_input_tokens=3000, max_total_tokens=4000)
    with serve_playground(tokenizer, {"folder": folder, "max_images": 2, "payload_limit": 2_000_000}, limits=limits) as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        page.click("text=Chat")
        page.set_input_files("#image-files", {"name": "b.png", "mimeType": "image/png", "buffer": b"nothing"})
        expect(page.locator("#problem")).to_have_text("b.png is no image that this browser can read.")
        page.set_input_files("#image-files", uploads(noise_image(56, 56)))
        expect(page.locator("#images img")).to_have_count(1)
        page.set_input_files("#image-files", uploads(noise_image(2400, 1800)))
        page.click("#images button >> nth=0")  # while the other one is read
        run(page, "What is this?")
        expect(page.locator(".user img")).to_have_count(1, timeout=WAIT)  # it goes once its image is read
        expect(page.locator("article[aria-busy=true]")).to_have_count(0)
        [found] = server.batcher.requests[-1].images
        assert 0.95 < found.rows / found.columns / 0.75 < 1.05
        assert 700_000 < len(found.pixels) // 3 <= 1 << 20


def test_image_button_is_hidden_for_models_without_vision(tokenizer: Tokenizer, new_page: Any) -> None:
    with serve_playground(tokenizer) as server:
        page = new_page(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        page.click("text=Chat")
        expect(page.locator("#image-add")).to_be_hidden()
