"""Work beside a step: on threads of its own, a few at once, which are there while there is something to do."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

STACK = 1 << 24  # bytes of each thread's stack: more than the router's, which has compiled the same grammars
SIZING = threading.Lock()  # the size of stacks is the process's

Result = TypeVar("Result")


class Background:
    """First come, first served. Its threads don't keep the process from ending."""

    def __init__(self, threads: int) -> None:
        """threads: that work at once, at most."""
        self._most = threads
        self._threads = 0
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()

    def submit(self, function: Callable[[], Result]) -> "Future[Result]":
        """Returns at once; the future has what the function returns, or raises."""
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
            except BaseException as error:  # a panic of a library in Rust is no Exception
                future.set_exception(error)
