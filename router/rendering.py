"""Renders chats in a process of its own: a template is a program, and only a process can be stopped whatever it does.

Counting loops, or forbidding functions, would not do: a template can fill the memory or the time with one `replace`, one `join`,
one product. Here it gets some seconds and some memory, and the event loop waits for a pipe meanwhile. A chat that is refused for
its time costs its process, and the next one starts another.
"""

import asyncio
import dataclasses
import json
import os
import resource
import select
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

from ..proto.process import die_with_parent
from .request import Refused
from .template import Chat, ChatTemplate

SECONDS = 5.0  # for one chat. All of it costs the router 0.4 ms of CPU for a short one and 8 ms for 1 MB (x86, 2 crowded cores)
START = 30.0  # for a process to be there; usual are 0.2 s, and 0.7 s on a crowded machine
MEMORY = 1 << 30  # bytes of addresses that rendering may add to what the process has when it starts
PROCESSES = 2  # so that a slow chat holds nobody up
HEAD = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Result:
    """The text, or why there is none and which field is to blame."""

    text: str = ""
    refused: str = ""
    parameter: str | None = None


class Renderer:
    """Renders chats elsewhere, within limits. Its processes start when they are needed and stay."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._idle: list[_Process] = []
        # Its own: a process ends with the thread that has started it, see `die_with_parent`.
        self._threads = ThreadPoolExecutor(PROCESSES, "renderer")

    async def render(self, source: str, special_tokens: Mapping[str, str], chat: Chat) -> str:
        """The prompt's text. Raises Refused."""
        result = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, source, special_tokens, chat)
        if result.refused:
            raise Refused(result.refused, result.parameter)
        return result.text

    def close(self) -> None:
        """Ends the processes that nobody waits for. No chat is rendered any more."""
        self._threads.shutdown(wait=False)
        while self._idle:
            self._idle.pop().close()

    def _ask(self, source: str, special_tokens: Mapping[str, str], chat: Chat) -> Result:
        """One that was idle may have been killed meanwhile; a new one fails only because of the chat."""
        job = json.dumps([source, special_tokens, dataclasses.asdict(chat)]).encode()
        while self._idle:
            try:
                return self._ask_one(self._idle.pop(), job)
            except (OSError, EOFError, IndexError):
                continue
        try:
            return self._ask_one(_Process(_started()), job)
        except (OSError, EOFError):
            return Result(refused="rendering the chat template has failed: it needs too much memory", parameter="messages")

    def _ask_one(self, process: "_Process", job: bytes) -> Result:
        try:
            answer = process.ask(job, self._seconds)
        except TimeoutError:
            process.close()
            return Result(refused=f"the chat template takes more than {self._seconds:g} s for the messages", parameter="messages")
        except BaseException:
            process.close()
            raise
        self._idle.append(process)
        return Result(**json.loads(answer))


class _Process:
    """The other process, seen from here."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        """Waits until it is ready."""
        self._process = process
        self._end = weakref.finalize(self, _ended, process)  # also when nobody says so
        self._read(HEAD.size, time.monotonic() + START)

    def ask(self, job: bytes, seconds: float) -> bytes:
        """Raises TimeoutError, or OSError or EOFError if the process has ended."""
        deadline = time.monotonic() + seconds
        assert self._process.stdin is not None
        rest = memoryview(HEAD.pack(len(job)) + job)
        while rest:
            rest = rest[self._process.stdin.write(rest) :]
        (length,) = HEAD.unpack(self._read(HEAD.size, deadline))
        return self._read(length, deadline)

    def close(self) -> None:
        self._end()

    def _read(self, length: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        readable = select.poll()  # `select.select` knows no descriptor above 1023
        readable.register(descriptor, select.POLLIN)
        found = bytearray()
        while len(found) < length:
            if not readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            data = os.read(descriptor, length - len(found))
            if not data:
                raise EOFError
            found += data
        return bytes(found)


def _started() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", __name__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)


def _ended(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


@lru_cache(maxsize=16)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _result(source: str, special_tokens: dict[str, str], chat: dict[str, Any]) -> Result:
    """What the process does for one chat."""
    try:
        return Result(_compiled(source, tuple(special_tokens.items())).render(Chat(**chat)))
    except Refused as refused:
        return Result(refused=str(refused)[:2000], parameter=refused.parameter)


def _serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Until the other side closes the pipe."""
    outgoing.write(HEAD.pack(0))
    outgoing.flush()
    while head := incoming.read(HEAD.size):
        answer = json.dumps(dataclasses.asdict(_result(*json.loads(incoming.read(*HEAD.unpack(head)))))).encode()
        outgoing.write(HEAD.pack(len(answer)) + answer)
        outgoing.flush()


def _limit_memory() -> None:
    """A MemoryError is told as any other error of a template; it must not take the router's memory, or the shards'."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))


if __name__ == "__main__":
    die_with_parent()
    if sys.platform.startswith("linux"):
        _limit_memory()
    _serve(sys.stdin.buffer, sys.stdout.buffer)
