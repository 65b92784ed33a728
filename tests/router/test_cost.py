"""`Cost`, the model of a step's time: fitted to steps of a simulated machine with known coefficients, it predicts other steps,
adapts when the machine changes, and is conservative before it has learned."""

import random

import pytest

from penstock.router.cost import Cost, Work, nonnegative, solve


def seconds(work: Work) -> float:
    """The simulated machine: 2 ms a step, 0.1 ms a token, 1 ms per 10,000 keys seen and per 5,000 read, 0.05 ms a row."""
    return 0.002 + work.tokens * 1e-4 + work.seen * 1e-7 + work.read * 2e-7 + work.rows * 5e-5


def step(chance: random.Random) -> tuple[Work, bool]:
    """A random step with or without prompts; returns also whether it has any."""
    decodes = chance.randint(0, 32)
    prompt = chance.choice((0, chance.randint(1, 512))) if decodes else chance.randint(1, 512)
    context = chance.randint(0, 2000)
    read = decodes * chance.randint(1, 1000) + (context + prompt / 2 if prompt else 0)
    return Work(decodes + prompt, prompt * context + prompt**2 / 2, read, decodes + (prompt > 0)), prompt > 0


def decode(sequences: int, context: int) -> Work:
    return Work(tokens=sequences, read=sequences * context, rows=sequences)


def fitted(steps: int, noise: float = 0.0, slower: float = 1.0, cost: Cost | None = None) -> Cost:
    cost = cost or Cost(64, 0.05)
    chance = random.Random(steps)
    for _ in range(steps):
        work, prompts = step(chance)
        cost.observe(work, slower * seconds(work) * chance.uniform(1 - noise, 1 + noise), prompts)
    return cost


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.01), (0.3, 0.25)])
def test_predictions_for_steps_not_learned_match_the_machine(noise: float, error: float) -> None:
    cost = fitted(300, noise)
    chance = random.Random(7)
    for _ in range(50):
        work, _ = step(chance)
        assert cost.predict(work) == pytest.approx(seconds(work), rel=error)


def test_predictions_follow_a_machine_that_becomes_slower() -> None:
    cost = fitted(600, slower=3.0, cost=fitted(300))
    work = Work(100, 10_000, 3_000, 10)
    assert cost.predict(work) == pytest.approx(3 * seconds(work), rel=0.05)


def test_cost_of_prompts_is_kept_during_long_decoding() -> None:
    cost = fitted(300)
    for _ in range(20_000):
        cost.observe(decode(8, 500), seconds(decode(8, 500)), prompts=False)
    work = Work(300, 100_000, 5_000, 9)
    assert cost.predict(work) == pytest.approx(seconds(work), rel=0.05)


def test_tokens_at_the_start_of_a_prompt_do_not_seem_cheap_after_many_long_prompts() -> None:
    """All measured steps take about the same time: few tokens late in the prompt, many at its beginning."""
    cost = Cost(64, 0.02)
    for _ in range(20):
        position = 0
        while position < 2000:
            alone = decode(4, 300)
            count = max(1, cost.tokens_within(0.03 - cost.predict(alone), position))
            keys = count * position + count**2 / 2
            work = Work(4 + count, keys, alone.read + position + count / 2, 5)
            cost.observe(work, seconds(work), prompts=True)
            position += count
            assert seconds(work) < 0.06
    assert cost.tokens_within(0.02, 0) == pytest.approx(160, rel=0.2)


def test_before_any_measurement_a_token_costs_its_share_of_the_sample_step() -> None:
    cost = Cost(64, 0.64)
    assert cost.predict(Work(10)) == pytest.approx(0.1, rel=0.01)
    assert cost.tokens_within(0.1, 0) in (9, 10)
    assert Cost().tokens_within(0.05, 0) > 0


def test_sample_step_of_zero_seconds_is_ignored() -> None:
    """The clock may be too coarse for it."""
    assert Cost(64, 0.0).predict(Work(10)) == pytest.approx(Cost().predict(Work(10)))


def test_slopes_are_those_of_a_sampled_token_and_of_keys_seen_and_read() -> None:
    assert fitted(300).slopes == pytest.approx((1.5e-4, 1e-7, 2e-7), rel=0.05)


def test_cost_of_prompts_stays_conservative_while_only_decodes_are_measured() -> None:
    cost = Cost(64, 0.64)  # 10 ms a token
    for _ in range(100):
        cost.observe(decode(4, 100), 0.050, prompts=False)
    assert cost.predict(decode(4, 100)) == pytest.approx(0.05, rel=0.05)
    assert 1 <= cost.tokens_within(0.05, 0) <= 8


@pytest.mark.parametrize("position", [0, 100, 5000])
@pytest.mark.parametrize("time", [0.002, 0.05, 1.0])
def test_tokens_within_is_the_inverse_of_predict(position: int, time: float) -> None:
    cost = fitted(300)
    count = cost.tokens_within(time, position)

    def longer(tokens: int) -> float:
        work = Work(8 + tokens, tokens * position + tokens**2 / 2, 800 + position + tokens, 8)
        return cost.predict(work) - cost.predict(decode(8, 100))

    assert longer(count) <= time + 1e-9
    assert longer(count + 2) > time


def test_nonnegative_solution_has_no_negative_coefficient() -> None:
    chance = random.Random(1)
    for _ in range(200):
        vectors = [[chance.uniform(0, 1) for _ in range(4)] for _ in range(6)]
        squares = [[sum(v[i] * v[j] for v in vectors) + (i == j) * 1e-9 for j in range(4)] for i in range(4)]
        sums = [sum(v[i] * chance.uniform(-1, 1) for v in vectors) for i in range(4)]
        assert min(nonnegative(squares, sums)) >= 0


def test_predicted_time_of_a_decode_is_positive_after_prompts_only() -> None:
    """Not even if only prompts were measured, whose arithmetic explains all of the time, and the next step is a decode."""
    for seed in range(300):
        chance = random.Random(seed)
        cost = Cost(64, chance.uniform(1e-3, 0.2))
        for _ in range(chance.randint(1, 10)):
            prompt = chance.randint(1, 32)
            seen = prompt * chance.randint(1, 100)
            cost.observe(Work(prompt, seen, seen / prompt, 1), chance.uniform(1, 3) * (5e-4 * prompt + 1e-6 * seen), prompts=True)
        assert cost.predict(decode(1, 10)) > 1e-6


def test_solve_solves_linear_equations() -> None:
    assert solve([[4.0, 1.0], [1.0, 3.0]], [1.0, 2.0]) == pytest.approx([1 / 11, 7 / 11])


def test_fixed_cost_of_steps_with_prompts_is_not_attributed_to_their_tokens() -> None:
    """Otherwise few tokens would seem expensive, and so remain few: a step with one prompt token takes 4 ms more here than one
    without."""
    cost = fitted(300)
    for count in [0, 1] * 100:
        work = Work(4 + count, 300.0 * count, 1_200 + 300 * count, 4)
        cost.observe(work, seconds(work) + 0.004 * count, prompts=count > 0)
    assert cost.beside(0) == pytest.approx(0.004, rel=0.1)
    assert cost.tokens_within(0.005 + cost.beside(0), 0) > 20


@pytest.mark.parametrize("slower", [10, 1_000, 100_000])
def test_much_too_slow_sample_step_is_forgotten(slower: float) -> None:
    """The sample step included compilation, or its process was suspended. Each later step has as many tokens as seem to fit."""
    cost, position = Cost(64, slower * seconds(Work(64))), 0
    for _ in range(40):
        count = max(1, min(512, cost.tokens_within(0.03, position)))
        work = Work(4 + count, count * position + count**2 / 2, 4 * 300 + position + count / 2, 5)
        cost.observe(work, seconds(work), prompts=True)
        position = (position + count) % 2000
    assert cost.tokens_within(0.03, 0) > 150, "264 do"


def test_tokens_within_is_large_if_tokens_cost_nothing() -> None:
    cost = Cost(64, 0.064)
    for tokens in range(1, 400):
        cost.observe(Work(tokens), 0.01, prompts=tokens % 2 > 0)
    assert cost.tokens_within(0.1, 0) > 1000


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3])
def test_step_measured_much_too_short_hardly_changes_predictions(prompts: bool, share: float) -> None:
    """The end of the step before it was noticed late: a suspended process adds its own time to that step."""
    cost = fitted(300)
    work = Work(304, 45_000, 1_500, 5, prompts=True) if prompts else decode(4, 300)
    cost.observe(work, 30.0, prompts)
    cost.observe(work, share * seconds(work), prompts)
    assert cost.predict(work) == pytest.approx(seconds(work), rel=0.5)
    assert cost.tokens_within(0.03, 0) < 2 * fitted(300).tokens_within(0.03, 0)


def test_step_measured_much_too_short_has_little_weight_without_earlier_predictions() -> None:
    cost = Cost(64, 0.05)
    for tiny in [False] * 100 + [True]:
        cost.observe(decode(4, 300), 1e-6 if tiny else seconds(decode(4, 300)), prompts=False)
    assert cost.predict(decode(4, 300)) == pytest.approx(seconds(decode(4, 300)), rel=0.5)


def test_predictions_follow_a_machine_that_becomes_much_faster() -> None:
    cost = fitted(100, slower=0.2, cost=fitted(300))
    work = Work(100, 10_000, 3_000, 10)
    assert cost.predict(work) == pytest.approx(0.2 * seconds(work), rel=0.05)
