"""Prompts in OpenAI's responses: `echo` as lm-eval reads it, vLLM's `prompt_logprobs`, cached tokens; fairness with many tokens."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from penstock.router.api import openai_logprobs, openai_shapes
from penstock.router.rendering import Renderer
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve
from penstock.tests.router.test_text import byte_fallback, save

CHAT_PATH = "/v1/chat/completions"
PATH = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def choice_from_chunks(chunks: list[Any]) -> dict[str, Any]:
    """The only choice of a stream, put together."""
    assert chunks[-1] == "[DONE]"
    joined: dict[str, Any] = {"text": "", "logprobs": None}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            joined["text"] += choice["text"]
            joined["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                parts = joined["logprobs"] or {name: [] for name in choice["logprobs"]}
                joined["logprobs"] = {
                    name: None if values is None else parts[name] + values for name, values in choice["logprobs"].items()
                }
    return joined


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_echo_returns_text_and_logprobs_of_prompt_then_answer(
    tokenizer: Tokenizer, as_tokens: bool, count: int, streaming: bool
) -> None:
    ids = tokenizer.encode("hié", add_special_tokens=not as_tokens)
    prompt = ids if as_tokens else "hié"

    async def test(server: Server) -> None:
        request_body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": count}
        if streaming:
            choice = choice_from_chunks(await server.events(PATH, {**request_body, "stream": True}))
        else:
            _, body, _ = await server.post(PATH, request_body)
            assert body["usage"]["completion_tokens"] == count
            choice = body["choices"][0]
        (request,) = server.batcher.requests
        assert request.prompt == tuple(ids)
        assert (request.prompt_logprobs, request.prompt_top_n, request.max_new_tokens) == (True, 1, max(count, 1))
        assert choice["text"] == "hié" + "Hello"[:count]
        assert choice["finish_reason"] == "length"
        found = choice["logprobs"]
        assert found["tokens"] == [tokenizer.token_text(id) for id in ids] + list("Hello"[:count])
        assert found["token_logprobs"] == [None] + [-1.0] * (len(ids) - 1) + [-0.5] * count
        assert found["top_logprobs"][0] is None
        # From the fake batcher the prompt's token has -1.0, and its alternative, !, has -2.5.
        assert all(top[tokenizer.token_text(id)] == -1.0 for id, top in list(zip(ids, found["top_logprobs"], strict=False))[1:])
        assert all(top["!"] == -2.5 for top in found["top_logprobs"][1 : len(ids)])
        offsets = [0, 1, 2, 2]  # the last character has two byte tokens; its text is the second's
        offsets = offsets if as_tokens else [0, *offsets]
        assert found["text_offset"] == offsets + [3 + position for position in range(count)]

    serve(tokenizer, test)


def test_text_offsets_are_positions_in_the_returned_text(tokenizer: Tokenizer) -> None:
    """Special tokens count if they are in it: they are in the prompt's text, and not in the answer's if skipped there."""

    async def test(server: Server) -> None:
        request_body = {"prompt": "x</s>y", "echo": True, "logprobs": 0, "max_tokens": 4, "ignore_eos": True}
        _, body, _ = await server.post(PATH, request_body)
        choice = body["choices"][0]
        assert choice["text"] == "x</s>yaBC"
        found = dict(
            zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True)
        )  # the last token at each offset
        assert {offset: choice["text"][offset : offset + len(text)] for offset, text in found.items()} == found
        assert list(found) == [0, 1, 5, 6, 7, 8]
        _, body, _ = await server.post(PATH, {**request_body, "skip_special_tokens": False})  # the prompt's <s> is not in the text
        choice = body["choices"][0]
        assert choice["text"] == "x</s>ya</s>BC"
        assert choice["logprobs"]["text_offset"][-7:] == [0, 1, 5, 6, 7, 11, 12]

    serve(tokenizer, test, generates="a</s>BC")


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("strips_spaces", [True, False])
def test_text_offsets_skip_spaces_that_only_the_tokens_text_has(tmp_path: Path, skip: bool, strips_spaces: bool) -> None:
    """SentencePiece tokenizers put a space before a text and after special tokens, and some special tokens strip spaces."""
    sentencepiece = byte_fallback()
    sentencepiece.add_special_tokens([tokenizers.AddedToken("<end>", rstrip=strips_spaces)])
    sentencepiece.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    prompt = "the cat<end>sat <end>  on <end>"

    async def test(server: Server) -> None:
        request_body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 9, "skip_special_tokens": skip}
        _, body, _ = await server.post(PATH, request_body)
        choice = body["choices"][0]
        text, found = choice["text"], choice["logprobs"]
        assert text.startswith(prompt)
        for token, offset in zip(found["tokens"][1:-1], found["text_offset"][1:-1], strict=True):
            assert text.startswith(token, offset) or text[offset:].lstrip().startswith(token.strip()), (token, offset)
        assert found["text_offset"][found["tokens"].index("x")] == text.index("x")

    serve(save(tmp_path, sentencepiece, eos_token="</s>"), test, generates="x a</s>")


def test_lm_eval_computes_loglikelihoods_from_echo_with_logprobs(tokenizer: Tokenizer) -> None:
    """As lm-eval 0.4 reads responses for `local-completions`."""

    async def test(server: Server) -> None:
        request_body = {
            "prompt": [[5, 6, 7], [8, 9, 10, 11]],
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "temperature": 0,
            "seed": 1,
        }
        _, body, _ = await server.post(PATH, request_body, headers={"Authorization": "Bearer "})
        for choice, context in zip(sorted(body["choices"], key=lambda one: one["index"]), (1, 2), strict=True):
            logprobs = choice["logprobs"]["token_logprobs"][context:-1]
            tops = choice["logprobs"]["top_logprobs"][context:-1]
            assert sum(logprobs) == -2.0
            assert all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))

    serve(tokenizer, test)


def test_echo_without_logprobs_computes_no_prompt_logprobs(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        for logprobs, scored in ((None, False), (0, True)):
            _, body, _ = await server.post(PATH, {"prompt": "hi", "echo": True, "max_tokens": 0, "logprobs": logprobs})
            assert server.batcher.requests[-1].prompt_logprobs == scored
            assert body["choices"][0]["text"] == "hi"
            found = body["choices"][0]["logprobs"]
            assert (found is not None) == scored
            assert found is None or found["top_logprobs"] is None

    serve(tokenizer, test)


def test_echo_of_several_prompts_with_several_choices(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post(PATH, {"prompt": ["a", "b"], "echo": True, "n": 2, "max_tokens": 30})
        assert [choice["text"] for choice in body["choices"]] == ["aHello you", "a1Hello you", "bHello you", "b1Hello you"]
        chunks = await server.events(PATH, {"prompt": ["a", "b"], "echo": True, "n": 2, "max_tokens": 30, "stream": True})
        texts = ["", "", "", ""]
        for chunk in chunks[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ["aHello you", "a1Hello you", "bHello you", "b1Hello you"]

    serve(tokenizer, test)


def test_echo_with_max_tokens_0_counts_no_tokens_and_has_no_beam_score(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        request_body = {"prompt": ["hi", "ho"], "echo": True, "max_tokens": 0, "num_beams": 2, "temperature": 0}
        status, body, response = await server.post(PATH, request_body)
        assert (status, response.headers["x-generated-tokens"], body["usage"]["completion_tokens"]) == (200, "0", 0)
        chunks = await server.events(PATH, {**request_body, "stream": True})
        for choice in (*body["choices"], *(choice for chunk in chunks[:-1] for choice in chunk["choices"])):
            assert "score" not in choice

    serve(tokenizer, test)


def test_max_tokens_0_without_echo_is_a_400(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, body, _ = await server.post(PATH, {"prompt": "hi", "max_tokens": 0})
        assert (status, body["error"]["param"]) == (400, "max_tokens")

    serve(tokenizer, test)


def test_prompt_logprobs_have_vllms_format_and_are_refused_in_streams(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        prompt_id, last_chat_id = tokenizer.encode("h")[1], tokenizer.encode("u")[1]
        expected = [
            None,
            {
                str(prompt_id): {"logprob": -1.0, "rank": None, "decoded_token": "h"},
                "2": {"logprob": -2.5, "rank": 1, "decoded_token": "!"},
                "3": {"logprob": -3.5, "rank": 2, "decoded_token": '"'},
            },
        ]
        _, body, _ = await server.post(PATH, {"prompt": "h", "prompt_logprobs": 2, "max_tokens": 1})
        assert body["choices"][0]["prompt_logprobs"] == expected
        _, body, _ = await server.post(PATH, {"prompt": ["h", "h"], "n": 2, "prompt_logprobs": 2, "max_tokens": 0})
        assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected] * 4
        assert body["usage"]["completion_tokens"] == 0
        _, body, _ = await server.post(CHAT_PATH, {**CHAT, "prompt_logprobs": 0, "max_tokens": 1})
        assert body["prompt_logprobs"][1] == {str(last_chat_id): {"logprob": -1.0, "rank": None, "decoded_token": "u"}}
        assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
        for path, request_body in ((PATH, {"prompt": "h"}), (CHAT_PATH, CHAT)):
            status, body, _ = await server.post(path, {**request_body, "prompt_logprobs": 2, "stream": True})
            message = "`prompt_logprobs` is not supported when streaming tokens"
            assert (status, body["error"]["message"]) == (400, message)

    serve(tokenizer, test)


PROMPT_BODY = {"prompt": "x" * 90, "max_tokens": 0}
COMPLETION_BODY = {"prompt": "x", "max_tokens": 90, "logprobs": 2}
CHAT_BODY = {**CHAT, "max_tokens": 90, "logprobs": True, "top_logprobs": 2}
RESPONSES_BODY = {"input": "x", "max_output_tokens": 90, "include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize(
    ("path", "request_body", "target"),
    [
        (PATH, {**PROMPT_BODY, "echo": True, "logprobs": 2}, (Tokenizer, "token_text")),
        (PATH, {**PROMPT_BODY, "echo": True, "logprobs": 2, "stream": True}, (Tokenizer, "token_text")),
        (PATH, {**PROMPT_BODY, "prompt_logprobs": 2}, (Tokenizer, "token_text")),
        (PATH, COMPLETION_BODY, (openai_shapes, "_most_probable")),
        (CHAT_PATH, CHAT_BODY, (openai_logprobs.LogprobWriter, "logprob")),
        (
            CHAT_PATH,
            {**CHAT_BODY, "tools": [{"type": "function", "function": {"name": "f"}}]},
            (openai_shapes.MessageParser, "read"),
        ),
        ("/v1/responses", RESPONSES_BODY, (openai_logprobs.LogprobWriter, "logprob")),
    ],
)
def test_formatting_many_tokens_gives_other_tasks_turns_of_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, request_body: dict[str, Any], target: tuple[Any, str]
) -> None:
    """With several responses at once, each turn of the event loop formats one part of one of them."""
    since_turn = most_per_turn = total = (
        0  # calls of the function for each token: since the last turn of the loop, at most between two turns, in total
    )
    original = getattr(*target)

    def counting(*arguments: Any) -> Any:
        nonlocal since_turn, total
        since_turn, total = since_turn + 1, total + 1
        return original(*arguments)

    async def other_task() -> None:
        nonlocal since_turn, most_per_turn
        while True:
            most_per_turn, since_turn = max(most_per_turn, since_turn), 0
            await asyncio.sleep(0)

    async def test(server: Server) -> None:
        competing = asyncio.create_task(other_task())
        answers = await asyncio.gather(*(server.client.post(path, json=request_body) for _ in range(3)))
        assert [answer.status for answer in answers] == [200] * 3
        competing.cancel()

    monkeypatch.setattr(tokenizer, "parsers", ("hermes", None))  # so that chats with tools are parsed for calls
    monkeypatch.setattr(tokenizer, "_renderer", Renderer())  # belongs to this event loop; of three chats one may wait for it
    monkeypatch.setattr(openai_logprobs, "PART", 9)
    monkeypatch.setattr(*target, counting)
    serve(tokenizer, test, generates="y" * 90)
    assert total >= 3 * 90
    assert 3 <= most_per_turn <= 9


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_is_detokenized_once_for_all_its_choices(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    streams = []
    stream_of = tokenizer.stream

    def counting_stream(prompt: Sequence[int], *options: Any) -> Any:
        if not prompt:  # detokenizes a prompt itself, not an answer to it
            streams.append(prompt)
        return stream_of(prompt, *options)

    async def test(server: Server) -> None:
        body = {"prompt": ["hi", "you"], "n": 3, "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
        async with server.client.post(PATH, json=body) as response:
            assert (response.status, (await response.text()).count('"<s>"')) == (200, 6)
        assert len(streams) == 2

    monkeypatch.setattr(tokenizer, "stream", counting_stream)
    serve(tokenizer, test)


def test_usage_reports_cached_tokens(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        _, body, _ = await server.post(PATH, {"prompt": ["hi", "you"]})
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        request_body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        *_, last, _ = await server.events(CHAT_PATH, request_body)
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}

    serve(tokenizer, test, cached=2)


def test_truncate_prompt_tokens_keeps_the_prompts_end(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        await server.post(PATH, {"prompt": "x" * 90 + "yes", "truncate_prompt_tokens": 3, "echo": True})
        assert tokenizer.decode(server.batcher.requests[-1].prompt) == "yes"
        await server.post(PATH, {"prompt": "x" * 200, "truncate_prompt_tokens": -1, "max_tokens": 9})
        assert len(server.batcher.requests[-1].prompt) == 100
        status, body, _ = await server.post(PATH, {"prompt": "x", "truncate_prompt_tokens": 0})
        assert (status, body["error"]["param"]) == (400, "truncate_prompt_tokens")

    serve(tokenizer, test)
