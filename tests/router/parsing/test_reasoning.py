"""Readers of generated text: reasoning, and what stands around the parts of an answer."""

import random
import re

import pytest

from penstock.router.parsing import Part, Reasoning, Text
from penstock.router.parsing.readers import REASONING_FORMS, markers
from penstock.tests.router.parsing.deltas import PARIS, SCHEMAS, calls, parts_of, random_deltas


@pytest.mark.parametrize("reasoning", REASONING_FORMS)
def test_end_of_reasoning_marker_at_the_start_of_an_answer_is_removed(reasoning: str) -> None:
    """MiniMax M3 starts answers without reasoning so. Later in an answer the marker is text."""
    [closed, *_] = REASONING_FORMS[reasoning].closes
    for deltas in ([f"{closed}\n\nYes."], list(f"\n{closed}Yes.")):
        assert parts_of(deltas, reasoning, None, prompt="<user>x<bot>\n") == [Text("Yes.")]
    later = "" if closed in REASONING_FORMS[reasoning].frames else closed
    assert parts_of([f"Yes{closed}."], reasoning, None) == [Text(f"Yes{later}.")]
    assert parts_of([f"{closed}."], reasoning, None, prompt="<bot>Yes", continued="Yes") == [Text(f"{later}.")]


@pytest.mark.parametrize("name", REASONING_FORMS)
def test_reasoning_is_separated_from_text_also_when_it_began_in_the_prompt(name: str) -> None:
    form = REASONING_FORMS[name]
    [opened, *_], [closed, *_] = form.opens, form.closes
    parts = [Reasoning("Hm,  so\n <b>"), Text("Yes. ")]
    text = f"\n{opened}\nHm,  so\n <b>\n{closed}\n\nYes. "
    for deltas in ([text], list(text), *(random_deltas(text, random.Random(seed)) for seed in range(50))):
        assert parts_of(deltas, name, None) == parts
    without_opening = text.partition(opened)[2]
    assert parts_of(list(without_opening), name, None, prompt=f"<user>Hi {opened}\n") == parts
    content = "\nHm,  so\n <b>Yes. " if closed in form.frames else without_opening
    assert parts_of([without_opening], name, None, prompt=f"<user>Hi {opened} {closed}\n") == [Text(content)]
    rest, content = without_opening.removeprefix("\nHm,"), content.removeprefix("\nHm,")
    for continued, expected in (
        (f"\n{opened}\nHm,", [Reasoning("  so\n <b>"), Text("Yes. ")]),
        (f"{opened}\n", [Reasoning("so\n <b>"), Text("Yes. ")]),
        (f"{opened}Hm{closed} So", [Text(content)]),
        (f"We write {opened}", [Text(content)]),
        ("So", [Text(content)]),
    ):
        prompt = f"<user>Hi {opened}<bot>{continued}"
        assert parts_of(list(rest), name, None, prompt=prompt, continued=continued) == expected
    assert parts_of(list(" Yes <"), name, None) == [Text(" Yes <")]
    assert parts_of(list(f"Yes {opened}"), name, None) == [Text(f"Yes {opened}")]
    assert parts_of(list(f"{opened}Hm \n"), name, None) == [Reasoning("Hm \n")]
    assert parts_of([], name, None) == []


@pytest.mark.parametrize(
    ("name", "opened", "closed"), [("hunyuan_a13b", "<answer>", "</answer>"), ("ernie45", "<response>", "</response>")]
)
@pytest.mark.parametrize("tools", [None, "hermes"])
def test_markers_around_the_answer_after_reasoning_are_removed(name: str, opened: str, closed: str, tools: str | None) -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>' if tools else ""
    call_parts = calls(("now", "{}")) if tools else []

    def check(text: str, prompt: str = "", continued: str = "") -> None:
        for deltas in ([text], list(text), random_deltas(text, random.Random(text))):
            found = parts_of(deltas, name, tools, prompt=prompt, continued=continued, schemas=SCHEMAS)
            assert [part for part in found if not isinstance(part, Reasoning)] == expected, text

    expected: list[Part] = [Text("Yes <b> or\n no"), *call_parts]
    for thought in ("<think>\nHm\n</think>\n", ""):
        check(f"{thought}{opened}\nYes <b> or\n no\n{closed}{call}\n")
        check(f"{thought}{opened}Yes <b> or\n no{call}{closed}")
        check(f"{thought}{opened}\nYes <b> or\n no{call}")
    check(f"Hm</think>\n{opened}\nYes <b> or\n no\n{closed}{call}", "<think>\n")
    check(f"Yes <b> or\n no\n{closed}{call}", continued=f"<think>Hm</think>{opened}\nSo:\n")
    # Markers that are not a pair around the answer stay.
    expected = [Text(f"Yes{closed}"), *call_parts]
    check(f"Yes{closed}{call}", continued=f"{opened}So{closed}")
    expected = [Text(f"Yes {opened} and {closed}.")]
    check(f"<think>Hm</think>\nYes {opened} and {closed}.")
    expected = [Text(f"Yes{closed}")]
    check(f"{opened}\n{closed}Yes{closed}")


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        (
            "kimi_k3",
            "<|open|>think<|sep|>",
            "Hm<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|>"
            '<|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
            [Reasoning("Hm"), Text("I look."), *calls(("now", "{}"))],
        ),
        ("kimi_k3", "<|open|>response<|sep|>", "Yes<|close|>response<|sep|><|close|>message<|sep|>", [Text("Yes")]),
        (
            "kimi_k3",
            "",
            "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>Yes <|sep|>",
            [Text("Yes <|sep|>")],
        ),
        (
            "solar_open",
            "<|begin|>assistant",
            "<|think|>Hm<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>now<|tool_call:args|>{}"
            "<|tool_call:end|><|calls|>",
            [Reasoning("Hm"), *calls(("now", "{}"))],
        ),
        (
            "hyperclovax",
            "<|im_start|>assistant",
            "/think\nHm<|im_end|>\n<|im_start|>assistant\nI look.<|im_end|>\n<|im_start|>assistant -> tool/function_call\n"
            '[{"name": "now", "arguments": {}}]<|im_end|>',
            [Reasoning("Hm"), Text("I look."), *calls(("now", "{}"))],
        ),
        (
            "hyperclovax",
            "<|im_start|>assistant/think\n",
            "Hm<|im_end|>\n<|im_start|>assistant\nYes",
            [Reasoning("Hm"), Text("Yes")],
        ),
        (
            "solar_open",
            "<|begin|>assistant<|think|><|end|><|begin|>assistant",
            "<|content|>Yes, an assistant.<|end|>",
            [Text("Yes, an assistant.")],
        ),
    ],
)
def test_tokens_around_the_parts_of_an_answer_are_removed(name: str, prompt: str, text: str, expected: list[Part]) -> None:
    for deltas in ([text], list(text), *(random_deltas(text, random.Random(seed)) for seed in range(20))):
        assert parts_of(deltas, name, name, prompt=prompt, schemas=SCHEMAS) == expected
    assert all(re.fullmatch(r"<\|[a-z_:]+\|>", marker) for marker in markers(name, name) if marker[0] == "<")


def test_gemma_4_reasoning_channel_is_recognized_by_its_name() -> None:
    expected = [Reasoning("Hm"), *calls(("now", "{}"))]
    for text in (
        "<|channel>thought\nHm\n<channel|><|tool_call>call:now{}<tool_call|>",
        "<|channel>Hm<channel|><|tool_call>call:now{}",
    ):
        for deltas in ([text], list(text)):
            assert parts_of(deltas, "gemma4", "gemma4", schemas=SCHEMAS) == expected
    assert parts_of(list("<|channel>thought\n<channel|>Yes"), "gemma4", "gemma4") == [Text("Yes")]
    assert parts_of(list("hm<channel|>Hi"), "gemma4", None, prompt="<|channel>thought\n") == [Reasoning("hm"), Text("Hi")]
    assert parts_of(list("<|channel>thoughts<channel|>Hi"), "gemma4", None) == [Reasoning("thoughts"), Text("Hi")]
    assert parts_of(list("Yes"), "gemma4", "gemma4", prompt="<|turn>model\n<|channel>thought\n<channel|>") == [Text("Yes")]
    assert set(markers("gemma4", "gemma4")) == {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'}


ASSISTANT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (ASSISTANT, f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}<|call|>", calls(("weather", PARIS))),
        (ASSISTANT, f"<|channel|>commentary to=functions.weather json<|message|>{PARIS}", calls(("weather", PARIS))),
        (ASSISTANT, "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|message|>Yes", [Reasoning("Hm"), Text("Yes")]),
        (
            ASSISTANT,
            "<|channel|>analysis<|message|>Hm<|end|>"
            "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
            [Reasoning("Hm"), *calls(("now", "{}"))],
        ),
        (ASSISTANT, " to my surprise", [Text(" to my surprise")]),
        (ASSISTANT, "<|channel|>final", [Text("<|channel|>final")]),
        (ASSISTANT, "just text", [Text("just text")]),
        (f"{ASSISTANT}<|channel|>analysis<|message|>I", " th<|end|><|channel|>final<|message|>A", [Reasoning(" th"), Text("A")]),
        (f"{ASSISTANT}<|channel|>final<|message|>I", " see.<|return|>", [Text(" see.")]),
        (f"{ASSISTANT}<|channel|>final<|message|>I<|end|>", "so", [Text("so")]),
        # gpt-oss's built-in tools, which the request doesn't have.
        (ASSISTANT, "<|channel|>analysis to=python code<|message|>print(1)<|call|>", [Reasoning("print(1)")]),
        (ASSISTANT, '<|channel|>commentary to=browser.open<|message|>{"id": 1}<|call|>', [Reasoning('{"id": 1}')]),
        (ASSISTANT, "<|channel|>commentary to=now<|message|>{}<|call|>", calls(("now", "{}"))),
        (ASSISTANT, "<|channel|>commentary to=functions.now<|message|>no JSON<|call|>", [Text("no JSON")]),
    ],
)
def test_harmony_message_that_begins_in_the_prompt_is_parsed(prompt: str, text: str, expected: list[Part]) -> None:
    rng = random.Random(text)
    for deltas in ([text], list(text), *(random_deltas(text, rng) for _ in range(20))):
        assert parts_of(deltas, "harmony", "harmony", prompt=prompt, schemas=SCHEMAS) == expected


def test_calls_after_reasoning_are_parsed_and_calls_within_it_are_not() -> None:
    thought = '<think>I <tool_call>{"name": "now"}</tool_call>?\n</think>\n\n'
    text = f'{thought}<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>'
    expected = [Reasoning('I <tool_call>{"name": "now"}</tool_call>?'), *calls(("weather", PARIS))]
    for deltas in ([text], list(text)):
        assert parts_of(deltas, "qwen3", "hermes", schemas=SCHEMAS) == expected
    bare = f'[THINK]so[/THINK]{{"name": "weather", "parameters": {PARIS}}}'
    assert parts_of(list(bare), "mistral", "llama3_json", schemas=SCHEMAS) == [Reasoning("so"), *calls(("weather", PARIS))]
