"""Rendering chat templates in a worker process: equal text, time and memory limits, and the event loop isn't blocked meanwhile."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from penstock.router.rendering import Renderer
from penstock.router.request import Refused
from penstock.router.template import Chat, ChatTemplate
from penstock.tests.timing import fastest_of_several

pytestmark = pytest.mark.usefixtures("own_processes")

SOURCE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools }}{{ documents }}{{ mood }}"
CHAT = Chat(
    messages=[{"role": "user", "content": "né \u2028 🦊", "n": 10**30}],
    tools=[{"a": 1.5}],
    documents=[{"text": "d"}],
    variables={"mood": "gay"},
)
QUESTION = Chat(messages=[{"role": "user", "content": "x"}])


@pytest.fixture
def renderer() -> Renderer:
    return Renderer(seconds=0.5)


def render(renderer: Renderer, source: str, chat: Chat = QUESTION) -> str:
    return asyncio.run(renderer.render(source, {"bos_token": "<s>"}, chat))


def test_text_equals_rendering_in_this_process(renderer: Renderer) -> None:
    assert render(renderer, SOURCE, CHAT) == ChatTemplate(SOURCE, {"bos_token": "<s>"}).render(CHAT)
    continued = Chat(
        messages=[{"role": "assistant", "content": "Well, "}], continue_final_message=True, add_generation_prompt=False
    )
    assert render(renderer, "{{ messages[0].content }}</s>", continued) == "Well, "


def test_refusal_names_messages_or_the_chat_template(renderer: Renderer) -> None:
    for source, parameter in (("{{ raise_exception('no') }}", "messages"), ("{% if %}", "chat_template")):
        with pytest.raises(Refused) as refused:
            render(renderer, source)
        assert refused.value.parameter == parameter


def test_half_of_a_surrogate_pair_is_refused(renderer: Renderer) -> None:
    """No tokenizer takes it."""
    with pytest.raises(Refused, match="surrogates not allowed"):
        render(renderer, "{{ messages[0].content }}", Chat(messages=[{"role": "user", "content": "cut \ud83d"}]))


def test_message_that_the_template_drops_is_refused(renderer: Renderer) -> None:
    source = "{% for m in messages if m.role in ('user', 'critic') %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "critic", "content": "b"}]
    assert render(renderer, source, Chat(messages=messages)) == "[user]a[critic]b"
    with pytest.raises(Refused, match=r'`messages\[2\].role` "crtic": the model') as refused:
        render(renderer, source, Chat(messages=[*messages, {"role": "crtic", "content": "c"}]))
    assert refused.value.parameter == "messages"


EXPENSIVE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "power": "{{ 7 ** (7 ** 20) }}",
    "memory": "{{ 'a' * 10 ** 11 }}",
    "doubling": "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "replace": "{% set s = 'a' * 10 ** 5 %}{{ s | replace('a', s) | replace('a', s) }}",
    "padding": "{{ 'a'.center(10 ** 11) }}",
    "format": "{{ '%99999999999d' % 1 }}",
    "range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "output": "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_expensive_template_is_stopped_without_blocking_the_event_loop(renderer: Renderer, name: str) -> None:
    """Within the time limit and with a reason; the next chat is rendered."""

    async def run() -> float:
        assert await renderer.render(SOURCE, {}, QUESTION)
        longest, last = 0.0, time.monotonic()
        task = asyncio.create_task(renderer.render(EXPENSIVE[name], {}, QUESTION))
        while not task.done():
            await asyncio.sleep(0.002)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        with pytest.raises(Refused, match="the chat template"):
            await task
        assert await renderer.render(SOURCE, {}, QUESTION) == await renderer.render(SOURCE, {}, QUESTION)
        return longest

    start = time.monotonic()
    longest = asyncio.run(fastest_of_several(0.3, run))
    assert longest < 0.3  # 5 ms are usual; the bound leaves room for a busy machine
    assert time.monotonic() - start < 20


def test_worker_process_outlives_threads_and_event_loops(renderer: Renderer) -> None:
    """A child process dies with the thread that has started it, so that thread must stay."""
    found = set()
    for number in range(3):
        assert render(renderer, f"{{{{ {number} }}}}") == str(number)
        [process] = renderer._workers._idle
        time.sleep(0.05)
        found.add(process._process.pid if process._process.poll() is None else None)
    assert len(found) == 1
    assert None not in found


def test_killed_worker_process_is_replaced(renderer: Renderer) -> None:
    async def run() -> list[str]:
        found = [await renderer.render("{{ 1 }}", {}, QUESTION)]
        [process] = renderer._workers._idle
        os.kill(process._process.pid, signal.SIGKILL)
        return [*found, await renderer.render("{{ 2 }}", {}, QUESTION)]

    assert asyncio.run(run()) == ["1", "2"]


def test_more_chats_than_worker_processes_wait_and_are_rendered(renderer: Renderer) -> None:
    async def run() -> list[str]:
        slow: Any = [asyncio.create_task(renderer.render(EXPENSIVE["loops"], {}, QUESTION)) for _ in range(3)]
        found = await asyncio.gather(*(renderer.render(f"{{{{ {number} }}}}", {}, QUESTION) for number in range(20)))
        ended = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(end, Refused) for end in ended)
        return found

    assert asyncio.run(run()) == [str(number) for number in range(20)]


def test_cancelled_rendering_frees_its_worker(renderer: Renderer) -> None:
    async def run() -> str:
        task = asyncio.create_task(renderer.render(EXPENSIVE["loops"], {}, QUESTION))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait([task])
        return await renderer.render("{{ 1 }}", {}, QUESTION)

    assert asyncio.run(run()) == "1"


def test_chat_of_1_mb_is_rendered(renderer: Renderer) -> None:
    """It takes a few ms each way."""
    chat = Chat(messages=[{"role": "user", "content": "word " * 200_000}])
    assert render(renderer, SOURCE, chat).count("word") == 200_000
