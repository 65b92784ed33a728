"""Whether one more request may be in flight: pure counting, for one replica or for all of them.

A server takes so many requests at once, and who has that many shuts nobody else out: tenants (see `Request.tenant`) that have
less than an equal share are let in beyond it, an eighth more in all. What becomes free then is theirs, until shares are equal.
"""

from collections.abc import Mapping

SPARE = 8  # of the places that there are, one in so many is added for tenants below their share


def places(most: int) -> int:
    """Requests that can be in flight at once where `most` are taken of a single tenant."""
    return most + -(-most // SPARE)


def admits(in_flight: Mapping[str, int], most: int, tenant: str) -> bool:
    """Whether a request of the tenant is taken beside those that others, and it, have in flight. in_flight: by tenant, those who
    have none left out."""
    total = sum(in_flight.values())
    if total < most:
        return True
    share = most // len(in_flight.keys() | {tenant})
    return total < places(most) and in_flight.get(tenant, 0) < max(1, share)
