"""Who is let in when a server is full."""

import random
from collections import Counter

from penstock.router.admission import admits, places


def test_one_tenant_alone_has_all_places_and_no_more() -> None:
    for most in (1, 2, 9, 128):
        assert admits({"a": most - 1} if most > 1 else {}, most, "a")
        assert not admits({"a": most}, most, "a")


def test_who_has_less_than_a_share_is_let_in_though_another_has_all_places() -> None:
    assert admits({"a": 128}, 128, "b")
    assert admits({"a": 128, "b": 15}, 128, "b")
    assert not admits({"a": 128, "b": 16}, 128, "b"), "what is spare is an eighth"
    assert not admits({"a": 72, "b": 64}, 128, "b"), "an equal share"
    assert not admits({"a": 71, "b": 64}, 128, "a")
    assert admits({"a": 1}, 1, "b"), "a share is one place at least"
    assert not admits({"a": 1, "b": 1}, 1, "c")


def test_places_go_to_those_below_their_share_until_shares_are_equal() -> None:
    """Whatever order they come and go in: there are never more than the places, and all who want places have had equal ones."""
    dice = random.Random(5)
    most, wanting = 40, ("a", "b", "c")
    in_flight = Counter({"a": most})
    for _ in range(3000):
        for tenant in dice.sample(wanting, 3):
            if admits(+in_flight, most, tenant):
                in_flight[tenant] += 1
        assert in_flight.total() <= places(most)
        in_flight[dice.choice(list((+in_flight).elements()))] -= 1
    assert max(in_flight.values()) - min(in_flight.values()) <= most // 4, in_flight
