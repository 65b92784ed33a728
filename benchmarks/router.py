"""What the router costs per streamed token, everything included: HTTP, events, JSON, text, scheduling, gRPC.

    python benchmarks/router.py                     a minute
    python benchmarks/router.py --cases chat --rounds 1

A real router process, and a shard process that computes nothing and answers every command at once, with real tokens of the demo
model's tokenizer; both with the environment that the launcher gives them. Streams are read by bare sockets, which cost little,
since cores are few. Tokens per CPU-second are those of the router's process, all its threads, from the first request to the last
byte. Cases:

    chat, completions, generate   64 streams of each route, one event per token
    slow                          64 chats of 2,000 tokens, whose readers are slower than these: events wait, and leave together
    many                          1,024 chats
    request                       64 chats of one token each: what its request costs, a step shared by a few
    step                          one chat: what a step costs, with its token

In the same run bare `socket.send` of the same bytes, 64 sockets in turns, says how much of that is the kernel's. What a token costs
is told in such sends, too, so that machines can be compared: the goals are of one where a send takes 9.5 us.
"""

import argparse
import json
import os
import resource
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import tokenizers

from penstock.bench.flags import checked, count
from penstock.launcher import children
from penstock.launcher.hub import DEMO_FOLDER
from penstock.launcher.machine import free_port
from penstock.proto import rpc, settings
from penstock.proto import shard_pb2 as wire
from penstock.proto.process import die_with_parent
from penstock.router.config import RouterConfig

TEXT = "Once upon a time there was a little girl who lived by the sea. Every morning she went down to the water. "
PAGE = 16
GOALS = {"chat": 60_000.0, "slow": 120_000.0}  # tokens per CPU-second, on a machine that ...
SEND = 9.5e-6  # ... needs so many seconds for a bare send
MANY_GOAL = 0.7  # of the same at 64 streams
READ = 65536  # bytes
EVENT = b"ee\r\ndata: {" + b"-" * 228 + b"}\n\n\r\n"  # as long as an event of a chat, with HTTP's chunk framing
SLOW_BUFFER, SLOW_READ, SLOW_PAUSE = 4096, 4096, 0.08  # bytes, bytes and seconds: 220 events a second for each stream


@dataclass(frozen=True)
class Case:
    """A workload: streams that run at once."""

    path: str
    streams: int
    slow: bool = False
    tokens: int = 0  # of each answer, overrides --new

    def body(self, new: int) -> bytes:
        """Body of a request for `new` tokens."""
        if self.path == "/generate_stream":
            return json.dumps({"inputs": TEXT, "parameters": {"max_new_tokens": new}}).encode()
        asked: dict[str, Any] = {"prompt": TEXT}
        if "chat" in self.path:
            asked = {"messages": [{"role": "user", "content": TEXT}]}
        return json.dumps(
            {"model": "null", "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True, **asked}
        ).encode()


CASES = {
    "chat": Case("/v1/chat/completions", 64),
    "completions": Case("/v1/completions", 64),
    "generate": Case("/generate_stream", 64),
    "slow": Case("/v1/chat/completions", 64, slow=True, tokens=2000),  # so that readers lag behind for most of an answer
    "many": Case("/v1/chat/completions", 1024),
    "request": Case("/v1/chat/completions", 64, tokens=1),
    "step": Case("/v1/chat/completions", 1),
}


class NullShard:
    """A stub of the Shard service: every group gets a token in every step. Pages are plentiful, and only counted."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._left: dict[int, int] = {}  # tokens left of each running group
        self._lengths: dict[int, int] = {}

    def Info(self, request: wire.InfoRequest, context: grpc.ServicerContext) -> wire.InfoReply:  # noqa: N802
        """See shard.proto."""
        return wire.InfoReply(
            ranks=1, model="null", dtype="none", device="none", page_size=PAGE, vocabulary=1 << 17, max_positions=8192, loaded=True
        )

    def Health(self, request: wire.HealthRequest, context: grpc.ServicerContext) -> wire.HealthReply:  # noqa: N802
        """See shard.proto."""
        return wire.HealthReply()

    def Warmup(self, request: wire.WarmupRequest, context: grpc.ServicerContext) -> wire.WarmupReply:  # noqa: N802
        """See shard.proto."""
        return wire.WarmupReply(pages=1 << 20, page_size=PAGE, sample_tokens=4096, sample_seconds=1e-3)

    def Steps(self, commands: Iterator[wire.Command], context: grpc.ServicerContext) -> Iterator[wire.Reply]:  # noqa: N802
        """See shard.proto."""
        for command in commands:
            kind = command.WhichOneof("kind")
            request = getattr(command, kind or "")
            if kind == "prefill":
                yield self._step(request.step, request.groups, bool(request.decode_batches))
            elif kind == "decode":
                yield self._step(request.step, (), True)
            elif kind == "filter":
                for uid in request.drop:
                    self._left.pop(uid, None)
                yield wire.Reply(filter=wire.FilterReply(step=request.step, free=1 << 20))
            else:
                yield wire.Reply(clear_cache=wire.ClearCacheReply(step=request.step, free=1 << 20))

    def __getattr__(self, name: str) -> Any:
        """Unary calls, which the router does not make."""
        return lambda request, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, name)

    def _step(self, step: int, groups: Iterable[wire.Group], decode: bool) -> wire.Reply:
        rows = list(self._left) if decode else []
        for group in groups:
            self._left[group.uid] = group.max_new_tokens
            self._lengths[group.uid] = len(group.tokens)
            rows.append(group.uid)
        token, finishes, standing = self._tokens[step % len(self._tokens)], [], []
        for uid in rows:
            left = self._left[uid] = self._left[uid] - 1
            finishes.append(0 if left else 2)
            length = self._lengths[uid] = self._lengths[uid] + 1
            if not left:
                del self._left[uid], self._lengths[uid]
            elif length % PAGE == 0 or not decode:
                standing.append((uid, -(-length // PAGE)))
        reply = wire.StepReply(
            step=step,
            uids=rows,
            choices=[0] * len(rows),
            tokens=[token] * len(rows),
            logprobs=[-0.5] * len(rows),
            finishes=finishes,
            held_uids=[uid for uid, _ in standing],
            held=[held for _, held in standing],
            grow=[1] * len(standing),
            lacking=[0] * len(standing),
            free=1 << 19,
            seconds=1e-4,
            decode_tokens=len(rows),
        )
        return wire.Reply(step=reply)


def shard(path: str) -> None:
    """Runs this process as the shard, on that socket."""
    die_with_parent()
    tokens = tokenizers.Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    server = grpc.server(ThreadPoolExecutor(2), handlers=[rpc.handler(NullShard(tokens))], options=rpc.OPTIONS)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    signal.sigwait([signal.SIGTERM])
    os._exit(0)


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The router's process and its port, ready."""
    port = free_port()
    config = RouterConfig(
        folder=str(DEMO_FOLDER),
        model="null",
        groups=((f"{folder}/shard",),),
        hostname="127.0.0.1",
        port=port,
        max_concurrent_requests=2048,
        max_total_tokens=8192,
    )
    environment = children.environment(os.environ, 1)
    shard_process = subprocess.Popen([sys.executable, __file__, "--shard", config.groups[0][0]], env=environment)
    router = subprocess.Popen([sys.executable, "-P", "-m", "penstock.router", settings.dump(config)], env=environment)
    try:
        while not _healthy(port):
            if router.poll() is not None or shard_process.poll() is not None:
                raise SystemExit("the router or the shard has ended; what it wrote is above")
            time.sleep(0.05)
        yield router, port
    finally:
        for process in (router, shard_process):
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def cpu_of(pid: int) -> float:
    """CPU seconds of all its living threads, to the nanosecond."""
    paths = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


class Stream:
    """One request on a socket of its own, and how many events have come."""

    def __init__(self, port: int, request: bytes, slow: bool) -> None:
        self.socket = socket.socket()
        if slow:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(request)
        self.socket.setblocking(False)
        self.events = 0
        self.ended = False
        self._tail = b""
        self.head = b""

    def read(self, most: int) -> None:
        """Reads whatever is there."""
        try:
            data = self.socket.recv(most)
        except BlockingIOError:
            return
        if not self.head:
            self.head = data[:512]
        whole = self._tail + data
        self.events += whole.count(b"data: {")
        self._tail = whole[-6:]  # shorter than a whole mark
        if not data or whole.endswith(b"\r\n0\r\n\r\n"):
            self.ended = True
            self.socket.close()


def drain(streams: list[Stream], slow: bool) -> None:
    """Reads all streams to their ends."""
    if slow:
        while left := [stream for stream in streams if not stream.ended]:
            for stream in left:
                stream.read(SLOW_READ)
            time.sleep(SLOW_PAUSE)
        return
    poll, by_number = select.epoll(), {}
    for stream in streams:
        poll.register(stream.socket, select.EPOLLIN)
        by_number[stream.socket.fileno()] = stream
    running = len(streams)
    while running:
        for number, _ in poll.poll():
            stream = by_number[number]
            stream.read(READ)
            running -= stream.ended
    poll.close()


def measure(case: Case, pid: int, port: int, new: int) -> float:
    """Tokens per CPU-second of the process."""
    new = case.tokens or new
    body = case.body(new)
    head = f"POST {case.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    used = cpu_of(pid)
    streams = [Stream(port, head.encode() + body, case.slow) for _ in range(case.streams)]
    drain(streams, case.slow)
    used = cpu_of(pid) - used
    for stream in streams:
        if not new <= stream.events <= new + 2:  # the role, and the finish reason, may have events of their own
            raise SystemExit(f"{stream.events} events for {new} tokens came: {stream.head.decode(errors='replace')}")
    return case.streams * new / used


def send(streams: int, new: int) -> None:
    """Runs this process as a bare sender: an event to each of `streams` sockets in turns. Prints its port, then its CPU seconds."""
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as listening:
        print(listening.getsockname()[1], flush=True)
        sockets = [listening.accept()[0] for _ in range(streams)]
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.recv(1)  # unread data would reset the connection at its end
    began = time.thread_time()
    for _ in range(new):
        for each in sockets:
            each.send(EVENT)
    print(time.thread_time() - began, flush=True)
    for each in sockets:
        each.close()


def bare(streams: int, new: int) -> float:
    """Events per CPU-second of a process that only sends."""
    sender = subprocess.Popen([sys.executable, __file__, "--send", f"{streams},{new}"], stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    port = int(sender.stdout.readline())
    drain([Stream(port, b"x", False) for _ in range(streams)], False)
    used = float(sender.stdout.readline())
    sender.wait(30)
    return streams * new / used


def report(speeds: dict[str, list[float]]) -> bool:
    """Prints a table. Returns whether the goals are met."""
    found = {name: statistics.median(values) for name, values in speeds.items()}
    floor = found.pop("bare")
    print(f"{'':13}{'streams':>8}{'tokens / CPU s':>16}{'us / token':>12}{'in bare sends':>15}")
    for name, speed in {"bare": floor, **found}.items():
        streams = CASES[name].streams if name in CASES else CASES["chat"].streams
        print(f"{name:13}{streams:8}{speed:16,.0f}{1e6 / speed:12.1f}{floor / speed:15.2f}")
    goals = {name: goal for name, goal in GOALS.items() if name in found}
    sends = {name: f", or {1 / goal / SEND:.2f} bare sends a token: {floor / found[name]:.2f}" for name, goal in goals.items()}
    if {"chat", "many"} <= set(found):
        goals["many"] = MANY_GOAL * found["chat"]
    for name, goal in goals.items():
        met = "met" if found[name] >= goal else "MISSED"
        print(f"goal {name}: {goal:,.0f} tokens a CPU-second: {found[name]:,.0f}, {met}{sends.get(name, '')}")
    return all(found[name] >= goal for name, goal in goals.items())


def main() -> None:
    """See the module. Exit code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--new", type=checked(count), default=400, help="tokens of each answer (default 400)")
    parser.add_argument("--rounds", type=checked(count), default=3, help="medians count (default 3)")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    parser.add_argument("--shard", help=argparse.SUPPRESS)  # this process is the shard, on that socket
    parser.add_argument("--send", help=argparse.SUPPRESS)  # this process only sends: streams, events
    asked = parser.parse_args()
    if asked.shard:
        shard(asked.shard)
    if asked.send:
        send(*map(int, asked.send.split(",")))
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the router inherits it
    speeds: dict[str, list[float]] = {name: [] for name in ("bare", *asked.cases.split(","))}
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as (router, port):
        measure(CASES["chat"], router.pid, port, asked.new)  # warm-up
        for _ in range(asked.rounds):
            for name, values in speeds.items():
                one = (
                    bare(CASES["chat"].streams, asked.new) if name == "bare" else measure(CASES[name], router.pid, port, asked.new)
                )
                values.append(one)
    met = report(speeds)
    if asked.json:
        asked.json.write_text(json.dumps(speeds, indent=2))
    sys.exit(not met)


if __name__ == "__main__":
    main()
