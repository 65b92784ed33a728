"""Bounds of wall time on a machine that stands still now and then."""

from collections.abc import Awaitable, Callable

TRIES = 3


async def least(bound: float, measure: Callable[[], Awaitable[float]]) -> float:
    """Of a few measurements, of which the first within the bound is the last: what is slow by itself is slow each time."""
    found = [await measure()]
    while min(found) >= bound and len(found) < TRIES:
        found.append(await measure())
    return min(found)
