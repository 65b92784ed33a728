"""Pool of worker processes for untrusted work: only a process can be killed whatever it does, and crashes alone.

Some libraries that work on what clients send loop, take all memory or crash for certain inputs, which no exception handler catches.
Here each job gets limited time and memory, and the event loop waits for a socket meanwhile. A job that is stopped, or crashes,
costs its process, and the next one starts another. So does one whose client leaves, unless jobs are to be finished (`finishes`):
where starting a process costs more.
"""

import asyncio
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

from ..proto.process import die_with_parent

START = 30.0  # seconds for a process to start; usual are 0.2 s, and 0.7 s on a crowded machine
MEMORY = 1 << 30  # bytes of address space that work may add to what the process has when it starts
HEAD = struct.Struct("<I")
READ = 65536  # bytes per read


class Died(Exception):
    """The job crashed two processes."""


class TimedOut(Exception):
    """The job took longer than it may."""


class Busy(Exception):
    """No process was free in time, or none could be started: a retry may succeed."""


class WorkerProcesses:
    """A pool of processes that run a module, which calls `serve`. They start on demand, stay, and end with this object or with the
    process that owns it."""

    def __init__(self, module: str, processes: int, finishes: bool = False) -> None:
        """finishes: finish jobs that have begun, also when nobody waits for them."""
        self._module = module
        self._finishes = finishes
        self._jobs = set[asyncio.Task[bytes]]()  # running
        self._idle: list[_Process] = []
        self._free = asyncio.Semaphore(processes)
        self._starting = asyncio.Lock()
        self._started = False

    async def start(self) -> None:
        """Returns when a process was ready once, so that the first job's time limit does not include its start. Raises Busy."""
        async with self._starting:
            if not self._started:
                self._idle.append(await self._new())
                self._started = True

    async def ask(self, job: bytes, seconds: float, patience: float | None = None) -> bytes:
        """The result of `serve` for the job. Raises TimedOut if that takes longer than `seconds`, Busy if no process is free within
        `patience`, and Died."""
        try:
            async with asyncio.timeout(patience):  # not wait_for: before Python 3.12 that may miss that its caller is cancelled
                await self._free.acquire()
        except TimeoutError:
            raise Busy from None
        task = asyncio.create_task(self._ask(job, seconds))
        self._jobs.add(task)
        task.add_done_callback(self._done)
        return await (asyncio.shield(task) if self._finishes else task)

    def _done(self, task: "asyncio.Task[bytes]") -> None:
        self._free.release()
        self._jobs.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, since a caller that left does not

    async def _ask(self, job: bytes, seconds: float) -> bytes:
        """Tries twice: a process may have been killed for no fault of the job."""
        for _ in range(2):
            while self._idle and not self._idle[-1].alive:
                self._idle.pop()
            process = self._idle.pop() if self._idle else await self._new()
            try:
                return await self._ask_one(process, job, seconds)
            except (OSError, EOFError):
                continue
        raise Died

    async def _new(self) -> "_Process":
        try:
            process = _Process(self._module)
        except OSError:  # no memory, no descriptors...
            raise Busy from None
        try:
            await process.ready()
        except BaseException as error:
            process.close()
            if isinstance(error, OSError | EOFError):
                raise Busy from None
            raise
        return process

    async def _ask_one(self, process: "_Process", job: bytes, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                answer = await process.ask(job)
        except BaseException as error:  # the client may have left, too
            # In a thread: the kernel takes a while to reclaim the memory of a large process.
            asyncio.get_running_loop().run_in_executor(None, process.close)
            if isinstance(error, TimeoutError):
                raise TimedOut from None
            raise
        self._idle.append(process)
        return answer


class _Process:
    """A worker process, seen from the router. It dies with the thread that has started it: the event loop's, which stays."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        command = [sys.executable, "-P", "-m", module]
        try:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._end = weakref.finalize(self, _ended, self._process, self._socket)  # also when `close` is never called

    async def ready(self) -> None:
        """Waits until it is ready. Raises OSError or EOFError if it has ended, or never will be."""
        try:
            async with asyncio.timeout(START):
                await self._answer()
        except TimeoutError:
            raise EOFError from None

    async def ask(self, job: bytes) -> bytes:
        """Sends a job and returns the answer. Raises OSError or EOFError if the process has ended."""
        await asyncio.get_running_loop().sock_sendall(self._socket, HEAD.pack(len(job)) + job)
        return await self._answer()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._end()

    async def _answer(self) -> bytes:
        """The next answer."""
        loop, found = asyncio.get_running_loop(), bytearray()
        while len(found) < HEAD.size or len(found) < HEAD.size + HEAD.unpack_from(found)[0]:
            data = await loop.sock_recv(self._socket, READ)
            if not data:
                raise EOFError
            found += data
        return bytes(found[HEAD.size :])


def _ended(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    process.kill()  # first: else it may see the closed connection, and complain
    process.wait()
    connection.close()


def serve(work: Callable[[bytes], bytes]) -> None:
    """The worker's loop: one job after the other, until the other side closes the pipe, or `work` leaves a thread behind."""
    die_with_parent()
    if sys.platform.startswith("linux"):
        _limit_memory()
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    outgoing.write(HEAD.pack(0))
    outgoing.flush()
    while head := incoming.read(HEAD.size):
        answer = work(incoming.read(*HEAD.unpack(head)))
        outgoing.write(HEAD.pack(len(answer)) + answer)
        outgoing.flush()
        if threading.active_count() > 1:  # which would take the next job's time, and no thread can be killed
            os._exit(0)


def _limit_memory() -> None:
    """Limits its address space, so that it runs out of its own memory, and not of the router's, or the shards'."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
