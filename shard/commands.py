"""Command executor of a shard: runs commands one at a time, each once, on one thread, whoever sends them. Knows no engine.

A router sends the next command before the last one is answered. While a command is executed, the one after it is received, checked
and relayed to the other ranks, and the reply before it is sent, each on a thread of its own: between two steps there is only a
queue. The executor also makes repetition and loss harmless: it keeps the last reply, and which router is in charge (a reign).

A step may be left in flight, for the next one to be begun on top of it while the device computes. If there is no next one by the
time that the device is done, it lands. Which of the two happened is relayed to the other ranks, whose books must not differ.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeVar

import grpc

from ..proto import shard_pb2 as wire

log = logging.getLogger(__name__)

# Backpressure: commands of a stream that were received and whose replies have not been sent. A router has three steps in flight at
# most, and a few commands between them; one that doesn't read its replies gets no further command received.
AHEAD = 8

Result = TypeVar("Result")
# Builds a reply, possibly when the next command is in flight already. May be called again, and by any thread.
Answer = Callable[[], wire.Reply]
# Relayed to the other ranks, in place of a command, when a step has landed before the next command was there.
LAND = b""


class Refused(Exception):
    """A command that contradicts earlier ones. It changed nothing."""


class Superseded(Refused):
    """A command of a router whose place another one has taken."""


class Failed(Exception):
    """A fault that is not confined to one group: the shard's state can't be trusted any more."""


class CommandHandler(Protocol):
    """What executes commands, on one thread."""

    def enter(self) -> None:
        """Called first on that thread, and on the one that waits for the device."""

    def execute(self, command: wire.Command, reply: Callable[[Answer], None], /) -> None:
        """Calls `reply`, unless it leaves a step in flight: then the next call, or `land`, does so before its own."""

    @property
    def underway(self) -> Callable[[], None] | None:
        """Waits, on any thread, until `land` would not have to wait; None: nothing is in flight."""

    def land(self) -> None:
        """Completes the step in flight, if there is one."""


class CommandSource:
    """A sender of commands: a stream, or one unary call."""

    def __init__(self) -> None:
        self.reign = 0  # the one in which it sent its first command; 0: none yet
        # in order; None: end of the stream
        self.replies: queue.SimpleQueue[Future[Answer] | Exception | None] = queue.SimpleQueue()
        self.room = threading.Semaphore(AHEAD - 1)  # for further commands; the one being received has its own
        self.gone = False  # the stream was closed: nobody reads replies


class Executor:
    """Executes commands on `machine`, one at a time; `relay` sends one to the other ranks, if there are any; after a fault, `end`
    is called with the exit code for this process."""

    def __init__(self, machine: CommandHandler, relay: Callable[[bytes], None] | None, end: Callable[[int], None]) -> None:
        self._machine = machine
        self._relay = relay
        self._end = end
        self._thread = ThreadPoolExecutor(1, "steps")
        # A thread that waits for a CUDA event without having selected a device takes half a GB of the first one.
        self._watcher = ThreadPoolExecutor(1, "device", machine.enter)
        self._order = threading.Lock()  # commands are relayed and queued in the same order
        self._count = 0  # commands queued so far
        self._open: list[Future[Answer]] = []  # replies of the command being executed, and of the step in flight
        # the last queued command, executed or not: its step number and reply
        self._last: tuple[int, Future[Answer]] = (0, Future())
        self._reign = 1  # number of the current reign: ClearCache begins another
        self._failed = False
        self._thread.submit(self._guard, machine.enter)

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls a function on the executor's thread, after all queued commands."""
        return self._thread.submit(function).result()

    def once(self, command: wire.Command) -> wire.Reply:
        """The reply to a single command. Raises Refused or Failed."""
        return self._queue(command, CommandSource()).result()()

    def stream(self, commands: Iterator[wire.Command]) -> Iterator[wire.Reply]:
        """The replies to a stream of commands, which are received while others are executed. Raises Refused or Failed, after the
        replies to the commands before. When the stream ends, all groups begun in its reign are dropped."""
        caller = CommandSource()
        threading.Thread(target=self._receive, args=(commands, caller), name="receive", daemon=True).start()
        try:
            while (reply := caller.replies.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield reply.result()()
                caller.room.release()
        finally:
            caller.gone = True
            caller.room.release()

    def _receive(self, commands: Iterator[wire.Command], caller: CommandSource) -> None:
        end: Exception | None = None
        try:
            for command in commands:
                caller.replies.put(self._queue(command, caller))
                caller.room.acquire()
                if caller.gone:
                    break
        except grpc.RpcError:
            pass  # cancelled, or the connection is lost
        except Exception as error:
            end = error
        finally:
            self._abandon(caller)
            caller.replies.put(end)

    def _queue(self, command: wire.Command, caller: CommandSource) -> Future[Answer]:
        kind = command.WhichOneof("kind")
        if kind is None:
            raise Refused("an empty command")
        step = getattr(command, kind).step
        with self._order:
            if kind == "clear_cache":
                self._reign += 1
            else:
                last, reply = self._last
                if not step:
                    raise Refused("a command needs a step, counted from 1")
                if caller.reign not in (0, self._reign):
                    raise Superseded("another router has called ClearCache since: this one is not heard any more")
                if step == last:
                    return reply
                if step < last:
                    raise Refused(f"step {step} is older than the last one, {last}")
            caller.reign = self._reign
            return self._pass(step, command)

    def _abandon(self, caller: CommandSource) -> None:
        with self._order:
            if caller.reign != self._reign:
                # it began nothing, or a new router called ClearCache before this stream's end was noticed: all belongs to that one
                return
            self._reign += 1
            step = self._last[0] + 1
            self._pass(step, wire.Command(clear_cache=wire.ClearCacheRequest(step=step)))

    def _pass(self, step: int, command: wire.Command) -> Future[Answer]:
        """Relays a command to the other ranks, which should not begin later than this one, and queues it."""
        if self._relay is not None:
            self._send_on(command.SerializeToString())
        self._count += 1
        reply: Future[Answer] = Future()
        self._thread.submit(self._run, command, reply, self._count)
        self._last = (step, reply)
        return reply

    def _send_on(self, message: bytes) -> None:
        if self._relay is not None and not self._failed:
            try:
                self._relay(message)
            except OSError:
                self._fail("another rank is gone")

    def _run(self, command: wire.Command, reply: Future[Answer], count: int) -> None:
        self._open = [*(one for one in self._open if not one.done()), reply]
        self._guard(lambda: self._machine.execute(command, reply.set_result))
        wait = self._machine.underway if not self._failed else None
        if wait is not None and self._count == count:  # else the next command lands it
            self._watcher.submit(self._watch, wait, count)

    def _watch(self, wait: Callable[[], None], count: int) -> None:
        with suppress(Exception):  # a device error is found again by `land`
            wait()
        self._thread.submit(self._land, count)

    def _land(self, count: int) -> None:
        """Lands the step of command number `count`, unless another command is queued: then that one lands it."""
        with self._order:
            if self._count > count:
                return
            self._send_on(LAND)
        self._guard(self._machine.land)

    def _guard(self, work: Callable[[], None]) -> None:
        if not self._failed:
            try:
                work()
            except BaseException:  # a panic in a Rust library is not an Exception
                self._fail("the shard failed")
        if self._failed:
            for reply in self._open:
                if not reply.done():
                    reply.set_exception(Failed())

    def _fail(self, message: str) -> None:
        self._failed = True
        log.exception(message)
        self._end(1)
