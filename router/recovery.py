"""Finds requests that kill the shards ("poison" requests) when shards die repeatedly. Pure: knows uids, and how far each has come.

A request whose computation kills the shards would kill them again whenever it is replayed. A step computes many requests, and it
can't be seen which of them it was; but the guilty one is in every step that kills, and gets no further from one death to the next.

    suspects   were computed when the shards died, for the second time in a row, and got no further between. A death at an earlier
               point of a request than the last one counts half: requests that start anew, like beams, or recompute a long prompt,
               take long to get further, and guilty ones mostly kill in the same place
    trial      the older half of them runs, and everybody else waits. When they have got further, half of the others runs as well,
               and so on, until there is no suspect left. When the shards die before, only those who ran stay under suspicion
    guilty     a suspect that was computed alone when the shards died

So most of the time the innocent are acquitted by running, which costs a few steps, and not by another death. Shards that die of
something else, however often, make nobody guilty who makes progress.

Where there are other replicas, all but suspects move there, with what is known of them (`release`, `adopt`). Suspects stay with
those that died: so a guilty one kills the shards of one inquest once, those of another, and then only these.
"""

from collections.abc import Callable, Mapping

FURTHER = 4  # steps beyond where the shards died: more than are in flight at once


class Inquest:
    """State of the investigation. A request's progress is measured in steps, as `place` says; the unit is the caller's."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[float, int]] = {}  # of the last one: deaths in a row, and how far it had come
        self._trial: set[int] = set()
        self._suspects: list[int] = []  # whose trial is still to come, oldest first
        self._passed: set[int] = set()

    @property
    def open(self) -> bool:
        """A trial is in progress: others wait for its end."""
        return bool(self._trial)

    def admits(self, uid: int) -> bool:
        """Whether a request may run now."""
        return not self._trial or uid in self._trial or uid in self._passed

    def suspects(self, uid: int) -> bool:
        """Whether a request was computed in two deaths in a row, and was not acquitted since."""
        return uid in self._trial or uid in self._suspects

    def release(self, uid: int) -> tuple[float, int] | None:
        """A request leaves. Returns what is known of it, for another inquest."""
        known = self._deaths.pop(uid, None)
        if uid in self._suspects:
            self._suspects.remove(uid)
        if uid in self._trial:
            self._trial.remove(uid)
            if not self._trial:
                self._try_next()
        return None if uid in self._passed else known

    def adopt(self, uid: int, known: tuple[float, int] | None) -> None:
        """A request comes, from other shards that died."""
        if known is not None:
            self._deaths[uid] = known

    def died(self, places: Mapping[int, int]) -> int | None:
        """The shards have died while these were computed; with none, earlier findings stay. Returns the guilty one, if that is
        clear. Requests that `admits` accepts may be replayed then."""
        if not places:
            return None
        self._deaths = {uid: (self._count(uid, place), place) for uid, place in places.items()}
        suspects = sorted(uid for uid, (count, _) in self._deaths.items() if count >= 2)
        self._trial, self._passed = set(), set()
        if len(places) == 1 and suspects:
            self._deaths, self._suspects = {}, []
            return suspects[0]
        self._suspects = suspects
        self._try_next()
        return None

    def hear(self, place: Callable[[int], int | None]) -> bool:
        """place: progress of requests on trial; None: it has ended, or was cancelled. Returns whether others are admitted now."""
        heard = False
        while self._trial and all(self._further(uid, place(uid)) for uid in self._trial):
            self._passed |= self._trial
            self._try_next()  # of whom all may have ended meanwhile: then nothing would come of them
            heard = True
        return heard

    def _count(self, uid: int, place: int) -> float:
        count, before = self._deaths.get(uid, (0, 0))
        if place > before + FURTHER:
            return 1
        return count + (1 if place >= before - FURTHER else 0.5)

    def _further(self, uid: int, place: int | None) -> bool:
        return place is None or place > self._deaths[uid][1] + FURTHER

    def _try_next(self) -> None:
        half = (len(self._suspects) + 1) // 2
        self._trial = set(self._suspects[:half])
        self._suspects = self._suspects[half:]
