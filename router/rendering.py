"""Renders chats in a process of its own: a template is a program, and only a process can be stopped whatever it does.

Counting loops, or forbidding functions, would not do: a template can fill the memory or the time with one `replace`, one `join`,
one product. Here it gets some seconds and some memory, and the event loop waits for a socket meanwhile. A chat that is refused for
its time costs its process, and the next one starts another. So does one whose client leaves while it is rendered.
"""

import asyncio
import dataclasses
import json
import resource
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

from ..proto.process import die_with_parent
from .request import Refused
from .template import Chat, ChatTemplate

SECONDS = 5.0  # for one chat. All of it costs the router 0.04 ms of CPU for a short one and 4 ms for 1 MB (x86, 2 cores)
START = 30.0  # for a process to be there; usual are 0.2 s, and 0.7 s on a crowded machine
MEMORY = 1 << 30  # bytes of addresses that rendering may add to what the process has when it starts
PROCESSES = 2  # so that a slow chat holds nobody up
HEAD = struct.Struct("<I")
READ = 65536  # bytes
FIELDS = tuple(field.name for field in dataclasses.fields(Chat))


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
        self._free = asyncio.Semaphore(PROCESSES)

    async def render(self, source: str, special_tokens: Mapping[str, str], chat: Chat) -> str:
        """The prompt's text. Raises Refused."""
        job = json.dumps([source, special_tokens, {name: getattr(chat, name) for name in FIELDS}]).encode()
        async with self._free:
            result = await self._ask(job)
        if result.refused:
            raise Refused(result.refused, result.parameter)
        return result.text

    def close(self) -> None:
        """Ends the processes that nobody waits for."""
        while self._idle:
            self._idle.pop().close()

    async def _ask(self, job: bytes) -> Result:
        """One that was idle may have been killed meanwhile; a new one fails only because of the chat."""
        while self._idle:
            try:
                return await self._ask_one(self._idle.pop(), job)
            except (OSError, EOFError):
                continue
        try:
            return await self._ask_one(_Process(), job)
        except (OSError, EOFError):
            return Result(refused="rendering the chat template has failed: it needs too much memory", parameter="messages")

    async def _ask_one(self, process: "_Process", job: bytes) -> Result:
        try:
            await process.ready()
            async with asyncio.timeout(self._seconds):
                answer = await process.ask(job)
        except BaseException as error:  # the client may have left, too
            # Not here: to take back the memory of a process that had much of it takes the kernel a while.
            asyncio.get_running_loop().run_in_executor(None, process.close)
            if not isinstance(error, TimeoutError):
                raise
            return Result(refused=f"the chat template takes more than {self._seconds:g} s for the messages", parameter="messages")
        self._idle.append(process)
        return Result(**json.loads(answer))


class _Process:
    """The other process, seen from here. It dies with the thread that has started it: the event loop's, which stays."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        command = [sys.executable, "-P", "-m", __name__]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True)
        self._end = weakref.finalize(self, _ended, self._process, self._socket)  # also when nobody says so
        self._ready = False

    async def ready(self) -> None:
        """Waits until it is. Raises OSError or EOFError if it has ended, or never will be."""
        if self._ready:
            return
        try:
            async with asyncio.timeout(START):
                await self._answer()
        except TimeoutError:
            raise EOFError from None
        self._ready = True

    async def ask(self, job: bytes) -> bytes:
        """Raises OSError or EOFError if the process has ended."""
        await asyncio.get_running_loop().sock_sendall(self._socket, HEAD.pack(len(job)) + job)
        return await self._answer()

    def close(self) -> None:
        self._end()

    async def _answer(self) -> bytes:
        """The next one."""
        loop, found = asyncio.get_running_loop(), bytearray()
        while len(found) < HEAD.size or len(found) < HEAD.size + HEAD.unpack_from(found)[0]:
            data = await loop.sock_recv(self._socket, READ)
            if not data:
                raise EOFError
            found += data
        return bytes(found[HEAD.size :])


def _ended(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


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
