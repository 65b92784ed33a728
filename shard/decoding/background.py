"""A small thread pool for work beside the steps, such as compiling grammars; its threads exist only while there are jobs."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

STACK = 1 << 24  # more than on the router's threads, which have compiled the same grammars
SIZING = threading.Lock()  # `threading.stack_size` is global to the process

Result = TypeVar("Result")


class Background:
    """A first-in, first-out job queue with a bounded number of daemon threads, which don't keep the process from ending."""

    def __init__(self, threads: int) -> None:
        """threads: the most that run at once."""
        self._most = threads
        self._threads = 0
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()

    def submit(self, function: Callable[[], Result]) -> "Future[Result]":
        """Queues a job and returns at once; the future gets what the function returns or raises."""
        future: Future[Result] = Future()
        with self._lock:
            self._jobs.append((future, function))
            if self._threads < self._most:
                self._threads += 1
                self._start()
        return future

    def _start(self) -> None:
        with SIZING:
            usual = threading.stack_size(STACK)
            threading.Thread(target=self._work, name="background", daemon=True).start()
            threading.stack_size(usual)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._threads -= 1
                    return
                future, function = self._jobs.popleft()
            try:
                future.set_result(function())
            except BaseException as error:  # a panic in a Rust library is not an Exception
                future.set_exception(error)
