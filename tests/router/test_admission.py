"""`admits`: which tenants' requests are admitted when a server has as many as it takes."""

import random
from collections import Counter

from penstock.router.admission import admits, places


def test_single_tenant_gets_all_requests_in_flight_and_no_more() -> None:
    for most in (1, 2, 9, 128):
        assert admits({"a": most - 1} if most > 1 else {}, most, "a")
        assert not admits({"a": most}, most, "a")


def test_tenant_below_its_share_is_admitted_although_another_uses_the_whole_limit() -> None:
    assert admits({"a": 128}, 128, "b")
    assert admits({"a": 128, "b": 15}, 128, "b")
    assert not admits({"a": 128, "b": 16}, 128, "b"), "what is spare is an eighth"
    assert not admits({"a": 72, "b": 64}, 128, "b"), "an equal share"
    assert not admits({"a": 71, "b": 64}, 128, "a")
    assert admits({"a": 1}, 1, "b"), "a share is one place at least"
    assert not admits({"a": 1, "b": 1}, 1, "c")


def test_shares_of_tenants_become_equal_and_the_limit_is_kept() -> None:
    """In whatever order requests arrive and end: there are never more than `places`, and all tenants end up with equal shares."""
    chance = random.Random(5)
    most, tenants = 40, ("a", "b", "c")
    in_flight = Counter({"a": most})
    for _ in range(3000):
        for tenant in chance.sample(tenants, 3):
            if admits(+in_flight, most, tenant):
                in_flight[tenant] += 1
        assert in_flight.total() <= places(most)
        in_flight[chance.choice(list((+in_flight).elements()))] -= 1
    assert max(in_flight.values()) - min(in_flight.values()) <= most // 4, in_flight
