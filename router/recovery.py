"""Who is to blame when the shards die: mostly nobody, and sometimes a request. Pure: knows uids, and how far each has come.

A request whose computation kills the shards would kill them again whenever it is replayed. A step computes many requests, and it
can't be seen which of them it was; but the guilty one is in every step that kills, and gets no further from one death to the next.

    suspects   were computed when the shards died, for the second time in a row, and got no further in between. Where one had been
               before, and the shards had lived, a death counts half: who begins anew, as beams do, or computes a long prompt
               again, takes long to get further, and guilty ones mostly kill in the same place
    trial      the older half of them runs, and everybody else waits. When they have got further, half of the others runs as well,
               and so on, until there is no suspect left. When the shards die before, only those who ran stay under suspicion
    guilty     who was computed alone when the shards died, a suspect already

So most of the time the innocent are acquitted by running, which costs a few steps, and not by another death. Shards that die of
something else, however often, accuse nobody who makes progress.

Where there are other shards, whoever is no suspect goes on there, and what is known of it goes along (`release`, `adopt`). Suspects
stay with those that died: so a guilty one kills the shards of one inquest once, those of another, and then none but these.
"""

from collections.abc import Callable, Mapping

FURTHER = 4  # steps beyond where the shards died: more than are under way at once


class Inquest:
    """What the deaths so far have shown. Who is as far as `place` says has come that many steps; the unit is the caller's."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[float, int]] = {}  # in the last one: how many in a row, and how far it had come
        self._trial: set[int] = set()
        self._suspects: list[int] = []  # whose trial is still to come, oldest first
        self._passed: set[int] = set()

    @property
    def open(self) -> bool:
        """A trial is under way: others wait for its end."""
        return bool(self._trial)

    def admits(self, uid: int) -> bool:
        """Whether a request may run now."""
        return not self._trial or uid in self._trial or uid in self._passed

    def suspects(self, uid: int) -> bool:
        """Whether a request was computed in two deaths in a row, and was not acquitted since."""
        return uid in self._trial or uid in self._suspects

    def release(self, uid: int) -> tuple[float, int] | None:
        """A request leaves. What is known of it, for the inquest that it goes to."""
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
        """The shards have died while these were computed; what was found out before still counts if it was none. Returns who is
        guilty, if that is clear. Who is admitted then may be replayed."""
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
        """How far those on trial are now; None: it has ended, or nobody wants it any more. True: others are admitted now."""
        if not self._trial or not all(self._further(uid, place(uid)) for uid in self._trial):
            return False
        self._passed |= self._trial
        self._try_next()
        return True

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
