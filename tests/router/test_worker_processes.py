"""Work in other processes, where these are killed, or can't be started."""

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
DEADLY = json.dumps(["lark", RULES, []]).encode()


@pytest.fixture
def workers() -> WorkerProcesses:
    return WorkerProcesses("penstock.router.grammar", 2)


def test_its_processes_end_with_it() -> None:
    async def run() -> None:
        found = WorkerProcesses("penstock.router.grammar", 2)
        assert await found.ask(JOB, 10)
        [process] = found._idle
        pid = process._process.pid
        del found, process
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(run())


def test_one_that_was_killed_costs_nothing(workers: WorkerProcesses) -> None:
    async def run() -> None:
        for _ in range(3):
            assert await workers.ask(JOB, 10)
            [process] = workers._idle
            os.kill(process._process.pid, signal.SIGKILL)

    asyncio.run(run())


def test_a_deadly_job_ends_no_more_than_two(workers: WorkerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = subprocess.Popen

    def counted(*arguments: Any, **settings: Any) -> Any:
        started.append(arguments)
        return start(*arguments, **settings)

    monkeypatch.setattr(subprocess, "Popen", counted)

    async def run() -> None:
        await asyncio.gather(workers.ask(JOB, 10), workers.ask(JOB, 10))
        with pytest.raises(Died):
            await workers.ask(DEADLY, 10)
        assert await workers.ask(JOB, 10)

    asyncio.run(run())
    assert len(started) == 3


def test_none_that_can_be_started_is_the_jobs_fault_never(workers: WorkerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*arguments: Any, **settings: Any) -> Any:
        raise OSError(24, "Too many open files")

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", no)
            with pytest.raises(Busy):
                await workers.start()
            with pytest.raises(Busy):
                await workers.ask(JOB, 10)
        await workers.start()
        assert await workers.ask(JOB, 10)

    asyncio.run(run())


def test_one_that_does_not_come_up_is_no_jobs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START", 0.2)
    asleep = WorkerProcesses("time", 1)  # a module that ends at once
    with pytest.raises(Busy):
        asyncio.run(asleep.start())


def test_who_waits_for_one_waits_so_long(workers: WorkerProcesses) -> None:
    async def run() -> None:
        await asyncio.gather(*(workers._free.acquire() for _ in range(2)))
        with pytest.raises(Busy):
            await workers.ask(JOB, 10, 0.05)
        workers._free.release()
        assert await workers.ask(JOB, 10, 0.05)

    asyncio.run(run())


def test_who_leaves_when_one_becomes_free_has_left(workers: WorkerProcesses) -> None:
    """However many turns of the event loop later, or sooner."""

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


def test_a_job_that_works_too_much_leaves_no_process(workers: WorkerProcesses) -> None:
    """A minute, by itself; half of these patterns took 0.45 s on a fast machine, which is within what it may."""
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


def test_those_that_died_while_idle_cost_no_job(workers: WorkerProcesses) -> None:
    """However many: none of them was killed by it."""

    async def run() -> None:
        await asyncio.gather(workers.ask(JOB, 10), workers.ask(JOB, 10))
        assert len(workers._idle) == 2
        for process in workers._idle:
            os.kill(process._process.pid, signal.SIGKILL)
            process._process.wait()
        assert await workers.ask(JOB, 10)

    asyncio.run(run())


def test_a_process_that_is_late_is_ended(workers: WorkerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_process_that_is_ended_before_its_answer_was_read_says_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is closed with an answer in it is an error to who reads from it: a traceback in the log."""
    kill = subprocess.Popen.kill

    def late(process: "subprocess.Popen[bytes]") -> None:
        time.sleep(0.3)
        kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", late)

    async def run() -> None:
        process = module._Process("penstock.router.grammar")
        await process.ready()
        process._socket.sendall(module.HEAD.pack(len(JOB)) + JOB)
        select.select([process._socket], [], [], 10)
        process.close()

    asyncio.run(run())
    assert capfd.readouterr().err == ""
