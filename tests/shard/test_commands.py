"""The executor of router commands: order, commands sent ahead, repeated commands, lost routers and ranks, overlapped steps. First
with a fake engine, then with a whole shard behind gRPC."""

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
from penstock.shard.commands import AHEAD, LAND, Answer, Executor, Failed, Refused, Superseded
from penstock.tests.shard import tiny
from penstock.tests.shard.test_service import WARMUP, InProcessShard, code_of, prefill

SECONDS = 10  # timeout of operations that take milliseconds


def decode(step: int) -> wire.Command:
    return wire.Command(decode=wire.DecodeRequest(step=step, batches=[1]))


def clear(step: int) -> wire.Command:
    return wire.Command(clear_cache=wire.ClearCacheRequest(step=step))


def kind_and_step(command: wire.Command) -> tuple[str, int]:
    kind = command.WhichOneof("kind") or ""
    return kind, getattr(command, kind).step


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def threads(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


class RecordingExecutor:
    """An executor with a fake engine, which records all that happens. A step begins at once and ends when the test lets it."""

    def __init__(self, peers: bool = True) -> None:
        self.entered: list[str] = []  # names of the threads that called `enter`
        self.waited: list[str] = []  # names of the threads that waited for the device
        self.begun: list[tuple[str, int]] = []
        self.relayed: list[tuple[str, int]] = []
        self.codes: list[int] = []
        self.peer_lost = False  # whether a peer is lost
        self.broken_at = 0
        self.routers: list[FakeRouter] = []
        self.overlaps = False  # whether steps are left in flight
        self.device = threading.Semaphore(0)  # released for each step that the device has finished
        self._underway: Callable[[], None] | None = None
        self._steps: queue.SimpleQueue[None] = queue.SimpleQueue()  # one entry for each step that may end
        self._free = threading.Event()
        self._free.set()
        self.executor = Executor(self, self._relay if peers else None, self.codes.append)

    def hold(self) -> None:
        """Makes steps wait for `let`."""
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
        kind, step = kind_and_step(command)
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
        if self.peer_lost:
            raise BrokenPipeError
        if message == LAND:
            self.relayed.append(("land", 0))
            return
        self.relayed.append(kind_and_step(wire.Command.FromString(message)))


class FakeRouter:
    """A router's stream: commands are sent, and replies taken, when the test says so."""

    def __init__(self, recording: RecordingExecutor) -> None:
        recording.routers.append(self)
        self._commands: queue.SimpleQueue[wire.Command | Exception | None] = queue.SimpleQueue()
        self._replies = recording.executor.stream(self._sent())
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
        """Lets commands be received, as gRPC does by requesting the first reply at once. `take` returns that reply later."""
        self._first = first = queue.SimpleQueue()
        threading.Thread(target=lambda: first.put(next(self._replies)), daemon=True).start()

    def end(self) -> None:
        self._commands.put(None)

    def cancel(self) -> None:
        """Cancels as gRPC does: the iterator of commands raises, and no replies are taken any more."""
        self._commands.put(grpc.RpcError())
        self._replies.close()  # type: ignore[attr-defined]


@pytest.fixture
def recording() -> Iterator[RecordingExecutor]:
    """Checks that no thread outlives its stream."""
    result = RecordingExecutor()
    yield result
    result.let_all()
    for router in result.routers:
        router.end()
    wait_until(lambda: not threads("receive"))


def test_next_commands_are_relayed_to_all_ranks_while_a_step_runs(recording: RecordingExecutor) -> None:
    recording.hold()
    router = FakeRouter(recording)
    router.send(decode(1), decode(2), decode(3))
    router.start()
    wait_until(lambda: len(recording.relayed) == 3 and recording.begun)
    assert recording.begun == [("decode", 1)]
    recording.let()
    wait_until(lambda: len(recording.begun) == 2)  # the second reply has not been requested
    recording.let_all()
    assert [router.take(), router.take(), router.take()] == [("step", 1), ("step", 2), ("step", 3)]
    router.end()
    wait_until(lambda: recording.begun[3:] == [("clear_cache", 4)])
    assert recording.relayed == recording.begun
    with pytest.raises(StopIteration):
        router.take()


def test_step_repeated_while_it_runs_is_executed_once(recording: RecordingExecutor) -> None:
    recording.hold()
    router, second_router = FakeRouter(recording), FakeRouter(recording)
    router.send(decode(1), decode(1))
    router.start()
    wait_until(lambda: recording.begun == [("decode", 1)])
    second_router.send(decode(1))
    second_router.start()
    recording.let_all()
    assert [router.take(), router.take(), second_router.take()] == [("step", 1)] * 3
    assert step_of(recording.executor.once(decode(1))) == 1
    assert recording.begun == recording.relayed == [("decode", 1)]


def step_of(reply: wire.Reply) -> int:
    return int(reply.step.step)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (decode(0), "a command needs a step, counted from 1"),
        (decode(1), "step 1 is older than the last one, 2"),
        (wire.Command(), "an empty command"),
    ],
)
def test_refused_command_ends_the_stream_after_the_replies_before_it(
    recording: RecordingExecutor, refused: wire.Command, message: str
) -> None:
    recording.hold()
    router = FakeRouter(recording)
    router.send(decode(1), decode(2), refused, decode(3))
    recording.let_all()
    assert [router.take(), router.take()] == [("step", 1), ("step", 2)]
    with pytest.raises(Refused, match=message):
        router.take()
    wait_until(lambda: len(recording.begun) == 3)
    assert recording.begun == recording.relayed == [("decode", 1), ("decode", 2), ("clear_cache", 3)]
    assert recording.codes == []


def test_commands_of_a_router_that_reads_no_replies_are_limited(recording: RecordingExecutor) -> None:
    router = FakeRouter(recording)
    router.send(*(decode(step) for step in range(1, 50)))
    assert router.take() == ("step", 1)  # the executor doesn't know yet that it arrived
    wait_until(lambda: len(recording.begun) == AHEAD)
    time.sleep(0.05)
    assert len(recording.begun) == len(recording.relayed) == AHEAD
    assert step_of(recording.executor.once(decode(100))) == 100  # other calls are executed
    router.cancel()
    wait_until(lambda: recording.begun[AHEAD + 1 :] == [("clear_cache", 101)])
    wait_until(lambda: not threads("receive"))


def test_groups_are_dropped_when_the_stream_is_cancelled_during_a_step(recording: RecordingExecutor) -> None:
    recording.hold()
    router = FakeRouter(recording)
    router.send(decode(5))
    recording.let()
    assert router.take() == ("step", 5)
    router.send(decode(6), decode(7))
    wait_until(lambda: len(recording.relayed) == 3)
    router.cancel()
    wait_until(lambda: len(recording.relayed) == 4)
    assert recording.begun == [("decode", 5), ("decode", 6)]
    recording.let_all()
    wait_until(lambda: recording.begun[2:] == [("decode", 7), ("clear_cache", 8)])  # step 7 had been relayed to the other ranks
    assert recording.relayed == recording.begun
    wait_until(lambda: not threads("receive"))


def test_empty_stream_drops_nothing(recording: RecordingExecutor) -> None:
    router = FakeRouter(recording)
    router.end()
    with pytest.raises(StopIteration):
        router.take()
    assert recording.begun == []


def test_router_replaced_by_another_is_refused_and_drops_nothing(recording: RecordingExecutor) -> None:
    recording.hold()
    old, new = FakeRouter(recording), FakeRouter(recording)
    old.send(clear(1), decode(2), decode(3))
    assert old.take() == ("clear_cache", 1)
    wait_until(lambda: len(recording.relayed) == 3)
    new.send(clear(1), decode(2), decode(3))
    new.start()
    wait_until(lambda: len(recording.relayed) == 6)
    old.send(decode(4))
    recording.let_all()
    assert [old.take(), old.take()] == [("step", 2), ("step", 3)]
    with pytest.raises(Superseded, match="another router has called ClearCache"):
        old.take()
    assert [new.take(), new.take(), new.take()] == [("clear_cache", 1), ("step", 2), ("step", 3)]
    new.send(decode(4))
    assert new.take() == ("step", 4)
    assert recording.begun == recording.relayed == [*[("clear_cache", 1), ("decode", 2), ("decode", 3)] * 2, ("decode", 4)]
    new.end()
    wait_until(lambda: recording.begun[7:] == [("clear_cache", 5)])


def test_nothing_is_executed_after_a_fault(recording: RecordingExecutor) -> None:
    recording.hold()
    recording.broken_at = 2
    router = FakeRouter(recording)
    router.send(decode(1), decode(2), decode(3))
    recording.let_all()
    assert router.take() == ("step", 1)
    with pytest.raises(Failed):
        router.take()
    with pytest.raises(Failed):
        recording.executor.once(decode(9))
    router.end()
    wait_until(lambda: not threads("receive"))
    assert recording.begun == [("decode", 1), ("decode", 2)]
    assert ("clear_cache", 4) not in recording.relayed
    assert recording.codes == [1]


def test_lost_rank_is_a_fault(recording: RecordingExecutor) -> None:
    router = FakeRouter(recording)
    router.send(decode(1))
    assert router.take() == ("step", 1)
    recording.peer_lost = True
    router.send(decode(2))
    with pytest.raises(Failed):
        router.take()
    assert recording.codes == [1]
    assert recording.begun == [("decode", 1)]


def test_executing_thread_sets_the_engines_device(recording: RecordingExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks other than the first would launch Triton's kernels on the first one's device."""
    recording.executor.once(decode(1))
    [thread] = recording.entered
    assert thread.startswith("steps")
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    engine = tiny.engine("llama")
    engine.enter()
    engine.device = torch.device("cuda", 1)
    engine.enter()
    assert chosen == [torch.device("cuda", 1)]


def test_thread_waiting_for_the_device_sets_the_engines_device(recording: RecordingExecutor) -> None:
    """Otherwise ranks other than the first would each take half a GB of the first one's device."""
    recording.overlaps = True
    execute_once(recording, decode(1))
    execute_once(recording, decode(2))
    [thread] = set(recording.waited)
    assert thread.startswith("device")
    assert sorted(name.partition("_")[0] for name in recording.entered) == ["device", "steps"]
    assert thread in recording.entered


def test_step_begins_while_the_device_works_on_the_previous_one(recording: RecordingExecutor) -> None:
    recording.overlaps = True
    router = FakeRouter(recording)
    router.send(decode(1), decode(2))
    router.start()
    wait_until(lambda: recording.relayed == [("decode", 1), ("decode", 2)])
    recording.device.release()
    assert router.take() == ("step", 1)
    wait_until(lambda: len(recording.begun) == 2)
    assert recording.relayed == [("decode", 1), ("decode", 2)]  # so the other ranks know that the second came in time
    recording.device.release()
    assert router.take() == ("step", 2)
    assert recording.relayed == [("decode", 1), ("decode", 2), ("land", 0)]  # and that no command came after it
    router.send(decode(3))
    recording.device.release()
    assert router.take() == ("step", 3)
    assert recording.relayed[3:] == [("decode", 3), ("land", 0)]


def test_nobody_waits_for_the_device_while_the_next_command_is_queued(recording: RecordingExecutor) -> None:
    recording.overlaps = True
    recording.hold()
    router = FakeRouter(recording)
    router.send(decode(1), decode(2))
    router.start()
    wait_until(lambda: recording.executor._count == 2)
    recording.let(2)
    for step in (1, 2):
        recording.device.release()
        assert router.take() == ("step", step)
    assert len(recording.waited) == 1


def test_step_in_flight_lands_before_a_command_of_another_kind(recording: RecordingExecutor) -> None:
    recording.overlaps = True
    router = FakeRouter(recording)
    router.send(decode(1), clear(2))
    router.start()
    recording.device.release()
    assert [router.take(), router.take()] == [("step", 1), ("clear_cache", 2)]
    assert step_of(execute_once(recording, decode(3))) == 3


def execute_once(recording: RecordingExecutor, command: wire.Command) -> wire.Reply:
    recording.device.release()
    return recording.executor.once(command)


@pytest.mark.parametrize("late", [False, True])
def test_fault_on_landing_fails_the_stream_and_ends_the_process(recording: RecordingExecutor, late: bool) -> None:
    """The step lands by itself (late), or with the next command."""
    recording.overlaps, recording.broken_at = True, 1
    router = FakeRouter(recording)
    router.send(decode(1), *(() if late else (decode(2),)))
    recording.device.release()
    with pytest.raises(Failed):
        router.take()
    router.end()
    wait_until(lambda: not threads("receive"))
    assert recording.codes == [1]


def test_all_threads_end_with_the_executor() -> None:
    others = threading.enumerate()
    recording = RecordingExecutor(peers=False)
    router = FakeRouter(recording)
    router.send(decode(1))
    assert router.take() == ("step", 1)
    new_threads = [thread for thread in threading.enumerate() if thread not in others]
    assert len(new_threads) == 2
    router.end()
    with pytest.raises(StopIteration):
        router.take()
    del router, recording  # and the executor with it
    wait_until(lambda: gc.collect() >= 0 and not any(thread.is_alive() for thread in new_threads))


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[InProcessShard]:
    process = InProcessShard(tmp_path / "socket")
    process.start()
    process.stub.Warmup(WARMUP, timeout=30)
    yield process
    process.close()


def commands(first: int) -> list[wire.Command]:
    """Two groups, the second of which arrives while the first decodes; a batch is joined, a group dropped."""
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


def test_commands_sent_ahead_get_the_same_replies_as_one_by_one(warm: InProcessShard) -> None:
    commands_sent: queue.SimpleQueue[wire.Command | None] = queue.SimpleQueue()
    replies = warm.stub.Steps(iter(commands_sent.get, None), timeout=60)
    one_by_one = []
    for command in [clear(1), *commands(2)]:
        commands_sent.put(command)
        one_by_one.append(without_time(next(replies)))
    commands_sent.put(None)
    ahead = [without_time(reply) for reply in warm.stub.Steps(iter([clear(1), *commands(2)]), timeout=60)]
    assert ahead == one_by_one
    assert sum(len(reply.step.tokens) for reply in ahead) == 1 + 2 + 2 + 4 * 2 + 10
    assert warm.codes == []


def test_groups_of_a_router_that_dies_during_a_step_are_dropped(warm: InProcessShard, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = warm.service.engine
    begun, proceed, original = threading.Event(), threading.Event(), engine.begin_decode

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert proceed.wait(SECONDS)
        return original(*arguments)

    monkeypatch.setattr(engine, "begin_decode", slow)
    commands_sent: queue.SimpleQueue[wire.Command | None] = queue.SimpleQueue()
    call = warm.stub.Steps(iter(commands_sent.get, None), timeout=60)
    commands_sent.put(wire.Command(prefill=prefill(1, 1, [1, 2, 3], 30)))
    next(call)
    for step in (2, 3):
        commands_sent.put(decode(step))
    assert begun.wait(SECONDS)
    call.cancel()
    commands_sent.put(None)
    wait_until(lambda: not threads("receive"))
    assert engine.books.batches  # the step is not over
    proceed.set()
    answer = warm.stub.ClearCache(wire.ClearCacheRequest(step=1), timeout=SECONDS)
    assert (answer.free, engine.books.batches) == (500, {})
    assert list(warm.stub.Prefill(prefill(2, 1, [1, 2, 3]), timeout=5).uids) == [1]
    assert warm.codes == []


def test_internal_error_ends_the_stream_with_status_internal(warm: InProcessShard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*rest: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(warm.service.engine, "begin_decode", broken)
    replies = warm.stub.Steps(iter([wire.Command(prefill=prefill(1, 1, [1, 2, 3])), decode(2), decode(3)]), timeout=10)
    assert list(next(replies).step.uids) == [1]
    with pytest.raises(grpc.RpcError, match="the shard failed and ends; its log says why") as error:
        next(replies)
    assert code_of(error) == grpc.StatusCode.INTERNAL
    assert warm.codes == [1]
