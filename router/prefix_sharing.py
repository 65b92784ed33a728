"""Prefix sharing among running jobs: counts pages of a prompt that others hold already, which cost no free pages. Pure.

Shards keep pages of equal content once, whoever computed them (shard/prefix.py), so while one job has a prompt's beginning every
other one finds it. When the last holder goes, its pages are free: a job that was admitted meanwhile, and whose holdings the shards
have not reported yet, needs as many of them as were not counted.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

Keys = Sequence[tuple[int, int]]  # (tokens, key), ascending: who holds one holds those before it


class PrefixSharing:
    """Prefixes held by the jobs on one pool."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._held: Counter[int] = Counter()  # number of holders, by key
        self._holders: dict[int, Keys] = {}

    def hold(self, uid: int, prefix_keys: Keys) -> None:
        """A job's prompt is computed: it holds its prefixes."""
        self._holders[uid] = prefix_keys
        self._held.update(key for _, key in prefix_keys)

    def release(self, uid: int) -> None:
        """The job releases its pages, if it has any."""
        for _, key in self._holders.pop(uid, ()):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    def clear(self) -> None:
        """Forgets everything: cached pages of these jobs may not be found any more."""
        self._held.clear()
        self._holders.clear()

    def pages(self, prefix_keys: Keys, holders: int = 1) -> int:
        """How many pages of a prompt are held by at least `holders` jobs."""
        if not self._held:
            return 0
        count = bisect_left(prefix_keys, 1, key=lambda one: self._held.get(one[1], 0) < holders)
        return prefix_keys[count - 1][0] // self._page_size if count else 0
