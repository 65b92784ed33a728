"""When a shard's device works: moments before the first launch of a step's model and after the last launch of its sampling.

They are CUDA events, so they stand between kernels on the device's own line of time. What is copied to the device before a step,
and what brings its tokens to the host, counts as idle: the share of idle time that is told is rather too large than too small.
"""

import functools
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch

from penstock.kernels import choose
from penstock.shard import graphs, logits
from penstock.shard.models.decoder import Decoder


class Moment(Protocol):
    """On a device's line of time."""

    def until(self, other: Any) -> float:
        """Seconds."""


class Event:
    """Of a CUDA device: now, in the order of its work."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def until(self, other: "Event") -> float:
        """Seconds. Both must be over."""
        return float(self._event.elapsed_time(other._event)) / 1e3


class Instant:
    """Of a CPU."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def until(self, other: "Instant") -> float:
        """Seconds."""
        return other._seconds - self._seconds


class Busy:
    """The steps since the last reset."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._begun: Moment | None = None
        self._steps: list[tuple[Moment, Moment]] = []

    def begin(self) -> None:
        """The next launch is a step's first. If the last step had nothing to sample, it counts as idle."""
        self._begun = self._moment()

    def end(self) -> None:
        """The last launch was a step's last."""
        if self._begun is not None:
            self._steps.append((self._begun, self._moment()))
            self._begun = None

    def reset(self) -> None:
        """Forgets all steps."""
        self._steps = []

    def read(self) -> dict[str, list[float]]:
        """Seconds: how long the device worked on each step, and how long it waited for the next."""
        steps = list(self._steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        busy = [begun.until(ended) for begun, ended in steps]
        gaps = [before[1].until(after[0]) for before, after in pairwise(steps)]
        return {"busy": busy, "gaps": gaps}


def watch(cuda: bool) -> Busy:
    """From now on, in this process. Graphs that were recorded before are not seen."""
    busy = Busy(Event if cuda else Instant)
    _before_replays(busy)
    forward = Decoder.__call__

    @functools.wraps(forward)
    def watched(*arguments: Any) -> Any:
        if not (cuda and torch.cuda.is_current_stream_capturing()):
            busy.begin()
        return forward(*arguments)

    Decoder.__call__ = watched  # type: ignore[assignment, method-assign]
    if cuda and choose.triton_on(torch.device("cuda")):
        from penstock.kernels import fused_sampling as module

        _after(module, "sample", busy)
    else:
        _after(logits, "pick", busy)
    return busy


def _before_replays(busy: Busy) -> None:
    record = graphs.Recorder.__call__

    def recorded(self: graphs.Recorder, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        replay = record(self, run)

        def watched() -> torch.Tensor:
            busy.begin()
            return replay()

        return watched

    graphs.Recorder.__call__ = recorded  # type: ignore[method-assign]


def _after(module: Any, name: str, busy: Busy) -> None:
    function = getattr(module, name)

    @functools.wraps(function)
    def watched(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        busy.end()
        return result

    setattr(module, name, watched)
