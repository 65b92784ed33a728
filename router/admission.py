"""Admission control: whether one more request may be in flight. Pure counting, for one replica or for all of them.

A server takes `most` requests at once, but a tenant that has that many shuts nobody else out: tenants (see `Request.tenant`) that
have less than an equal share are admitted beyond it, an eighth more in all. What becomes free then is theirs, until shares are
equal.
"""

from collections.abc import Mapping

SPARE = 8  # one place in so many is added for tenants below their share


def places(most: int) -> int:
    """Requests that can be in flight at once where `most` are taken of a single tenant."""
    return most + -(-most // SPARE)


def admits(in_flight: Mapping[str, int], most: int, tenant: str) -> bool:
    """Whether a request of the tenant is admitted beside those in flight. in_flight: by tenant, without those who have none."""
    total = sum(in_flight.values())
    if total < most:
        return True
    share = most // len(in_flight.keys() | {tenant})
    return total < places(most) and in_flight.get(tenant, 0) < max(1, share)
