"""Measures a shard's device utilization: timestamps before the first launch of a step's model and after its last one, before the
first launch that makes logits and after the last one of its sampling.

They are CUDA events, on the device's own timeline between kernels. Copies to the device before a step, copies of its tokens to the
host, and a host that is late with sampling count as idle: the reported idle share is rather too large than too small. What the host
was late with is reported, too, by its own clock: a common reference point connects the two clocks.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from penstock.shard import graphs, logits
from penstock.shard.engine import Engine
from penstock.shard.models.decoder import Decoder


class Moment(Protocol):
    """A timestamp on a device's timeline."""

    def until(self, other: Any) -> float:
        """Seconds until another timestamp."""

    def wait(self) -> None:
        """Waits until it has passed."""


class Event:
    """A timestamp of a CUDA device: now, in the order of its work."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def until(self, other: "Event") -> float:
        """Seconds. Both must have passed."""
        return float(self._event.elapsed_time(other._event)) / 1e3

    def wait(self) -> None:
        """Waits until it has passed."""
        self._event.synchronize()


class Instant:
    """A timestamp of a CPU."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def until(self, other: "Instant") -> float:
        """Seconds."""
        return other._seconds - self._seconds

    def wait(self) -> None:
        """It has passed."""


@dataclass(frozen=True, slots=True)
class Step:
    """Timestamps of a step on the device, and on the host, by perf_counter."""

    moments: list[Moment]  # begin and end of the model, begin and end of sampling
    asked: float  # when the engine was asked for it
    launched: list[float]  # per timestamp: when the host got there


# Reasons for idle time: the device waits for a command, for a step to be planned and launched, or for its sampling.
LATE = ("a command", "a plan", "sampling")
LOOKS = 10  # readings to synchronize the clocks


class Busy:
    """Records the steps since the last reset."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._asked = 0.0
        self._step = Step([], 0.0, [])  # in flight
        self._steps: list[Step] = []
        self.reset()

    def ask(self) -> None:
        """The engine is asked for the next step."""
        self._asked = time.perf_counter()

    def begin(self) -> None:
        """The next launch is the first of a step's model. If the last step had nothing to sample, it counts as idle."""
        self._step = Step([], self._asked, [])
        self.go_on(0)

    def go_on(self, place: int) -> None:
        """Records the next of a step's timestamps, if it is its turn."""
        step = self._step
        if len(step.moments) == place:
            step.launched.append(time.perf_counter())
            step.moments.append(self._moment())
            if len(step.moments) == 4:
                self._steps.append(step)

    def reset(self) -> None:
        """Forgets all steps, and synchronizes the clocks. The device may be busy meanwhile, for another thread; waiting for a
        timestamp returns late, but never early."""
        self._steps, self._origin = [], self._moment()
        self._zero = min(self._look() for _ in range(LOOKS))

    def _look(self) -> float:
        """When the origin was, by perf_counter, or later."""
        moment = self._moment()
        moment.wait()
        return time.perf_counter() - self._origin.until(moment)

    def read(self) -> dict[str, list[float]]:
        """Seconds: how long the device worked on each step, how long it waited within it and for the next, and how long of this for
        each of LATE."""
        steps = list(self._steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        at = [[self._zero + self._origin.until(moment) for moment in step.moments] for step in steps]
        found: dict[str, list[float]] = {name: [] for name in ("busy", "gaps", *LATE)}
        for begun, model, sampling, ended in at:
            found["busy"].append(model - begun + ended - sampling)
        for (before, (_, model, sampling, ended)), (after, (begun, *_)) in pairwise(zip(steps, at, strict=True)):
            wait, gap = sampling - model, begun - ended
            late = _within(after.asked - ended, gap)
            found["gaps"].append(wait + gap)
            found["a command"].append(late)
            found["a plan"].append(_within(after.launched[0] - ended, gap) - late)
            found["sampling"].append(_within(before.launched[SAMPLING_BEGINS] - model, wait))
        return found


def _within(seconds: float, most: float) -> float:
    return max(0.0, min(seconds, most))


MODEL_ENDED, SAMPLING_BEGINS, SAMPLING_ENDED = 1, 2, 3


def watch(cuda: bool) -> Busy:
    """Instruments the engine in this process. Graphs that were recorded before are not seen."""
    busy = Busy(Event if cuda else Instant)
    _before_replays(busy)
    forward = Decoder.__call__

    @functools.wraps(forward)
    def watched(*arguments: Any) -> Any:
        if cuda and torch.cuda.is_current_stream_capturing():
            return forward(*arguments)
        busy.begin()
        result = forward(*arguments)
        busy.go_on(MODEL_ENDED)
        return result

    Decoder.__call__ = watched  # type: ignore[assignment, method-assign]
    _around(Engine, "_decodes", busy.ask, lambda: None)  # of both kinds of steps
    _around(Decoder, "logits", lambda: busy.go_on(SAMPLING_BEGINS), lambda: None)
    _around(logits, "begin", lambda: None, lambda: busy.go_on(SAMPLING_ENDED))
    return busy


def _before_replays(busy: Busy) -> None:
    record = graphs.Recorder.__call__

    def recorded(self: graphs.Recorder, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        replay = record(self, run)

        def watched() -> torch.Tensor:
            busy.begin()
            result = replay()
            busy.go_on(MODEL_ENDED)
            return result

        return watched

    graphs.Recorder.__call__ = recorded  # type: ignore[method-assign]


def _around(place: Any, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    function = getattr(place, name)

    @functools.wraps(function)
    def watched(*arguments: Any, **options: Any) -> Any:
        before()
        result = function(*arguments, **options)
        after()
        return result

    setattr(place, name, watched)
