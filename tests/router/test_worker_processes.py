"""`WorkerProcesses`: jobs in worker processes that are killed, crash, time out, or can't be started."""

import asyncio
import json
import os
import select
import signal
import subprocess
import time
from typing import Any

import pytest

from penstock.router import worker_processes as module
from penstock.router.grammar import lark
from penstock.router.worker_processes import Busy, Died, TimedOut, WorkerProcesses

JOB = b'["regex", "a", []]'
# More rules in a row than llguidance's stack has room for.
RULES = "start: r0\n" + "\n".join(f"r{depth}: r{depth + 1}" for depth in range(3000)) + '\nr3000: "a"'
CRASHING_JOB = json.dumps(["lark", RULES, []]).encode()


@pytest.fixture
def workers() -> WorkerProcesses:
    return WorkerProcesses("penstock.router.grammar", 2)


def test_worker_processes_end_when_the_pool_is_deleted() -> None:
    async def run() -> None:
        workers = WorkerProcesses("penstock.router.grammar", 2)
        assert await workers.ask(JOB, 10)
        [process] = workers._idle
        pid = process._process.pid
        del workers, process
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(run())


def test_killed_idle_worker_is_replaced(workers: WorkerProcesses) -> None:
    async def run() -> None:
        for _ in range(3):
            assert await workers.ask(JOB, 10)
            [process] = workers._idle
            os.kill(process._process.pid, signal.SIGKILL)

    asyncio.run(run())


def test_job_that_crashes_workers_is_tried_on_no_more_than_two(workers: WorkerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = subprocess.Popen

    def counting_start(*arguments: Any, **settings: Any) -> Any:
        started.append(arguments)
        return start(*arguments, **settings)

    monkeypatch.setattr(subprocess, "Popen", counting_start)

    async def run() -> None:
        await asyncio.gather(workers.ask(JOB, 10), workers.ask(JOB, 10))
        with pytest.raises(Died):
            await workers.ask(CRASHING_JOB, 10)
        assert await workers.ask(JOB, 10)

    asyncio.run(run())
    assert len(started) == 3


def test_failure_to_start_a_worker_raises_busy_and_can_be_retried(
    workers: WorkerProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_start(*arguments: Any, **settings: Any) -> Any:
        raise OSError(24, "Too many open files")

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", failing_start)
            with pytest.raises(Busy):
                await workers.start()
            with pytest.raises(Busy):
                await workers.ask(JOB, 10)
        await workers.start()
        assert await workers.ask(JOB, 10)

    asyncio.run(run())


def test_worker_that_does_not_become_ready_raises_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START", 0.2)
    workers = WorkerProcesses("time", 1)  # a module that ends at once
    with pytest.raises(Busy):
        asyncio.run(workers.start())


def test_waiting_for_a_free_worker_times_out_as_busy(workers: WorkerProcesses) -> None:
    async def run() -> None:
        await asyncio.gather(*(workers._free.acquire() for _ in range(2)))
        with pytest.raises(Busy):
            await workers.ask(JOB, 10, 0.05)
        workers._free.release()
        assert await workers.ask(JOB, 10, 0.05)

    asyncio.run(run())


def test_job_cancelled_when_a_worker_becomes_free_releases_it(workers: WorkerProcesses) -> None:
    """Whether it is cancelled zero or several turns of the event loop after the worker became free."""

    async def run() -> None:
        await asyncio.gather(*(workers._free.acquire() for _ in range(2)))
        for turns in range(6):
            task = asyncio.create_task(workers.ask(JOB, 10, 5.0))
            await asyncio.sleep(0.01)
            workers._free.release()
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), turns
            async with asyncio.timeout(1):
                await workers._free.acquire()

    asyncio.run(run())


def test_worker_ends_after_a_job_beyond_its_cpu_limit(workers: WorkerProcesses) -> None:
    """This grammar would take a minute; with half of these patterns it took 0.45 s on a fast machine, which is within the limit."""
    source = lark("start: A\\nA: " + " & ".join(f"/(.*a.{{{9 + n}}}b.*)/" for n in range(24))).source
    job = ('["lark", ' + '"' + source + '"' + ", []]").encode()

    async def run() -> None:
        assert await workers.ask(job, 30)
        [process] = workers._idle
        for _ in range(500):
            if not process.alive:
                break
            await asyncio.sleep(0.02)
        assert not process.alive
        assert await workers.ask(JOB, 10)

    asyncio.run(run())


def test_job_succeeds_after_all_idle_workers_died(workers: WorkerProcesses) -> None:
    """However many died: the job did not kill them."""

    async def run() -> None:
        await asyncio.gather(workers.ask(JOB, 10), workers.ask(JOB, 10))
        assert len(workers._idle) == 2
        for process in workers._idle:
            os.kill(process._process.pid, signal.SIGKILL)
            process._process.wait()
        assert await workers.ask(JOB, 10)

    asyncio.run(run())


def test_worker_that_exceeds_the_timeout_is_ended(workers: WorkerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*arguments: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def run() -> None:
        await asyncio.gather(workers.start(), workers.start())
        [process] = workers._idle
        monkeypatch.setattr(type(process), "ask", never)
        with pytest.raises(TimedOut):
            await workers.ask(JOB, 0.05)
        assert not workers._idle
        for _ in range(500):
            if not process.alive:
                break
            await asyncio.sleep(0.02)
        assert not process.alive

    asyncio.run(run())


def test_worker_closed_before_its_answer_is_read_writes_nothing_to_stderr(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a socket with an unread answer is an error for its reader, which would log a traceback."""
    kill = subprocess.Popen.kill

    def delayed_kill(process: "subprocess.Popen[bytes]") -> None:
        time.sleep(0.3)
        kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", delayed_kill)

    async def run() -> None:
        process = module._Process("penstock.router.grammar")
        await process.ready()
        process._socket.sendall(module.HEAD.pack(len(JOB)) + JOB)
        select.select([process._socket], [], [], 10)
        process.close()

    asyncio.run(run())
    assert capfd.readouterr().err == ""
