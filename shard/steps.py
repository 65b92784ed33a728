"""In what order commands are executed: one at a time, each once, on one thread, whoever sends them. Knows no engine.

A router sends the next command before the last one is answered. While a command is executed, the one after it is received,
checked and passed on to the other ranks, and the reply before it leaves, each on a thread of its own: between two steps there is
only a queue. Beside that order it keeps what makes repetition and loss harmless: the last reply, and who reigns.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import grpc

from ..proto import shard_pb2 as wire

log = logging.getLogger(__name__)

# Commands of a stream that were received and whose replies have not left. A router has two steps under way and a few commands
# between them; one that doesn't read its replies is not heard any further.
AHEAD = 8

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# Builds a reply, when the command after it may be under way already. May be called again, and by any thread.
Answer = Callable[[], wire.Reply]


class Refused(Exception):
    """A command that contradicts those before it. It changed nothing."""


class Failed(Exception):
    """A fault that is no group's own: what is left of the shard's state can't be trusted."""


class Caller:
    """Who sends commands: a stream, or one unary call."""

    def __init__(self) -> None:
        self.reign = 0  # in which it spoke; 0: not yet
        self.replies: queue.SimpleQueue[Future[Answer] | Exception | None] = queue.SimpleQueue()  # in order; None: no more
        self.room = threading.Semaphore(AHEAD - 1)  # for further commands; the one that is received now has its own
        self.gone = False  # nobody takes replies any more


class Executor:
    """`execute` is called with one command at a time; `relay` passes one on to the other ranks, if there are any; `end` is told
    the exit code with which this process should end after a fault."""

    def __init__(
        self, execute: Callable[[wire.Command], Answer], relay: Callable[[bytes], None] | None, end: Callable[[int], None]
    ) -> None:
        self._execute = execute
        self._relay = relay
        self._end = end
        self._thread = ThreadPoolExecutor(1, "steps")
        self._order = threading.Lock()  # commands are relayed and queued in one order
        self._last: tuple[int, Future[Answer]] = (0, Future())  # queued, executed or not
        self._reign = 1  # ClearCache begins another
        self._failed = False

    def call(self, function: Callable[Arguments, Result], *arguments: Arguments.args, **settings: Arguments.kwargs) -> Result:
        """Calls a function on the thread that executes commands, after all of them."""
        return self._thread.submit(function, *arguments, **settings).result()

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
        if self._relay is not None and not self._failed:
            try:
                self._relay(command.SerializeToString())
            except OSError:
                self._fail("another rank is gone")
        reply = self._thread.submit(self._run, command)
        self._last = (step, reply)
        return reply

    def _run(self, command: wire.Command) -> Answer:
        if self._failed:
            raise Failed
        try:
            return self._execute(command)
        except Exception as error:
            self._fail("the shard failed")
            raise Failed from error

    def _fail(self, message: str) -> None:
        self._failed = True
        log.exception(message)
        self._end(1)
