"""`PrefixKeys`: two prompts have equal keys for exactly their common prefixes, and few keys each. `PrefixSharing` is compared with
the prompts that jobs hold."""

import random

import pytest

from penstock.router.prefix_keys import FINE, PrefixKeys
from penstock.router.prefix_sharing import PrefixSharing


@pytest.mark.parametrize("unit", [1, 16, 24, 128])
@pytest.mark.parametrize("growth", [4, 16])
def test_prefixes_end_at_page_boundaries_and_their_number_grows_logarithmically(unit: int, growth: int) -> None:
    ends = [end for end, _ in PrefixKeys(unit, growth, sampled=True).of(tuple(range(100_000)), "")]
    assert all(end % unit == 0 for end in ends)
    assert ends == sorted(set(ends))
    assert ends[:3] == [unit, 2 * unit, 3 * unit]
    assert ends[-1] < 100_000 <= ends[-1] * (1.01 + 1 / growth)
    assert len(ends) < FINE + 12 * growth * 1.3


@pytest.mark.parametrize("unit", [1, 4, 16])
def test_prompts_share_exactly_the_keys_of_their_common_prefix(unit: int) -> None:
    """Every token is hashed, unless strides are sampled."""
    chance, keys = random.Random(unit), PrefixKeys(unit, 16)
    for _ in range(200):
        one = tuple(chance.randrange(5) for _ in range(chance.randint(2, 60 * unit)))
        place = chance.randrange(len(one))
        other = (*one[:place], one[place] + 1, *one[place + 1 :])
        mine, theirs = keys.of(one, "a"), keys.of(other, "a")
        assert [end for end, _ in mine] == [end for end, _ in theirs]
        assert [a == b for a, b in zip(mine, theirs, strict=True)] == [end <= place for end, _ in mine]
        assert not {key for _, key in mine} & {key for _, key in keys.of(one, "b")}


def test_no_prefix_ends_at_the_last_token() -> None:
    assert [end for end, _ in PrefixKeys(4, 16).of((1,) * 9, "")] == [4, 8]
    assert [end for end, _ in PrefixKeys(4, 16).of((1,) * 8, "")] == [4]


def test_shared_pages_are_those_that_at_least_so_many_jobs_hold() -> None:
    """The oracle is the held prompts themselves, compared token by token."""
    chance, keys = random.Random(3), PrefixKeys(1, 16)  # in prompts as short as these, a prefix ends at every position
    sharing, held = PrefixSharing(1), dict[int, tuple[int, ...]]()
    for uid in range(2000):
        prompt = tuple(chance.randrange(2) for _ in range(chance.randint(1, 9)))
        if chance.random() < 0.3 and held:
            released = chance.choice(list(held))
            del held[released]
            sharing.release(released)
        elif chance.random() < 0.003:
            held.clear()
            sharing.clear()
        elif chance.random() < 0.5:
            held[uid] = prompt
            sharing.hold(uid, keys.of(prompt, ""))
        for least in (1, 2):
            places = range(len(prompt))
            expected = max(
                n for n in places if not n or sum(n < len(other) and other[:n] == prompt[:n] for other in held.values()) >= least
            )
            assert sharing.pages(keys.of(prompt, ""), least) == expected
    assert held
    for uid in held:
        sharing.release(uid)
    assert not sharing.pages(keys.of((0, 0), ""))
    assert not sharing._held
