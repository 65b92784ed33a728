"""Two ranks as real processes: the same tokens as transformers, and clean ends."""

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from penstock.proto import rpc, settings
from penstock.proto import shard_pb2 as wire
from penstock.shard import __main__ as entry
from penstock.shard import parallel
from penstock.shard.config import ShardConfig
from penstock.shard.parallel import RendezvousFailed
from penstock.shard.relay import Receiver, Sender
from penstock.shard.sequence import Sampling
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Habits, Remote, drive
from penstock.tests.shard.test_oracle import COUNT, prompts, requests

SECONDS = 60  # to start
WARMUP = wire.WarmupRequest(max_step_tokens=256, max_step_rows=64, max_total_tokens=512)


class Ranks:
    """Two processes of one model, which leave their steps under way."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.processes = []
        for rank in range(2):
            config = ShardConfig(
                folder=str(tiny.folder(name)),
                model=name,
                rank=rank,
                ranks=2,
                overlap="on",
                page_size=4,
                kv_pages=1024,
                socket=str(folder / f"rank-{rank}"),
                relay=str(folder / "relay"),
                meeting=str(folder / "meeting"),
            )
            command = [sys.executable, "-m", "penstock.shard", settings.dump(config)]
            self.processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        self.channels = [grpc.insecure_channel(f"unix:{folder}/rank-{rank}") for rank in range(2)]

    def warm(self) -> list[wire.WarmupReply]:
        """Both have to be asked at once: they measure together."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(self._warm, self.channels))

    def _warm(self, channel: grpc.Channel) -> wire.WarmupReply:
        until = time.monotonic() + SECONDS
        while True:
            try:
                return rpc.Stub(channel).Warmup(WARMUP, timeout=SECONDS)  # type: ignore[no-any-return]
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def codes(self, seconds: float) -> list[int]:
        """Exit codes of both, which have to end within `seconds`."""
        return [process.wait(seconds) for process in self.processes]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for process in self.processes:
            process.kill()
            process.communicate(timeout=10)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    result = Ranks(request.param, tmp_path)
    try:
        yield result
    finally:
        result.close()


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "RENDEZVOUS_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timeout"):
        parallel.Ranks(0, 2, torch.device("cpu"), tmp_path / "meeting")
    assert time.monotonic() - began < 20


def test_ranks_meet_though_the_backend_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL, which returns at once."""
    monkeypatch.setattr(parallel.distributed, "init_process_group", lambda *given, **named: None)
    with ThreadPoolExecutor(2) as threads:
        assert len([*threads.map(lambda rank: parallel.Ranks(rank, 2, tiny.CPU, tmp_path / "both"), range(2))]) == 2
    monkeypatch.setattr(parallel, "RENDEZVOUS_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="timeout"):
        parallel.Ranks(0, 2, tiny.CPU, tmp_path / "one")


def test_no_rank_begins_before_all_have_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one begins it waits inside torch, which gives up after RENDEZVOUS_SECONDS."""
    monkeypatch.setattr(entry.gc, "freeze", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    listens, loaded = threading.Event(), threading.Event()
    begun, ended = queue.SimpleQueue[int](), queue.SimpleQueue[int]()
    links = list[Sender | Receiver]()

    def receiver(config: ShardConfig) -> Receiver:
        links.append(Receiver(config))
        return links[-1]  # type: ignore[return-value]

    def start(rank: int, relay: Sender) -> None:
        links.append(relay)
        begun.put(rank)

    def work(rank: int, load: Callable[..., Any]) -> threading.Thread:
        config = ShardConfig(folder="", model="m", rank=rank, ranks=2, relay=str(tmp_path / "relay"), token="of this group")
        service: Any = SimpleNamespace(stage="", start=lambda engine, relay: start(rank, relay), follow=print)
        thread = threading.Thread(target=entry._work, args=(config, service, load, ended.put), daemon=True)
        thread.start()
        return thread

    def load(config: ShardConfig, stage: Callable[[str], None]) -> None:
        listens.set()  # the socket's path is there a moment before
        loaded.wait(SECONDS)

    monkeypatch.setattr(entry, "Receiver", receiver)
    threads = [work(0, load)]
    assert listens.wait(SECONDS)
    threads.append(work(1, lambda config, stage: None))
    with pytest.raises(queue.Empty):
        begun.get(timeout=0.3)
    loaded.set()
    assert {begun.get(timeout=10) for _ in threads} == {0, 1}
    for link in reversed(links):
        link.close()
    for thread in threads:
        thread.join(10)
    assert ended.get(timeout=0) == 1  # rank 1 has lost rank 0


@pytest.mark.parametrize("ranks", ["demo"], indirect=True)
def test_two_processes_answer_on_a_stream_and_end_on_sigterm(ranks: Ranks) -> None:
    first, second = ranks.warm()
    assert (first.sample_tokens, second.sample_tokens) == (64, 64)
    first.sample_seconds = second.sample_seconds  # each has its own clock
    assert first == second
    assert (first.pages, first.page_size) == (1024, 4)
    asked = prompts(10)
    shard = Remote(ranks.channels[0], stream=True, pages=1024, page_size=4)
    world = drive(shard, requests(asked), Habits(chunk=16, pause=0.1))
    assert world.failed == {}
    assert world.answers == dict(enumerate(tiny.greedy("demo", asked, COUNT)))
    assert shard.clear() == 1024
    with pytest.raises(grpc.RpcError, match="rank 0"):
        Remote(ranks.channels[1], stream=False, pages=1024, page_size=4).decode([1])
    for process in ranks.processes:
        process.terminate()
    codes = ranks.codes(10)
    assert codes[0] == 0
    assert codes[1] in (0, 1)  # 1 when it learns of rank 0's end before its own signal
    assert list(ranks.folder.iterdir()) == []


@pytest.mark.parametrize("ranks", ["demo"], indirect=True)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads of another process are named by numbers of Linux")
def test_sigterm_is_heard_whichever_thread_takes_it(ranks: Ranks) -> None:
    """As that of a process that was stopped meanwhile: any of its threads may be the first that goes on."""
    ranks.warm()
    pid = ranks.processes[0].pid
    thread = next(int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)
    assert ctypes.CDLL(None).tgkill(pid, thread, signal.SIGTERM) == 0
    assert ranks.codes(10) == [0, 1]  # the other has lost rank 0


@pytest.mark.parametrize("ranks", ["one-key-llama"], indirect=True)
def test_a_rank_that_dies_ends_the_other(ranks: Ranks) -> None:
    ranks.warm()
    asked = prompts(10)
    shard = Remote(ranks.channels[0], stream=False, pages=1024, page_size=4)
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=11)
    world = drive(shard, requests(asked, sampling), Habits(chunk=7, pause=0.1, cancel=0.05), seed=3)
    alone = drive(tiny.engine("one-key-llama"), requests(asked, sampling), Habits()).answers
    assert all(tokens == alone[uid][: len(tokens)] for uid, tokens in world.answers.items())
    assert {uid for uid in alone if world.answers[uid] == alone[uid]} >= set(alone) - world.cancelled
    assert shard.clear() == 1024

    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    ranks.processes[1].wait(5)
    began = time.monotonic()
    with pytest.raises(grpc.RpcError, match="the shard failed"):
        drive(shard, requests(asked), Habits())
    assert ranks.codes(10) == [1, -signal.SIGKILL]
    assert time.monotonic() - began < 10
    assert list(ranks.folder.iterdir()) == [ranks.folder / "rank-1"]  # of the one that had no time to clean up


def test_a_port_that_another_has_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = f"127.0.0.1, port {port}: Address already in use"
        with pytest.raises(RendezvousFailed, match=expected):
            parallel.Ranks(0, 2, tiny.CPU, ("127.0.0.1", port))


# Whether the sum of seven rows begins with that of the first alone.
ADDING = """
import sys, torch
from pathlib import Path
from penstock.shard.parallel import Ranks
ranks = Ranks(int(sys.argv[1]), 3, torch.device("cpu"), Path(sys.argv[2]), invariant=sys.argv[3] == "invariant")
torch.manual_seed(ranks.rank)
x = torch.randn(7, 1000)
whole, first = ranks.all_reduce(x.clone()), ranks.all_reduce(x[:1].clone())
if not ranks.rank:
    print(whole[:1].equal(first))
"""


def test_sums_of_three_ranks_depend_on_no_neighbour(tmp_path: Path) -> None:
    """torch cuts what it adds up into as many parts as there are ranks, and adds up each in another order."""

    def found(how: str) -> str:
        commands = [[sys.executable, "-c", ADDING, str(rank), str(tmp_path / how), how] for rank in range(3)]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        told = [process.communicate(timeout=SECONDS)[0] for process in started]
        return told[0].strip()

    assert found("invariant") == "True"
    assert found("usual") == "False"
