"""Beam search from the router's batcher down to a real shard, with the demo model: transformers' answers, whatever happens."""

import asyncio
import functools
from contextlib import aclosing
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

from penstock.router.batcher import Batcher
from penstock.router.recovery import FURTHER
from penstock.router.request import Beams, Finish, Grammar, Grown, Prompt, Request, Sampling, Stopping, Token
from penstock.router.text import Tokenizer
from penstock.tests.inprocess import DEMO, Restless, run, together, tokens, value

TEXTS = ["Once there was a", "Tell me a story about a cat.", "How much is 12 plus 7?", "Lily has a red"]


@functools.cache
def model() -> Any:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


def request(number: int, **more: Any) -> Request:
    """One of several, with the model's own ends."""
    beams = Beams(
        width=2 + number % 4,
        length_penalty=[1.0, 0.0, 2.0, -0.5][number % 4],
        stopping=list(Stopping)[number % 3],
    )
    settings: dict[str, Any] = {"beams": beams, "choices": min(3, beams.width), "max_new_tokens": 12 + 9 * (number % 3)}
    prompt = tuple(tokenizer().encode(TEXTS[number % len(TEXTS)] + " " * (number // len(TEXTS))))
    return Request(prompt=prompt, **({"end_ids": tokenizer().eos_ids} | settings | more))


@functools.cache
@torch.inference_mode()
def by_transformers(number: int) -> tuple[list[list[int]], list[float]]:
    """Answers and scores."""
    asked = request(number)
    assert asked.beams is not None
    settings = transformers.GenerationConfig(
        num_beams=asked.beams.width,
        num_return_sequences=asked.choices,
        max_new_tokens=asked.max_new_tokens,
        length_penalty=asked.beams.length_penalty,
        early_stopping={"true": True, "false": False, "never": "never"}[asked.beams.stopping],
        eos_token_id=list(asked.end_ids),
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    given = torch.tensor([asked.prompt])
    found = model().generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
    lengths = (found.beam_indices >= 0).sum(-1).tolist()
    answers = [row[len(asked.prompt) :][:length].tolist() for row, length in zip(found.sequences, lengths, strict=True)]
    return answers, found.sequences_scores.tolist()


async def whole(batcher: Batcher, asked: Request) -> tuple[list[list[Token]], dict[int, Finish], list[Grown]]:
    """All of a stream."""
    said: list[list[Token]] = [[] for _ in range(asked.choices)]
    ends: dict[int, Finish] = {}
    grown = []
    async with aclosing(batcher.submit(asked)) as stream:
        async for items in stream:
            for item in items:
                if isinstance(item, Token):
                    said[item.choice].append(item)
                elif isinstance(item, Finish):
                    ends[item.choice] = item
                elif isinstance(item, Grown):
                    grown.append(item)
    return said, ends, grown


def ids(said: list[list[Token]]) -> list[list[int]]:
    return [[token.id for token in answer] for answer in said]


NUMBERS = range(12)


@pytest.mark.parametrize("settings", [{}, {"page_size": 4, "kv_pages": 60}, {"page_size": 1, "kv_pages": 200}], ids=str)
def test_the_demo_model_answers_as_by_transformers(settings: dict[str, Any]) -> None:
    """Side by side, among greedy and drawn requests; in small pools everybody is paused twice, too."""
    plain = [
        replace(request(number), beams=None, choices=1 + number % 3, sampling=Sampling(temperature=0.8, seed=number))
        for number in (0, 1, 2)
    ]

    async def alone(batcher: Batcher) -> list[list[list[int]]]:
        return [await tokens(batcher, one) for one in plain]

    async def test(batcher: Batcher) -> Any:
        searches = asyncio.gather(*(whole(batcher, request(number)) for number in NUMBERS))
        return await asyncio.gather(searches, together(batcher, plain))

    expected = run(alone)
    found, beside = run(test, scheduler=Restless if settings else Restless.__base__, shard=settings)
    for number, (said, ends, _) in zip(NUMBERS, found, strict=True):
        answers, scores = by_transformers(number)
        assert ids(said) == answers
        assert [ends[choice].score for choice in range(len(answers))] == pytest.approx(scores, abs=1e-4)
    assert beside == expected


def test_what_is_certain_streams_at_once_with_its_log_probabilities() -> None:
    asked = replace(request(0, top_n=2), beams=Beams(width=3, watched=True), max_new_tokens=20, choices=3)

    async def test(batcher: Batcher) -> Any:
        lists: list[list[Any]] = []
        async with aclosing(batcher.submit(asked)) as stream:
            lists += [items async for items in stream]
        return lists

    lists = run(test)
    items = [item for some in lists for item in some]
    early = [token for some in lists[:-1] for token in some if isinstance(token, Token)]
    said = [[item for item in items if isinstance(item, Token) and item.choice == choice] for choice in range(asked.choices)]
    assert early  # some came before the end,
    assert said[0][: len(early)] == early  # all of the best answer
    for answer in said:
        whole_text = torch.tensor([[*asked.prompt, *(token.id for token in answer)]])
        with torch.inference_mode():
            logprobs = model()(whole_text).logits[0, len(asked.prompt) - 1 : -1].log_softmax(-1)
        for token, row in zip(answer, logprobs, strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-3)
            assert [one.logprob for one in token.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
    grown = [item for item in items if isinstance(item, Grown)]
    assert len(grown) >= max(map(len, said))
    assert all(len(one.live) == 3 for one in grown[:-1])
    trees: list[list[int]] = [[]]
    best: list[list[int]] = []
    for one in grown:  # what was told of the beams leads to the answers
        best += [[*trees[beam.parent], beam.id] for beam in one.complete]
        trees = [[*trees[beam.parent], beam.id] for beam in one.live]
    assert [token.id for token in said[0]] in best


def test_grammars_stop_strings_and_penalties_hold_along_each_beam() -> None:
    colours = Grammar("choice", '["a", "b"]')  # of which there is a token each
    asked = request(0)

    async def test(batcher: Batcher) -> Any:
        return await asyncio.gather(
            whole(batcher, replace(asked, grammar=colours, beams=Beams(width=4), choices=3)),
            whole(batcher, replace(asked, grammar=colours, beams=Beams(width=4), choices=3, end_ids=())),
            whole(batcher, replace(asked, stop=(".",), beams=Beams(width=3), choices=3, max_new_tokens=40)),
            whole(batcher, replace(asked, sampling=Sampling(repetition_penalty=1.5), beams=Beams(width=3), choices=3)),
        )

    (_, chosen, _), (_, endless, _), (_, stopped, _), (said, _, _) = run(test)
    for found in (chosen, endless):  # there are two
        assert {end.text for end in found.values()} == {"a", "b"}
        assert sorted(found) == [0, 1]
    for end in stopped.values():
        assert end.text.count(".") == 1
        assert end.text.endswith(".")
        assert end.reason == "stop_sequence"
    assert len({end.text for end in stopped.values()}) == 3
    settings = transformers.GenerationConfig(
        num_beams=3, num_return_sequences=3, max_new_tokens=asked.max_new_tokens, repetition_penalty=1.5, pad_token_id=0,
        eos_token_id=list(asked.end_ids), do_sample=False,
    )  # fmt: skip
    given = torch.tensor([asked.prompt])
    with torch.inference_mode():
        rows = model().generate(given, attention_mask=torch.ones_like(given), generation_config=settings)[:, len(asked.prompt) :]
    assert ids(said) == [row[: len(answer)].tolist() for row, answer in zip(rows, said, strict=True)]


def test_prompts_are_found_and_the_best_answer_is_found_as_a_prompt() -> None:
    asked = request(0, max_new_tokens=40, end_ids=())

    async def cached(batcher: Batcher, prompt: tuple[int, ...], beams: Beams | None) -> tuple[int, list[int]]:
        async with aclosing(batcher.submit(replace(asked, prompt=prompt, beams=beams, choices=1))) as stream:
            found = [item async for items in stream for item in items]
        first = found[0]
        assert isinstance(first, Prompt)
        return first.cached_tokens, [item.id for item in found if isinstance(item, Token)]

    async def test(batcher: Batcher) -> None:
        found, answer = await cached(batcher, asked.prompt, Beams(width=4))
        assert found == 0
        again, same = await cached(batcher, asked.prompt, Beams(width=4))
        assert again == (len(asked.prompt) - 1) // 4 * 4
        assert same == answer
        talk = (*asked.prompt, *answer)
        assert (await cached(batcher, talk, None))[0] >= (len(talk) - 2) // 4 * 4  # the last token was never computed

    run(test, shard={"page_size": 4, "kv_pages": 400})


def test_who_leaves_takes_everything_along() -> None:
    """However far the search has come."""

    async def test(batcher: Batcher) -> None:
        for seconds in (0.0, 0.01, 0.03, 0.1):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await whole(batcher, request(3, max_new_tokens=200, end_ids=()))
        assert value(batcher, "penstock_running") == 0

    run(test)


def test_a_search_gets_further_while_nothing_is_certain() -> None:
    """Who has to answer for a death of the shards is acquitted by that."""

    async def test(batcher: Batcher) -> None:
        seen: list[tuple[int, int]] = []  # tokens that were told, and how far it is
        reading = asyncio.create_task(whole(batcher, request(3, max_new_tokens=40, end_ids=())))
        while not reading.done():
            for stream in batcher.streams:
                place = batcher._place(stream.uid)
                assert place is not None
                seen.append((max(choice.generated for choice in stream.choices), place))
            await asyncio.sleep(0)
        assert max(place - told for told, place in seen) > 2 * FURTHER
        assert seen == sorted(seen)

    run(test)
