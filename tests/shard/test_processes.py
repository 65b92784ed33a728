"""Ranks as real processes: startup and rendezvous, transformers' tokens from two ranks, and exits by signals and lost ranks."""

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
from penstock.tests.shard.driver import Remote, Traffic, drive
from penstock.tests.shard.test_against_transformers import ANSWER_LENGTH, greedy_requests, prompts

SECONDS = 60  # timeout of a start
WARMUP = wire.WarmupRequest(max_step_tokens=256, max_step_rows=64, max_total_tokens=512)


class Ranks:
    """Two rank processes of one model, with overlapped steps."""

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
        """Calls Warmup on both at once: they measure together."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(self._warm, self.channels))

    def _warm(self, channel: grpc.Channel) -> wire.WarmupReply:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return rpc.Stub(channel).Warmup(WARMUP, timeout=SECONDS)  # type: ignore[no-any-return]
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def codes(self, seconds: float) -> list[int]:
        """The exit codes of both, which have to exit within `seconds`."""
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


def test_rendezvous_without_the_other_rank_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "RENDEZVOUS_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timeout"):
        parallel.Ranks(0, 2, torch.device("cpu"), tmp_path / "meeting")
    assert time.monotonic() - began < 20


def test_rendezvous_waits_for_all_ranks_even_if_the_backend_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like NCCL, whose init_process_group returns at once."""
    monkeypatch.setattr(parallel.distributed, "init_process_group", lambda *given, **named: None)
    with ThreadPoolExecutor(2) as threads:
        assert len([*threads.map(lambda rank: parallel.Ranks(rank, 2, tiny.CPU, tmp_path / "both"), range(2))]) == 2
    monkeypatch.setattr(parallel, "RENDEZVOUS_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="timeout"):
        parallel.Ranks(0, 2, tiny.CPU, tmp_path / "one")


@pytest.mark.parametrize(
    ("error", "traceback", "message"),
    [
        (torch.OutOfMemoryError("2 GiB"), False, "another process has taken the memory: 2 GiB"),
        (RuntimeError("odd"), True, "failed"),
    ],
)
def test_out_of_memory_while_loading_is_logged_in_one_line(
    error: Exception, traceback: bool, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(config: ShardConfig, stage: Callable[[str], None]) -> None:
        raise error

    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    codes: list[int] = []
    entry._work(ShardConfig(folder="", model="m"), SimpleNamespace(stage=""), load, codes.append)  # type: ignore[arg-type]
    assert codes == [1]
    [record] = [one for one in caplog.records if one.levelname == "ERROR"]
    assert (bool(record.exc_info), record.getMessage().endswith(message)) == (traceback, True)


def test_no_rank_begins_before_all_have_loaded_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that begins waits for the others inside torch, which gives up after RENDEZVOUS_SECONDS."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    listens, loaded = threading.Event(), threading.Event()
    begun, ended = queue.SimpleQueue[int](), queue.SimpleQueue[int]()
    relays = list[Sender | Receiver]()

    def receiver(config: ShardConfig) -> Receiver:
        relays.append(Receiver(config))
        return relays[-1]  # type: ignore[return-value]

    def start(rank: int, relay: Sender) -> None:
        relays.append(relay)
        begun.put(rank)

    def work(rank: int, load: Callable[..., Any]) -> threading.Thread:
        config = ShardConfig(folder="", model="m", rank=rank, ranks=2, relay=str(tmp_path / "relay"), token="of this group")
        service: Any = SimpleNamespace(stage="", start=lambda engine, relay, settle: start(rank, relay), follow=print)
        thread = threading.Thread(target=entry._work, args=(config, service, load, ended.put), daemon=True)
        thread.start()
        return thread

    def load(config: ShardConfig, stage: Callable[[str], None]) -> None:
        listens.set()  # rank 0's socket exists by now
        loaded.wait(SECONDS)

    monkeypatch.setattr(entry, "Receiver", receiver)
    threads = [work(0, load)]
    assert listens.wait(SECONDS)
    threads.append(work(1, lambda config, stage: None))
    with pytest.raises(queue.Empty):
        begun.get(timeout=0.3)
    loaded.set()
    assert {begun.get(timeout=10) for _ in threads} == {0, 1}
    for link in reversed(relays):
        link.close()
    for thread in threads:
        thread.join(10)
    assert ended.get(timeout=0) == 1  # rank 1 has lost rank 0


@pytest.mark.parametrize("ranks", ["demo"], indirect=True)
def test_two_processes_answer_on_a_stream_and_exit_on_sigterm(ranks: Ranks) -> None:
    first, second = ranks.warm()
    assert (first.sample_tokens, second.sample_tokens) == (64, 64)
    first.sample_seconds = second.sample_seconds  # each has its own clock
    assert first == second
    assert (first.pages, first.page_size) == (1024, 4)
    token_lists = prompts(10)
    shard = Remote(ranks.channels[0], stream=True, pages=1024, page_size=4)
    results = drive(shard, greedy_requests(token_lists), Traffic(chunk=16, pause=0.1))
    assert results.failed == {}
    assert results.answers == dict(enumerate(tiny.greedy("demo", token_lists, ANSWER_LENGTH)))
    assert shard.clear() == 1024
    with pytest.raises(grpc.RpcError, match="rank 0"):
        Remote(ranks.channels[1], stream=False, pages=1024, page_size=4).decode([1])
    for process in ranks.processes:
        process.terminate()
    codes = ranks.codes(10)
    assert codes[0] == 0
    assert codes[1] in (0, 1)  # 1 if it learns of rank 0's exit before its own signal
    assert list(ranks.folder.iterdir()) == []


@pytest.mark.parametrize("ranks", ["demo"], indirect=True)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads of another process are named by numbers of Linux")
def test_sigterm_is_handled_whichever_thread_receives_it(ranks: Ranks) -> None:
    """As in a process that was stopped (SIGSTOP) meanwhile: any of its threads may be the first to continue."""
    ranks.warm()
    pid = ranks.processes[0].pid
    thread = next(int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid)
    assert ctypes.CDLL(None).tgkill(pid, thread, signal.SIGTERM) == 0
    assert ranks.codes(10) == [0, 1]  # rank 1 has lost rank 0


@pytest.mark.parametrize("ranks", ["one-key-llama"], indirect=True)
def test_killed_rank_ends_the_other(ranks: Ranks) -> None:
    ranks.warm()
    token_lists = prompts(10)
    shard = Remote(ranks.channels[0], stream=False, pages=1024, page_size=4)
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=11)
    results = drive(shard, greedy_requests(token_lists, sampling), Traffic(chunk=7, pause=0.1, cancel=0.05), seed=3)
    alone = drive(tiny.engine("one-key-llama"), greedy_requests(token_lists, sampling), Traffic()).answers
    assert all(tokens == alone[uid][: len(tokens)] for uid, tokens in results.answers.items())
    assert {uid for uid in alone if results.answers[uid] == alone[uid]} >= set(alone) - results.cancelled
    assert shard.clear() == 1024

    os.kill(ranks.processes[1].pid, signal.SIGKILL)
    ranks.processes[1].wait(5)
    began = time.monotonic()
    with pytest.raises(grpc.RpcError, match="the shard failed"):
        drive(shard, greedy_requests(token_lists), Traffic())
    assert ranks.codes(10) == [1, -signal.SIGKILL]
    assert time.monotonic() - began < 10
    assert list(ranks.folder.iterdir()) == [ranks.folder / "rank-1"]  # the killed rank could not clean up


def test_rendezvous_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        expected = f"127.0.0.1, port {port}: Address already in use"
        with pytest.raises(RendezvousFailed, match=expected):
            parallel.Ranks(0, 2, tiny.CPU, ("127.0.0.1", port))


def test_rendezvous_at_an_unknown_name_is_reported() -> None:
    with pytest.raises(RendezvousFailed, match=r"can't meet at nowhere\.invalid, port 1: (?!Unknown error)\w.*$"):
        parallel.Ranks(0, 2, tiny.CPU, ("nowhere.invalid", 1))


def test_relay_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        config = ShardConfig(
            folder="", model="", ranks=2, local_ranks=1, relay_address=place, socket=str(tmp_path / "rank-0"), meeting=""
        )
        command = [sys.executable, "-m", "penstock.shard", settings.dump(config)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"can't listen for the other ranks at {place}: Address already in use" in ended.stdout
    assert "Traceback" not in ended.stdout


# Prints whether the all-reduced sum of seven rows begins with that of the first row alone.
ALL_REDUCE_SCRIPT = """
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


def test_invariant_all_reduce_of_a_row_does_not_depend_on_other_rows(tmp_path: Path) -> None:
    """torch cuts a tensor into as many parts as there are ranks, and sums each in another order of ranks."""

    def all_reduce_is_invariant(mode: str) -> str:
        commands = [[sys.executable, "-c", ALL_REDUCE_SCRIPT, str(rank), str(tmp_path / mode), mode] for rank in range(3)]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
        return outputs[0].strip()

    assert all_reduce_is_invariant("invariant") == "True"
    assert all_reduce_is_invariant("usual") == "False"
