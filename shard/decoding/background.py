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
        """Queues a job and returns at once; the future gets what the function returns or raises, or why no thread could start."""
        future: Future[Result] = Future()
        with self._lock:
            problem = self._start() if self._threads < self._most else None
            if problem is not None and not self._threads:
                future.set_exception(problem)
            else:
                self._jobs.append((future, function))
        return future

    def _start(self) -> RuntimeError | None:
        with SIZING:
            usual = threading.stack_size(STACK)
            try:
                threading.Thread(target=self._work, name="background", daemon=True).start()
            except RuntimeError as error:  # the process has as many threads as it may
                return error
            finally:
                threading.stack_size(usual)
        self._threads += 1
        return None

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._threads -= 1
                    return
                future, function = self._jobs.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # a panic in a Rust library is not an Exception
                future.set_exception(error)
