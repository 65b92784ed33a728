"""Order, lookahead, repetition and loss: the executor with functions in place of an engine, then a whole shard behind gRPC."""

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from penstock.proto import shard_pb2 as wire
from penstock.shard.commands import AHEAD, LAND, Answer, Executor, Failed, Refused
from penstock.tests.shard import tiny
from penstock.tests.shard.test_service import WARMUP, Process, code_of, prefill

SECONDS = 10  # for what takes milliseconds


def decode(step: int) -> wire.Command:
    return wire.Command(decode=wire.DecodeRequest(step=step, batches=[1]))


def clear(step: int) -> wire.Command:
    return wire.Command(clear_cache=wire.ClearCacheRequest(step=step))


def told(command: wire.Command) -> tuple[str, int]:
    kind = command.WhichOneof("kind") or ""
    return kind, getattr(command, kind).step


def soon(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def threads(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


class Stage:
    """An executor, and all that it did. A step begins at once and ends when it may."""

    def __init__(self, peers: bool = True) -> None:
        self.entered: list[str] = []  # threads
        self.waited: list[str] = []  # threads
        self.begun: list[tuple[str, int]] = []
        self.relayed: list[tuple[str, int]] = []
        self.codes: list[int] = []
        self.lost = False  # a peer is
        self.broken_at = 0
        self.routers: list[Router] = []
        self.overlaps = False  # steps are left under way
        self.device = threading.Semaphore(0)  # released for each step that the device has done
        self._underway: Callable[[], None] | None = None
        self._steps: queue.SimpleQueue[None] = queue.SimpleQueue()  # that may end
        self._free = threading.Event()
        self._free.set()
        self.executor = Executor(self, self._relay if peers else None, self.codes.append)

    def hold(self) -> None:
        """Steps wait for `let`."""
        self._free.clear()

    def let(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._steps.put(None)

    def let_all(self) -> None:
        self._free.set()
        self.let(100)

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)

    def execute(self, command: wire.Command, answer: Callable[[Answer], None]) -> None:
        kind, step = told(command)
        self.begun.append((kind, step))
        if kind != "clear_cache" and not self._free.is_set():
            self._steps.get(timeout=SECONDS)
        self.land()
        if step == self.broken_at and not self.overlaps:
            raise RuntimeError("planted")
        reply = wire.Reply(clear_cache=wire.ClearCacheReply(step=step)) if kind == "clear_cache" else None

        def land() -> None:
            self.device.acquire()
            if step == self.broken_at:
                raise RuntimeError("planted")
            answer(lambda: wire.Reply(step=wire.StepReply(step=step)))

        if reply is not None or not self.overlaps:
            answer(lambda: reply or wire.Reply(step=wire.StepReply(step=step)))
        else:
            self._underway = land

    @property
    def underway(self) -> Callable[[], None] | None:
        def wait() -> None:
            self.waited.append(threading.current_thread().name)
            self.device.acquire()
            self.device.release()

        return wait if self._underway else None

    def land(self) -> None:
        underway, self._underway = self._underway, None
        if underway is not None:
            underway()

    def _relay(self, message: bytes) -> None:
        if self.lost:
            raise BrokenPipeError
        if message == LAND:
            self.relayed.append(("land", 0))
            return
        self.relayed.append(told(wire.Command.FromString(message)))


class Router:
    """A stream: commands are sent when the test says so, replies taken when it asks."""

    def __init__(self, stage: Stage) -> None:
        stage.routers.append(self)
        self._commands: queue.SimpleQueue[wire.Command | Exception | None] = queue.SimpleQueue()
        self._replies = stage.executor.stream(self._sent())
        self._first: queue.SimpleQueue[wire.Reply] | None = None

    def _sent(self) -> Iterator[wire.Command]:
        while (command := self._commands.get()) is not None:
            if isinstance(command, Exception):
                raise command
            yield command

    def send(self, *commands: wire.Command) -> None:
        for command in commands:
            self._commands.put(command)

    def take(self) -> tuple[str, int]:
        reply = next(self._replies) if self._first is None else self._first.get(timeout=SECONDS)
        self._first = None
        kind = reply.WhichOneof("kind") or ""
        return kind, getattr(reply, kind).step

    def start(self) -> None:
        """Commands are received: gRPC asks for the first reply at once. To be taken later, if it comes."""
        self._first = first = queue.SimpleQueue()
        threading.Thread(target=lambda: first.put(next(self._replies)), daemon=True).start()

    def end(self) -> None:
        self._commands.put(None)

    def cancel(self) -> None:
        """As gRPC does it: the commands raise, and nobody takes replies any more."""
        self._commands.put(grpc.RpcError())
        self._replies.close()  # type: ignore[attr-defined]


@pytest.fixture
def stage() -> Iterator[Stage]:
    """No thread outlives its stream."""
    result = Stage()
    yield result
    result.let_all()
    for router in result.routers:
        router.end()
    soon(lambda: not threads("receive"))


def test_the_next_command_is_with_every_rank_while_a_step_runs(stage: Stage) -> None:
    stage.hold()
    router = Router(stage)
    router.send(decode(1), decode(2), decode(3))
    router.start()
    soon(lambda: len(stage.relayed) == 3 and stage.begun)
    assert stage.begun == [("decode", 1)]
    stage.let()
    soon(lambda: len(stage.begun) == 2)  # nobody has asked for the second reply
    stage.let_all()
    assert [router.take(), router.take(), router.take()] == [("step", 1), ("step", 2), ("step", 3)]
    router.end()
    soon(lambda: stage.begun[3:] == [("clear_cache", 4)])
    assert stage.relayed == stage.begun
    with pytest.raises(StopIteration):
        router.take()


def test_a_step_that_is_repeated_while_it_runs_is_executed_once(stage: Stage) -> None:
    stage.hold()
    router, again = Router(stage), Router(stage)
    router.send(decode(1), decode(1))
    router.start()
    soon(lambda: stage.begun == [("decode", 1)])
    again.send(decode(1))
    again.start()
    stage.let_all()
    assert [router.take(), router.take(), again.take()] == [("step", 1)] * 3
    assert told_reply(stage.executor.once(decode(1))) == 1
    assert stage.begun == stage.relayed == [("decode", 1)]


def told_reply(reply: wire.Reply) -> int:
    return int(reply.step.step)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (decode(0), "a command needs a step, counted from 1"),
        (decode(1), "step 1 is older than the last one, 2"),
        (wire.Command(), "an empty command"),
    ],
)
def test_a_refused_command_comes_after_the_replies_before_it_and_ends_the_stream(
    stage: Stage, wrong: wire.Command, why: str
) -> None:
    stage.hold()
    router = Router(stage)
    router.send(decode(1), decode(2), wrong, decode(3))
    stage.let_all()
    assert [router.take(), router.take()] == [("step", 1), ("step", 2)]
    with pytest.raises(Refused, match=why):
        router.take()
    soon(lambda: len(stage.begun) == 3)
    assert stage.begun == stage.relayed == [("decode", 1), ("decode", 2), ("clear_cache", 3)]
    assert stage.codes == []


def test_a_router_that_reads_nothing_is_heard_only_so_far(stage: Stage) -> None:
    router = Router(stage)
    router.send(*(decode(step) for step in range(1, 50)))
    assert router.take() == ("step", 1)  # it is not known yet that it arrived
    soon(lambda: len(stage.begun) == AHEAD)
    time.sleep(0.05)
    assert len(stage.begun) == len(stage.relayed) == AHEAD
    assert told_reply(stage.executor.once(decode(100))) == 100  # others are heard
    router.cancel()
    soon(lambda: stage.begun[AHEAD + 1 :] == [("clear_cache", 101)])
    soon(lambda: not threads("receive"))


def test_what_a_stream_began_is_dropped_when_it_is_cancelled_in_the_middle_of_a_step(stage: Stage) -> None:
    stage.hold()
    router = Router(stage)
    router.send(decode(5))
    stage.let()
    assert router.take() == ("step", 5)
    router.send(decode(6), decode(7))
    soon(lambda: len(stage.relayed) == 3)
    router.cancel()
    soon(lambda: len(stage.relayed) == 4)
    assert stage.begun == [("decode", 5), ("decode", 6)]
    stage.let_all()
    soon(lambda: stage.begun[2:] == [("decode", 7), ("clear_cache", 8)])  # other ranks had heard of 7
    assert stage.relayed == stage.begun
    soon(lambda: not threads("receive"))


def test_a_stream_that_said_nothing_drops_nothing(stage: Stage) -> None:
    router = Router(stage)
    router.end()
    with pytest.raises(StopIteration):
        router.take()
    assert stage.begun == []


def test_a_router_that_was_followed_by_another_is_not_heard_and_drops_nothing(stage: Stage) -> None:
    stage.hold()
    old, new = Router(stage), Router(stage)
    old.send(clear(1), decode(2), decode(3))
    assert old.take() == ("clear_cache", 1)
    soon(lambda: len(stage.relayed) == 3)
    new.send(clear(1), decode(2), decode(3))
    new.start()
    soon(lambda: len(stage.relayed) == 6)
    old.send(decode(4))
    stage.let_all()
    assert [old.take(), old.take()] == [("step", 2), ("step", 3)]
    with pytest.raises(Refused, match="another router has called ClearCache"):
        old.take()
    assert [new.take(), new.take(), new.take()] == [("clear_cache", 1), ("step", 2), ("step", 3)]
    new.send(decode(4))
    assert new.take() == ("step", 4)
    assert stage.begun == stage.relayed == [*[("clear_cache", 1), ("decode", 2), ("decode", 3)] * 2, ("decode", 4)]
    new.end()
    soon(lambda: stage.begun[7:] == [("clear_cache", 5)])


def test_after_a_fault_nothing_is_executed(stage: Stage) -> None:
    stage.hold()
    stage.broken_at = 2
    router = Router(stage)
    router.send(decode(1), decode(2), decode(3))
    stage.let_all()
    assert router.take() == ("step", 1)
    with pytest.raises(Failed):
        router.take()
    with pytest.raises(Failed):
        stage.executor.once(decode(9))
    router.end()
    soon(lambda: not threads("receive"))
    assert stage.begun == [("decode", 1), ("decode", 2)]
    assert ("clear_cache", 4) not in stage.relayed
    assert stage.codes == [1]


def test_a_rank_that_is_gone_is_a_fault(stage: Stage) -> None:
    router = Router(stage)
    router.send(decode(1))
    assert router.take() == ("step", 1)
    stage.lost = True
    router.send(decode(2))
    with pytest.raises(Failed):
        router.take()
    assert stage.codes == [1]
    assert stage.begun == [("decode", 1)]


def test_the_thread_that_executes_is_made_ready_for_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks other than the first would launch Triton's kernels on the first one's device."""
    stage.executor.once(decode(1))
    [thread] = stage.entered
    assert thread.startswith("steps")
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    engine = tiny.engine("llama")
    engine.enter()
    engine.device = torch.device("cuda", 1)
    engine.enter()
    assert chosen == [torch.device("cuda", 1)]


def test_the_thread_that_waits_for_the_device_is_made_ready_for_it(stage: Stage) -> None:
    """Ranks other than the first would each take half a GB of the first one's device."""
    stage.overlaps = True
    soon_reply(stage, decode(1))
    soon_reply(stage, decode(2))
    [thread] = set(stage.waited)
    assert thread.startswith("device")
    assert sorted(name.partition("_")[0] for name in stage.entered) == ["device", "steps"]
    assert thread in stage.entered


def test_a_step_is_begun_while_the_device_works_on_the_last_one(stage: Stage) -> None:
    stage.overlaps = True
    router = Router(stage)
    router.send(decode(1), decode(2))
    router.start()
    soon(lambda: stage.relayed == [("decode", 1), ("decode", 2)])
    stage.device.release()
    assert router.take() == ("step", 1)
    soon(lambda: len(stage.begun) == 2)
    assert stage.relayed == [("decode", 1), ("decode", 2)]  # the others know that the second came in time
    stage.device.release()
    assert router.take() == ("step", 2)
    assert stage.relayed == [("decode", 1), ("decode", 2), ("land", 0)]  # and that nothing came after it
    router.send(decode(3))
    stage.device.release()
    assert router.take() == ("step", 3)
    assert stage.relayed[3:] == [("decode", 3), ("land", 0)]


def test_what_is_under_way_lands_before_a_command_of_another_kind(stage: Stage) -> None:
    stage.overlaps = True
    router = Router(stage)
    router.send(decode(1), clear(2))
    router.start()
    stage.device.release()
    assert [router.take(), router.take()] == [("step", 1), ("clear_cache", 2)]
    assert told_reply(soon_reply(stage, decode(3))) == 3


def soon_reply(stage: Stage, command: wire.Command) -> wire.Reply:
    stage.device.release()
    return stage.executor.once(command)


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_that_shows_when_a_step_lands(stage: Stage, late: bool) -> None:
    """By itself, or with the next command."""
    stage.overlaps, stage.broken_at = True, 1
    router = Router(stage)
    router.send(decode(1), *(() if late else (decode(2),)))
    stage.device.release()
    with pytest.raises(Failed):
        router.take()
    router.end()
    soon(lambda: not threads("receive"))
    assert stage.codes == [1]


def test_no_thread_is_left() -> None:
    others = threading.enumerate()
    stage = Stage(peers=False)
    router = Router(stage)
    router.send(decode(1))
    assert router.take() == ("step", 1)
    own = [thread for thread in threading.enumerate() if thread not in others]
    assert len(own) == 2
    router.end()
    with pytest.raises(StopIteration):
        router.take()
    del router, stage  # and what runs commands with it
    soon(lambda: gc.collect() >= 0 and not any(thread.is_alive() for thread in own))


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path / "socket")
    process.start()
    process.stub.Warmup(WARMUP, timeout=30)
    yield process
    process.close()


def commands(first: int) -> list[wire.Command]:
    """Two groups, the second of which comes while the first decodes; a batch is joined, a group dropped."""
    begin = wire.Command(prefill=prefill(first, 1, [5, 6, 7], 30))
    other = prefill(first + 3, 2, [8, 9], 30)
    other.batch = 2
    other.decode_batches.append(1)
    join = wire.Command(concat=wire.ConcatRequest(step=first + 4, into=1, batches=[2]))
    drop = wire.Command(filter=wire.FilterRequest(step=first + 9, drop=[1]))
    rest = [decode(first + 10 + more) for more in range(10)]
    middle = [decode(first + 5 + more) for more in range(4)]
    return [begin, decode(first + 1), decode(first + 2), wire.Command(prefill=other), join, *middle, drop, *rest]


def without_time(reply: wire.Reply) -> wire.Reply:
    if reply.WhichOneof("kind") == "step":
        reply.step.seconds = reply.step.draft_seconds = 0
    return reply


def test_commands_sent_ahead_have_the_replies_of_commands_sent_one_by_one(warm: Process) -> None:
    sent: queue.SimpleQueue[wire.Command | None] = queue.SimpleQueue()
    replies = warm.stub.Steps(iter(sent.get, None), timeout=60)
    one_by_one = []
    for command in [clear(1), *commands(2)]:
        sent.put(command)
        one_by_one.append(without_time(next(replies)))
    sent.put(None)
    ahead = [without_time(reply) for reply in warm.stub.Steps(iter([clear(1), *commands(2)]), timeout=60)]
    assert ahead == one_by_one
    assert sum(len(reply.step.tokens) for reply in ahead) == 1 + 2 + 2 + 4 * 2 + 10
    assert warm.codes == []


def test_a_router_that_dies_in_the_middle_of_a_step_leaves_nothing(warm: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warm.service.engine
    begun, go, whole = threading.Event(), threading.Event(), engine.begin_decode

    def slow(*asked: Any) -> Any:
        begun.set()
        assert go.wait(SECONDS)
        return whole(*asked)

    monkeypatch.setattr(engine, "begin_decode", slow)
    sent: queue.SimpleQueue[wire.Command | None] = queue.SimpleQueue()
    call = warm.stub.Steps(iter(sent.get, None), timeout=60)
    sent.put(wire.Command(prefill=prefill(1, 1, [1, 2, 3], 30)))
    next(call)
    for step in (2, 3):
        sent.put(decode(step))
    assert begun.wait(SECONDS)
    call.cancel()
    sent.put(None)
    soon(lambda: not threads("receive"))
    assert engine.books.batches  # the step is not over
    go.set()
    answer = warm.stub.ClearCache(wire.ClearCacheRequest(step=1), timeout=SECONDS)
    assert (answer.free, engine.books.batches) == (500, {})
    assert list(warm.stub.Prefill(prefill(2, 1, [1, 2, 3]), timeout=5).uids) == [1]
    assert warm.codes == []


def test_a_fault_ends_the_stream_with_its_name(warm: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*rest: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(warm.service.engine, "begin_decode", broken)
    replies = warm.stub.Steps(iter([wire.Command(prefill=prefill(1, 1, [1, 2, 3])), decode(2), decode(3)]), timeout=10)
    assert list(next(replies).step.uids) == [1]
    with pytest.raises(grpc.RpcError, match="the shard failed and ends; its log says why") as error:
        next(replies)
    assert code_of(error) == grpc.StatusCode.INTERNAL
    assert warm.codes == [1]
