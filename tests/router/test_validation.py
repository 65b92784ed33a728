"""Validation of request parameters: limits, TGI's messages, defaults, and what reaches the batcher."""

import asyncio
import math
import re
import threading
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from penstock.router.config import RouterConfig
from penstock.router.request import Beams, Expired, Limits, Priority, Refused, Request, Stopping
from penstock.router.text import LONG_TEXT, Tokenizer
from penstock.router.validation import CANDIDATES, Parameters, Validator
from penstock.tests.router.fake_batcher import LIMITS, make_tokenizer

CONFIG = RouterConfig(folder="", model="m")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def validate(tokenizer: Tokenizer, prompt: Any = "hi", config: RouterConfig = CONFIG, **given: Any) -> Request:
    return asyncio.run(Validator(config, tokenizer).request(prompt, Parameters(**given), LIMITS))


def test_each_valid_request_is_observed(tokenizer: Tokenizer) -> None:
    seen: list[tuple[int, int]] = []
    validator = Validator(CONFIG, tokenizer, lambda *observed: seen.append(observed))
    asyncio.run(validator.request([5] * 3, Parameters(max_new_tokens=7), LIMITS))
    with pytest.raises(Refused):
        asyncio.run(validator.request([5] * 3, Parameters(max_new_tokens=0), LIMITS))
    assert seen == [(3, 7)]


NEEDS_BEAMS = "`{}` needs beams: ask for them with `num_beams` > 1, or leave it out"
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ({"temperature": -1.0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"presence_penalty": -2.1}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.5}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"min_p": 1.5}, "`min_p` must be >= 0.0 and <= 1.0"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"max_new_tokens": -5}, "`max_new_tokens` must be strictly positive"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, "`stop` sequences must have from 1 to 1024 characters"),
    ({"stop": ["a" * 1025]}, "`stop` sequences must have from 1 to 1024 characters"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 100. Given: 0"),
    ({"truncate": 101}, "`truncate` must be strictly positive and less than 100. Given: 101"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"top_n_tokens": -1}, "`top_n_tokens` must be >= 0 and <= 5. Given: -1"),
    ({"choices": 0}, "`best_of` must be > 0 and <= 16. Given: 0"),
    ({"choices": 17, "do_sample": True}, "`best_of` must be > 0 and <= 16. Given: 17"),
    ({"priority": "urgent"}, '`priority` must be one of "interactive", "normal", "batch". Given: "urgent"'),
    ({"timeout": 0.0}, "`timeout` must be strictly positive"),
    ({"timeout": math.inf}, "`timeout` must be a finite number of 32 bits"),
    ({"seed": -1}, "`seed` must be an unsigned integer of 64 bits. Given: -1"),
    ({"seed": 2**64}, f"`seed` must be an unsigned integer of 64 bits. Given: {2**64}"),
    ({"logit_bias": {5: 101.0}}, "`logit_bias` must be >= -100.0 and <= 100.0. Given: 101.0 for the token id 5"),
    ({"logit_bias": {300: 1.0}}, "`logit_bias` has the token id 300; the model knows 0 to 299"),
    ({"end_ids": [-1]}, "`stop_token_ids` has the token id -1; the model knows 0 to 299"),
    ({"num_beams": 0}, "`num_beams` must be > 0 and <= 8 (--max-num-beams). Given: 0"),
    ({"num_beams": 9}, "`num_beams` must be > 0 and <= 8 (--max-num-beams). Given: 9"),
    ({"num_beams": 10**30}, f"`num_beams` must be > 0 and <= 8 (--max-num-beams). Given: {10**30}"),
    ({"num_beams": 3, "num_return_sequences": 4}, "`num_return_sequences` must be > 0 and <= 3 (`num_beams`). Given: 4"),
    ({"num_beams": 3, "num_return_sequences": 0}, "`num_return_sequences` must be > 0 and <= 3 (`num_beams`). Given: 0"),
    ({"num_beams": 3, "length_penalty": math.nan}, "`length_penalty` must be a finite number of 32 bits"),
    (
        {"num_beams": 3, "length_penalty": -20.0, "max_new_tokens": 100},
        "`length_penalty` -20.0 is too far from 0 for 100 tokens: scores must be finite numbers of 32 bits; lower "
        "`max_new_tokens` or bring it nearer",
    ),
    (
        {"num_beams": 3, "length_penalty": -35.0, "max_new_tokens": 12},
        "`length_penalty` -35.0 is too far from 0 for 12 tokens: scores must be finite numbers of 32 bits; lower `max_new_tokens` "
        "or bring it nearer",
    ),
    ({"num_beams": 3, "early_stopping": "soon"}, '`early_stopping` must be true, false or "never". Given: "soon"'),
    (
        {"num_beams": 3, "choices": 2, "do_sample": True},
        "`best_of` together with `num_beams` > 1 is not supported: `num_return_sequences` says how many of the best beams are "
        "answers",
    ),
    ({"num_return_sequences": 2}, NEEDS_BEAMS.format("num_return_sequences")),
    ({"num_beams": 1, "length_penalty": 0.5}, NEEDS_BEAMS.format("length_penalty")),
    ({"early_stopping": True}, NEEDS_BEAMS.format("early_stopping")),
    ({"early_stopping": "never"}, NEEDS_BEAMS.format("early_stopping")),
    ({"stream_beams": True}, NEEDS_BEAMS.format("stream_beams")),
    ({"prompt": ""}, "`inputs` cannot be empty"),
    ({"prompt": []}, "`inputs` cannot be empty"),
    ({"prompt": [1, 300]}, "`inputs` has the token id 300; the model knows 0 to 299"),
    ({"prompt": "x" * 100}, "`inputs` must have less than 100 tokens. Given: 101"),
    (
        {"prompt": "x" * 50, "max_new_tokens": 100},
        "`inputs` tokens + `max_new_tokens` must be <= 128. Given: 51 `inputs` tokens and 100 `max_new_tokens`",
    ),
    (
        {"max_new_tokens": 10**30},
        f"`inputs` tokens + `max_new_tokens` must be <= 128. Given: 3 `inputs` tokens and {10**30} `max_new_tokens`",
    ),
]


@pytest.mark.parametrize(("given", "message"), INVALID)
def test_invalid_parameter_is_refused_with_tgis_message(tokenizer: Tokenizer, given: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        validate(tokenizer, **given)
    assert str(refused.value) == message
    assert refused.value.parameter is not None


@pytest.mark.parametrize(
    "name", ["temperature", "repetition_penalty", "frequency_penalty", "presence_penalty", "top_p", "typical_p", "min_p"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_non_finite_number_is_refused_with_the_parameters_name(tokenizer: Tokenizer, name: str, value: float) -> None:
    with pytest.raises(Refused, match=f"`{name}`"):
        validate(tokenizer, **{name: value})


def test_temperature_that_underflows_float32_counts_as_zero(tokenizer: Tokenizer) -> None:
    with pytest.raises(Refused, match="strictly positive"):
        validate(tokenizer, temperature=1e-300)


def test_tiny_temperature_becomes_greedy(tokenizer: Tokenizer) -> None:
    """In float32, quotients by 1e-38 are infinite or NaN."""
    for temperature in (1.3e-38, 9e-6):
        assert validate(tokenizer, temperature=temperature, seed=3).sampling.temperature == 0.0
        assert validate(tokenizer, temperature=temperature, num_beams=2).sampling.temperature == 0.0
    assert validate(tokenizer, temperature=1e-5).sampling.temperature == 1e-5


def test_stop_string_that_is_a_special_token_becomes_an_end_id(tokenizer: Tokenizer) -> None:
    request = validate(tokenizer, stop=["<s>", "a<s>", "<s>"])
    assert (request.stop, request.end_ids) == (("a<s>",), (1, 0))
    request = validate(tokenizer, stop=["</s>"], ignore_eos=True)
    assert (request.stop, request.end_ids) == ((), (1,))
    assert validate(tokenizer, end_ids=[7], ignore_eos=True).end_ids == (7,)
    # If special tokens are not skipped, it is text like any other.
    request = validate(tokenizer, stop=["<s>"], skip_special_tokens=False)
    assert (request.stop, request.end_ids) == (("<s>",), (1,))
    # Beams end in the shards, which know it only as a token; the text then includes or omits it like any other stop string.
    request = validate(tokenizer, stop=["<s>", "a<s>"], skip_special_tokens=False, num_beams=2)
    assert (request.stop, request.end_ids) == (("<s>", "a<s>"), (1, 0))
    with pytest.raises(Refused, match="supports up to 4 stop sequences"):
        validate(tokenizer, stop=["<s>"] * 5)


def test_end_ids_outside_the_vocabulary_are_dropped(tokenizer: Tokenizer) -> None:
    limits = replace(LIMITS, vocabulary=1)
    request = asyncio.run(Validator(CONFIG, tokenizer).request([0], Parameters(stop=["<s>"]), limits))
    assert request.end_ids == (0,)


def test_defaults_are_greedy_with_all_remaining_tokens(tokenizer: Tokenizer) -> None:
    request = validate(tokenizer)
    assert request.prompt == tuple(tokenizer.encode("hi"))
    assert request.max_new_tokens == 128 - 3
    assert request.sampling.temperature == 0.0
    assert request.sampling.seed == 0
    assert request.end_ids == tokenizer.eos_ids == (1,)


@pytest.mark.parametrize("given", [{"do_sample": True}, {"top_k": 3}, {"top_p": 0.9}, {"typical_p": 0.9}, {"temperature": 1.0}])
def test_each_sampling_parameter_enables_sampling_with_a_random_seed(tokenizer: Tokenizer, given: dict[str, Any]) -> None:
    request = validate(tokenizer, **given)
    assert request.sampling.temperature == 1.0
    assert 0 < request.sampling.seed < 2**64
    assert validate(tokenizer, **given).sampling.seed != request.sampling.seed


def test_given_parameters_are_in_the_request(tokenizer: Tokenizer) -> None:
    request = validate(
        tokenizer,
        temperature=0.5,
        top_k=10**12,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.8,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.4,
        logit_bias={3: -100.0},
        seed=2**64 - 1,
        max_new_tokens=125,
        stop=["a", "b", "a"],
        ignore_eos=True,
        top_n_tokens=5,
        final_logprobs=True,
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 300, 0.9, 0.1)
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.8, 1.2)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.3, 0.4)
    assert (sampling.logit_bias, sampling.seed, sampling.final_logprobs) == (((3, -100.0),), 2**64 - 1, True)
    assert (request.max_new_tokens, request.stop, request.end_ids, request.top_n) == (125, ("a", "b"), (), 5)


def test_truncate_keeps_the_prompts_end(tokenizer: Tokenizer) -> None:
    assert validate(tokenizer, "x" * 200 + "abc", truncate=3).prompt == tuple(tokenizer.encode("abc", False))


def test_prompt_of_token_ids_is_unchanged(tokenizer: Tokenizer) -> None:
    assert validate(tokenizer, [7, 8, 299]).prompt == (7, 8, 299)


def test_long_text_is_tokenized_outside_the_event_loops_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    in_main_thread = []
    encode = tokenizer.encode

    def recording_encode(text: str, add_special_tokens: bool = True) -> list[int]:
        in_main_thread.append(threading.current_thread() is threading.main_thread())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", recording_encode)
    for text in ("short", "x" * (LONG_TEXT + 1)):
        validate(tokenizer, text, truncate=5)
    assert in_main_thread == [True, False]


def test_best_of_is_refused_if_max_best_of_is_1(tokenizer: Tokenizer) -> None:
    with pytest.raises(Refused, match=r"^`best_of` != 1 is not allowed for this endpoint$"):
        validate(tokenizer, config=replace(CONFIG, max_best_of=1), choices=2)


def test_choices_that_can_never_fit_the_kv_cache_are_refused_with_the_page_counts(tokenizer: Tokenizer) -> None:
    """A prompt of 9 tokens fills 2 pages of 4 and begins a third."""
    limits = replace(LIMITS, pages=14, page_size=4)

    def ask(**given: Any) -> Request:
        return asyncio.run(Validator(CONFIG, tokenizer).request([5] * 9, Parameters(**given), limits))

    assert ask(choices=4, max_new_tokens=12).choices == 4  # 2 + 4 * 3
    with pytest.raises(
        Refused, match="4 answers to 9 `inputs` tokens with `max_new_tokens` 13 need 18 pages of 4 tokens, and there are 14"
    ):
        ask(choices=4, max_new_tokens=13)
    assert ask(choices=4).max_new_tokens == 12, "as many as fit"
    assert ask(choices=12).max_new_tokens == 4
    with pytest.raises(Refused, match="13 answers to 9 `inputs` tokens with `max_new_tokens` 1 need 15 pages"):
        ask(choices=13)
    assert ask().max_new_tokens == 48


def test_priority_timeout_and_tenant_are_in_the_request(tokenizer: Tokenizer) -> None:
    request = validate(tokenizer, priority="batch", timeout=2.5, tenant="x")
    assert (request.priority, request.timeout, request.tenant) == (Priority.BATCH, 2.5, "x")
    request = validate(tokenizer)
    assert (request.priority, request.timeout, request.tenant, request.choices) == (Priority.NORMAL, 0.0, "", 1)


def test_timeout_ends_a_request_during_tokenization(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    may_finish = threading.Event()
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, special: [1] * may_finish.wait(20))
    validator = Validator(CONFIG, tokenizer)

    async def ask(**given: Any) -> Request:
        return await validator.request("a" * 2 * LONG_TEXT, Parameters(truncate=9, **given), LIMITS)

    async def run() -> None:
        start = monotonic()
        with pytest.raises(Expired, match=re.escape("not complete 0.05 s after the request came: 0 tokens")):
            await ask(timeout=0.05)
        with pytest.raises(Expired, match="not complete 60 s"):
            await ask(timeout=60.0, arrived=start - 59.95)
        assert monotonic() - start < 10
        may_finish.set()
        request = await ask(timeout=60.0, arrived=start)
        assert (request.timeout, request.arrived) == (60.0, start)

    asyncio.run(run())


def test_beam_parameters_are_in_the_request(tokenizer: Tokenizer) -> None:
    request = validate(tokenizer, num_beams=4)
    assert (request.beams, request.choices, request.sampling.temperature) == (Beams(width=4), 1, 0.0)
    request = validate(
        tokenizer, num_beams=8, num_return_sequences=8, length_penalty=-1.5, early_stopping=True, stream_beams=True, top_k=5, seed=7
    )
    assert request.beams == Beams(width=8, length_penalty=-1.5, stopping=Stopping.FULL, watched=True)
    assert (request.choices, request.sampling.temperature, request.sampling.seed) == (8, 1.0, 7)
    assert validate(tokenizer, num_beams=2, early_stopping="never").beams == Beams(width=2, stopping=Stopping.NEVER)
    assert validate(tokenizer, num_beams=2, early_stopping=False).beams == Beams(width=2, stopping=Stopping.WORSE)
    neutral: dict[str, Any] = {"num_return_sequences": 1, "length_penalty": 1, "early_stopping": False, "stream_beams": False}
    assert validate(tokenizer, num_beams=1, **neutral).beams is None
    assert validate(tokenizer, num_beams=1, choices=3, do_sample=True).choices == 3


def test_servers_default_num_beams_applies_only_without_sampling_or_choices(tokenizer: Tokenizer) -> None:
    config = replace(CONFIG, num_beams=4)
    assert validate(tokenizer, config=config).beams == Beams(width=4)
    assert validate(tokenizer, config=config, num_return_sequences=3, length_penalty=2.0).choices == 3
    assert validate(tokenizer, config=config, num_beams=2).beams == Beams(width=2)
    for given in ({"num_beams": 1}, {"do_sample": True}, {"temperature": 0.5}, {"top_k": 3}, {"choices": 2}):
        assert validate(tokenizer, config=config, **given).beams is None, given


def test_default_beams_are_dropped_if_they_cannot_fit_and_requested_ones_refused(tokenizer: Tokenizer) -> None:
    """A prompt of 9 tokens fills 2 pages of 4 and begins a third."""
    validator = Validator(replace(CONFIG, num_beams=4), tokenizer)

    def ask(limits: Limits, **given: Any) -> Request:
        return asyncio.run(validator.request([5] * 9, Parameters(**given), limits))

    few_pages = replace(LIMITS, pages=14, page_size=4)
    assert ask(few_pages, max_new_tokens=12).beams == Beams(width=4)
    greedy = ask(few_pages, max_new_tokens=13, stop=["<s>"], speculate=0)
    assert (greedy.beams, greedy.choices, greedy.max_new_tokens, greedy.end_ids) == (None, 1, 13, (1, 0))
    assert ask(replace(LIMITS, vocabulary=7)).beams is None
    end_ids = list(range(CANDIDATES))
    assert ask(replace(LIMITS, vocabulary=1 << 17), end_ids=end_ids, ignore_eos=True).end_ids == tuple(end_ids)
    for given in ({"num_beams": 4}, {"num_return_sequences": 2}, {"length_penalty": 0.5}, {"early_stopping": True}):
        with pytest.raises(Refused, match="4 beams over 9 `inputs` tokens"):
            ask(few_pages, max_new_tokens=13, **given)
    with pytest.raises(Refused, match="1 answers to 9 `inputs` tokens"):
        ask(few_pages, max_new_tokens=60)


@pytest.mark.parametrize(
    ("settings", "limit", "flag"),
    [
        ({"max_num_beams": 3}, 3, "--max-num-beams"),
        ({"max_batch_size": 2}, 2, "--max-batch-size"),
        ({"max_concurrent_requests": 4, "max_best_of": 5}, 5, "--max-batch-size"),
        ({"max_num_beams": 200}, 128, "--max-batch-size"),
    ],
)
def test_num_beams_is_limited_by_the_options_for_concurrent_sequences(
    tokenizer: Tokenizer, settings: dict[str, int], limit: int, flag: str
) -> None:
    config = replace(CONFIG, **settings)  # type: ignore[arg-type]
    assert validate(tokenizer, config=config, num_beams=limit).beams == Beams(width=limit)
    with pytest.raises(Refused) as refused:
        validate(tokenizer, config=config, num_beams=limit + 1)
    assert str(refused.value) == f"`num_beams` must be > 0 and <= {limit} ({flag}). Given: {limit + 1}"


def test_num_beams_and_best_of_are_limited_by_the_shards_sequences(tokenizer: Tokenizer) -> None:
    """Shards may have room for fewer than the options allow."""

    def ask(**given: Any) -> Request:
        return asyncio.run(Validator(CONFIG, tokenizer).request([5] * 9, Parameters(**given), replace(LIMITS, sequences=2)))

    assert ask(num_beams=2).beams == Beams(width=2)
    assert ask(choices=2).choices == 2
    with pytest.raises(Refused, match=r"^`num_beams` must be <= 2, the sequences that run at once. Given: 3 beams$"):
        ask(num_beams=3)
    with pytest.raises(Refused, match=r"^`best_of` must be <= 2, the sequences that run at once. Given: 4 answers$"):
        ask(choices=4)


def test_max_best_of_limits_num_return_sequences(tokenizer: Tokenizer) -> None:
    with pytest.raises(Refused, match=r"^`num_return_sequences` must be > 0 and <= 2 \(--max-best-of\). Given: 3$"):
        validate(tokenizer, config=replace(CONFIG, max_best_of=2), num_beams=4, num_return_sequences=3)


def test_all_beams_must_fit_the_kv_cache_however_few_are_returned(tokenizer: Tokenizer) -> None:
    """A prompt of 9 tokens fills 2 pages of 4 and begins a third."""
    limits = replace(LIMITS, pages=14, page_size=4)

    def ask(**given: Any) -> Request:
        return asyncio.run(Validator(CONFIG, tokenizer).request([5] * 9, Parameters(num_beams=4, **given), limits))

    assert ask(max_new_tokens=12, num_return_sequences=2).choices == 2  # 2 + 4 * 3
    with pytest.raises(Refused) as refused:
        ask(max_new_tokens=13)
    assert str(refused.value) == (
        "4 beams over 9 `inputs` tokens with `max_new_tokens` 13 need 18 pages of 4 tokens, and there are 14: "
        "at most 12 new tokens fit, or fewer beams"
    )
    assert ask().max_new_tokens == 12, "as many as fit"


@pytest.mark.parametrize(("given", "each"), [({}, 2), ({"ignore_eos": True}, 2), ({"end_ids": [5, 6]}, 4)])
def test_num_beams_is_limited_by_the_vocabulary(tokenizer: Tokenizer, given: dict[str, Any], each: int) -> None:
    """Each step takes the best max(2, 1 + end tokens) * num_beams tokens, like transformers, so that enough of them do not end."""

    def ask(vocabulary: int) -> Request:
        limits = replace(LIMITS, vocabulary=vocabulary)
        return asyncio.run(Validator(CONFIG, tokenizer).request([5] * 3, Parameters(num_beams=6, **given), limits))

    assert ask(6 * each).beams == Beams(width=6)
    with pytest.raises(Refused) as refused:
        ask(6 * each - 1)
    assert str(refused.value) == (
        f"`num_beams` must be <= 5: each step weighs {each} tokens for each beam, of which the model has {6 * each - 1}. Given: 6"
    )


def test_beams_with_thousands_of_end_ids_are_refused(tokenizer: Tokenizer) -> None:
    """Such a request would slow down all others: each step has candidates for each end token."""

    def ask(end_ids: int) -> Request:
        parameters = Parameters(num_beams=8, ignore_eos=True, end_ids=list(range(end_ids)))
        return asyncio.run(Validator(CONFIG, tokenizer).request([5] * 3, parameters, replace(LIMITS, vocabulary=1 << 17)))

    assert len(ask(CANDIDATES // 8 - 1).end_ids) == CANDIDATES // 8 - 1
    with pytest.raises(Refused, match="8 beams that 512 tokens end would weigh 4104 tokens in each step, which is more than 4096"):
        ask(CANDIDATES // 8)
