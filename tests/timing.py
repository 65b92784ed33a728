"""Upper bounds of wall-clock time on a machine that stalls now and then."""

from collections.abc import Awaitable, Callable

TRIES = 3


async def fastest_of_several(bound: float, measure: Callable[[], Awaitable[float]]) -> float:
    """The shortest of up to TRIES measurements; stops at the first within the bound. Slow code is slow in each of them."""
    seconds = [await measure()]
    while min(seconds) >= bound and len(seconds) < TRIES:
        seconds.append(await measure())
    return min(seconds)
