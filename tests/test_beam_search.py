"""Beam search through the router's batcher and a real shard in one process, with the demo model, compared with transformers' beam
search: in mixed batches, under preemption, with grammars, stop strings and penalties.
"""

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
from penstock.tests.inprocess import DEMO_MODEL, PreemptingScheduler, generate_all, generate_tokens, metric_value, run

TEXTS = ["Once there was a", "Tell me a story about a cat.", "How much is 12 plus 7?", "Lily has a red"]


@functools.cache
def model() -> Any:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


def request(number: int, **more: Any) -> Request:
    """Beam search number `number`: width, length penalty and stopping rule vary. The end tokens are the model's."""
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
    """Token ids and score of each answer."""
    search = request(number)
    assert search.beams is not None
    settings = transformers.GenerationConfig(
        num_beams=search.beams.width,
        num_return_sequences=search.choices,
        max_new_tokens=search.max_new_tokens,
        length_penalty=search.beams.length_penalty,
        early_stopping={"true": True, "false": False, "never": "never"}[search.beams.stopping],
        eos_token_id=list(search.end_ids),
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    prompt = torch.tensor([search.prompt])
    output = model().generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    lengths = (output.beam_indices >= 0).sum(-1).tolist()
    answers = [row[len(search.prompt) :][:length].tolist() for row, length in zip(output.sequences, lengths, strict=True)]
    return answers, output.sequences_scores.tolist()


async def collect(batcher: Batcher, search: Request) -> tuple[list[list[Token]], dict[int, Finish], list[Grown]]:
    """The tokens and the finish of each choice, and the beams' growth, from the whole stream."""
    tokens_of_choice: list[list[Token]] = [[] for _ in range(search.choices)]
    finishes: dict[int, Finish] = {}
    grown = []
    async with aclosing(batcher.submit(search)) as stream:
        async for items in stream:
            for item in items:
                if isinstance(item, Token):
                    tokens_of_choice[item.choice].append(item)
                elif isinstance(item, Finish):
                    finishes[item.choice] = item
                elif isinstance(item, Grown):
                    grown.append(item)
    return tokens_of_choice, finishes, grown


def ids(answers: list[list[Token]]) -> list[list[int]]:
    return [[token.id for token in answer] for answer in answers]


NUMBERS = range(12)


@pytest.mark.parametrize("settings", [{}, {"page_size": 4, "kv_pages": 60}, {"page_size": 1, "kv_pages": 200}], ids=str)
def test_beam_searches_in_a_mixed_batch_give_transformers_answers_and_scores(settings: dict[str, Any]) -> None:
    """All searches run at once, beside greedy and sampled requests; in small pools each request is also preempted twice."""
    others = [
        replace(request(number), beams=None, choices=1 + number % 3, sampling=Sampling(temperature=0.8, seed=number))
        for number in (0, 1, 2)
    ]

    async def alone(batcher: Batcher) -> list[list[list[int]]]:
        return [await generate_tokens(batcher, each) for each in others]

    async def test(batcher: Batcher) -> Any:
        searches = asyncio.gather(*(collect(batcher, request(number)) for number in NUMBERS))
        return await asyncio.gather(searches, generate_all(batcher, others))

    others_expected = run(alone)
    found, others_found = run(test, scheduler=PreemptingScheduler if settings else PreemptingScheduler.__base__, shard=settings)
    for number, (tokens_of_choice, finishes, _) in zip(NUMBERS, found, strict=True):
        expected_answers, expected_scores = by_transformers(number)
        assert ids(tokens_of_choice) == expected_answers
        assert [finishes[choice].score for choice in range(len(expected_answers))] == pytest.approx(expected_scores, abs=1e-4)
    assert others_found == others_expected


def test_tokens_that_no_beam_can_change_are_streamed_early_with_correct_logprobs() -> None:
    search = replace(request(0, top_n=2), beams=Beams(width=3, watched=True), max_new_tokens=20, choices=3)

    async def test(batcher: Batcher) -> Any:
        lists: list[list[Any]] = []
        async with aclosing(batcher.submit(search)) as stream:
            lists += [items async for items in stream]
        return lists

    lists = run(test)
    items = [item for items_of_step in lists for item in items_of_step]
    streamed = [token for items_of_step in lists[:-1] for token in items_of_step if isinstance(token, Token)]
    answers = [[item for item in items if isinstance(item, Token) and item.choice == choice] for choice in range(search.choices)]
    assert streamed  # some tokens came before the end,
    assert answers[0][: len(streamed)] == streamed  # and all of them belong to the best answer
    for answer in answers:
        whole_text = torch.tensor([[*search.prompt, *(token.id for token in answer)]])
        with torch.inference_mode():
            logprobs = model()(whole_text).logits[0, len(search.prompt) - 1 : -1].log_softmax(-1)
        for token, row in zip(answer, logprobs, strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-3)
            assert [each.logprob for each in token.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
    grown = [item for item in items if isinstance(item, Grown)]
    assert len(grown) >= max(map(len, answers))
    assert all(len(each.live) == 3 for each in grown[:-1])
    trees: list[list[int]] = [[]]
    best: list[list[int]] = []
    for each in grown:  # the streamed growth of the beams contains the answers
        best += [[*trees[beam.parent], beam.id] for beam in each.complete]
        trees = [[*trees[beam.parent], beam.id] for beam in each.live]
    assert [token.id for token in answers[0]] in best


def test_grammars_stop_strings_and_penalties_apply_to_each_beam() -> None:
    letters = Grammar("choice", '["a", "b"]')  # each is one token
    search = request(0)

    async def test(batcher: Batcher) -> Any:
        return await asyncio.gather(
            collect(batcher, replace(search, grammar=letters, beams=Beams(width=4), choices=3)),
            collect(batcher, replace(search, grammar=letters, beams=Beams(width=4), choices=3, end_ids=())),
            collect(batcher, replace(search, stop=(".",), beams=Beams(width=3), choices=3, max_new_tokens=40)),
            collect(batcher, replace(search, sampling=Sampling(repetition_penalty=1.5), beams=Beams(width=3), choices=3)),
        )

    (_, chosen, _), (_, without_end_token, _), (_, stopped, _), (penalized, _, _) = run(test)
    for found in (chosen, without_end_token):  # the grammar has two answers
        assert {end.text for end in found.values()} == {"a", "b"}
        assert sorted(found) == [0, 1]
    for end in stopped.values():
        assert end.text.count(".") == 1
        assert end.text.endswith(".")
        assert end.reason == "stop_sequence"
    assert len({end.text for end in stopped.values()}) == 3
    settings = transformers.GenerationConfig(
        num_beams=3, num_return_sequences=3, max_new_tokens=search.max_new_tokens, repetition_penalty=1.5, pad_token_id=0,
        eos_token_id=list(search.end_ids), do_sample=False,
    )  # fmt: skip
    prompt = torch.tensor([search.prompt])
    with torch.inference_mode():
        rows = model().generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)[:, len(search.prompt) :]
    assert ids(penalized) == [row[: len(answer)].tolist() for row, answer in zip(rows, penalized, strict=True)]


def test_prefix_cache_holds_the_prompt_and_the_best_answer_of_a_beam_search() -> None:
    search = request(0, max_new_tokens=40, end_ids=())

    async def cached(batcher: Batcher, prompt: tuple[int, ...], beams: Beams | None) -> tuple[int, list[int]]:
        async with aclosing(batcher.submit(replace(search, prompt=prompt, beams=beams, choices=1))) as stream:
            found = [item async for items in stream for item in items]
        first = found[0]
        assert isinstance(first, Prompt)
        return first.cached_tokens, [item.id for item in found if isinstance(item, Token)]

    async def test(batcher: Batcher) -> None:
        found, answer = await cached(batcher, search.prompt, Beams(width=4))
        assert found == 0
        again, same = await cached(batcher, search.prompt, Beams(width=4))
        assert again == (len(search.prompt) - 1) // 4 * 4
        assert same == answer
        next_turn = (*search.prompt, *answer)
        assert (await cached(batcher, next_turn, None))[0] >= (len(next_turn) - 2) // 4 * 4  # the last token was never computed

    run(test, shard={"page_size": 4, "kv_pages": 400})


def test_cancelled_beam_search_frees_all_its_pages() -> None:
    """Cancelled after different times, and so at different steps."""

    async def test(batcher: Batcher) -> None:
        for seconds in (0.0, 0.01, 0.03, 0.1):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await collect(batcher, request(3, max_new_tokens=200, end_ids=()))
        assert metric_value(batcher, "penstock_running") == 0

    run(test)


def test_beam_search_reports_progress_before_its_first_token_is_certain() -> None:
    """Recovery needs it: a request that made progress is not suspected of having killed the shards."""

    async def test(batcher: Batcher) -> None:
        progress: list[tuple[int, int]] = []  # tokens streamed, and the position of the search
        reading = asyncio.create_task(collect(batcher, request(3, max_new_tokens=40, end_ids=())))
        while not reading.done():
            for stream in batcher.streams:
                position = batcher._place(stream.uid)
                assert position is not None
                progress.append((max(choice.generated for choice in stream.choices), position))
            await asyncio.sleep(0)
        assert max(position - streamed for streamed, position in progress) > 2 * FURTHER
        assert progress == sorted(progress)

    run(test)
