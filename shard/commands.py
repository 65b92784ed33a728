"""In what order commands are executed: one at a time, each once, on one thread, whoever sends them. Knows no engine.

A router sends the next command before the last one is answered. While a command is executed, the one after it is received,
checked and passed on to the other ranks, and the reply before it leaves, each on a thread of its own: between two steps there is
only a queue. Beside that order it keeps what makes repetition and loss harmless: the last reply, and who reigns.

A step may be left under way, for the next one to be begun on top of it while the device works. If there is no next one by the time
that the device is done, it lands. Which of the two it was is told to the other ranks, whose books must not differ.
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

# Commands of a stream that were received and whose replies have not left. A router has two steps under way and a few commands
# between them; one that doesn't read its replies is not heard any further.
AHEAD = 8

Result = TypeVar("Result")
# Builds a reply, when the command after it may be under way already. May be called again, and by any thread.
Answer = Callable[[], wire.Reply]
# What the other ranks are told, instead of a command, when a step has landed before the next command was there.
LAND = b""


class Refused(Exception):
    """A command that contradicts those before it. It changed nothing."""


class Failed(Exception):
    """A fault that is no group's own: what is left of the shard's state can't be trusted."""


class Machine(Protocol):
    """What executes commands, on one thread."""

    def enter(self) -> None:
        """The first call on that thread, and on one that waits for what is under way."""

    def execute(self, command: wire.Command, reply: Callable[[Answer], None], /) -> None:
        """Calls `reply`, unless it leaves a step under way: then the next call does before its own, or `land`."""

    @property
    def underway(self) -> Callable[[], None] | None:
        """Waits, on any thread, until `land` has nothing to wait for; None: nothing is under way."""

    def land(self) -> None:
        """Ends what is under way, if anything is."""


class Caller:
    """Who sends commands: a stream, or one unary call."""

    def __init__(self) -> None:
        self.reign = 0  # in which it spoke; 0: not yet
        self.replies: queue.SimpleQueue[Future[Answer] | Exception | None] = queue.SimpleQueue()  # in order; None: no more
        self.room = threading.Semaphore(AHEAD - 1)  # for further commands; the one that is received now has its own
        self.gone = False  # nobody takes replies any more


class Executor:
    """The machine gets one command at a time; `relay` passes one on to the other ranks, if there are any; `end` is told the exit
    code with which this process should end after a fault."""

    def __init__(self, machine: Machine, relay: Callable[[bytes], None] | None, end: Callable[[int], None]) -> None:
        self._machine = machine
        self._relay = relay
        self._end = end
        self._thread = ThreadPoolExecutor(1, "steps")
        # A thread that waits for an event of CUDA's without having chosen a device takes half a GB of the first one.
        self._watcher = ThreadPoolExecutor(1, "device", machine.enter)
        self._order = threading.Lock()  # commands are relayed and queued in one order
        self._count = 0  # of those that were queued
        self._open: list[Future[Answer]] = []  # replies of what is executed, and of what is under way
        self._last: tuple[int, Future[Answer]] = (0, Future())  # queued, executed or not
        self._reign = 1  # ClearCache begins another
        self._failed = False
        self._thread.submit(self._guard, machine.enter)

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls a function on the thread that executes commands, after all of them."""
        return self._thread.submit(function).result()

    def once(self, command: wire.Command) -> wire.Reply:
        """The reply to a command that comes alone. Raises Refused or Failed."""
        return self._queue(command, Caller()).result()()

    def stream(self, commands: Iterator[wire.Command]) -> Iterator[wire.Reply]:
        """The replies to commands, which are received while others are executed. Raises Refused or Failed, after the replies to
        the commands before. When the stream ends, all that was begun in its reign is dropped."""
        caller = Caller()
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

    def _receive(self, commands: Iterator[wire.Command], caller: Caller) -> None:
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

    def _queue(self, command: wire.Command, caller: Caller) -> Future[Answer]:
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
                    raise Refused("another router has called ClearCache since: this one is not heard any more")
                if step == last:
                    return reply
                if step < last:
                    raise Refused(f"step {step} is older than the last one, {last}")
            caller.reign = self._reign
            return self._pass(step, command)

    def _abandon(self, caller: Caller) -> None:
        with self._order:
            if caller.reign != self._reign:
                return  # it began nothing, or another router came before this stream's end was noticed: all is its own
            self._reign += 1
            step = self._last[0] + 1
            self._pass(step, wire.Command(clear_cache=wire.ClearCacheRequest(step=step)))

    def _pass(self, step: int, command: wire.Command) -> Future[Answer]:
        """To the other ranks, which shall not begin later than this one, and to the thread."""
        if self._relay is not None:
            self._tell(command.SerializeToString())
        self._count += 1
        reply: Future[Answer] = Future()
        self._thread.submit(self._run, command, reply, self._count)
        self._last = (step, reply)
        return reply

    def _tell(self, message: bytes) -> None:
        if self._relay is not None and not self._failed:
            try:
                self._relay(message)
            except OSError:
                self._fail("another rank is gone")

    def _run(self, command: wire.Command, reply: Future[Answer], count: int) -> None:
        self._open = [*(one for one in self._open if not one.done()), reply]
        self._guard(lambda: self._machine.execute(command, reply.set_result))
        wait = self._machine.underway if not self._failed else None
        if wait is not None:
            self._watcher.submit(self._watch, wait, count)

    def _watch(self, wait: Callable[[], None], count: int) -> None:
        with suppress(Exception):  # what is wrong with the device is found again by who lands
            wait()
        self._thread.submit(self._land, count)

    def _land(self, count: int) -> None:
        """Ends the step of a command, unless there is another one: the step lands when that is executed."""
        with self._order:
            if self._count > count:
                return
            self._tell(LAND)
        self._guard(self._machine.land)

    def _guard(self, work: Callable[[], None]) -> None:
        if not self._failed:
            try:
                work()
            except BaseException:  # a panic of a library in Rust is no Exception
                self._fail("the shard failed")
        if self._failed:
            for reply in self._open:
                if not reply.done():
                    reply.set_exception(Failed())

    def _fail(self, message: str) -> None:
        self._failed = True
        log.exception(message)
        self._end(1)
