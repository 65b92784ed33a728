"""Many more connections than a server takes requests: is every one answered, and what does the router's memory do meanwhile?

    make bench WHAT=overload FLAGS='--connections 10000'

All connect first, and ask for a stream at once when all are there. Those beyond --max-concurrent-requests are to be answered 429
with Retry-After. Linux only: memory is /proc's.
"""

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.flags import checked, count
from penstock.bench.local_server import HOST, LocalServer

CONNECTING = 256  # connections that are being made at a time
SPARE = 200  # open files that a process needs beside its connections
PATIENCE = 300.0  # seconds for all
MIB = 2**20


@dataclass
class Crowd:
    """Results of all connections."""

    answers: Counter[str] = field(default_factory=Counter)  # by status, or by what went wrong
    endless: int = 0  # 429 without Retry-After
    unfinished: int = 0  # 200, and then cut
    seconds: float = 0.0  # from the common start of all requests until all have their answers
    memory: dict[str, int] = field(default_factory=dict)  # of the router, by when

    @property
    def growth(self) -> int:
        """The most bytes that the router's memory grew by."""
        return self.memory["peak"] - self.memory["before"]


async def gather(server: LocalServer, connections: int, tokens: int) -> Crowd:
    """Makes that many connections, each of which requests a stream."""
    crowd, gate, connecting = Crowd(), asyncio.Event(), asyncio.Semaphore(CONNECTING)
    arrived = asyncio.Semaphore(0)
    crowd.memory["before"] = server.held()["router"].memory
    body = json.dumps({"inputs": "Once upon a time", "parameters": {"max_new_tokens": tokens}}).encode()
    head = f"POST /generate_stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    asked = f"{head}Connection: close\r\n\r\n".encode() + body

    async def visit() -> None:
        try:
            async with connecting:
                reader, writer = await asyncio.open_connection(HOST, server.port, limit=2048)
        except OSError as error:
            crowd.answers[f"no connection: {error.strerror}"] += 1
            arrived.release()
            return
        arrived.release()
        await gate.wait()
        try:
            writer.write(asked)
            await _receive(reader, crowd)
        except (OSError, asyncio.IncompleteReadError) as error:
            crowd.answers[f"cut: {type(error).__name__}"] += 1
        finally:
            writer.close()

    async with asyncio.timeout(PATIENCE):
        visitors = [asyncio.create_task(visit()) for _ in range(connections)]
        for _ in visitors:
            await arrived.acquire()
        crowd.memory["connected"] = server.held()["router"].memory
        began = time.perf_counter()
        gate.set()
        await asyncio.gather(*visitors)
        crowd.seconds = time.perf_counter() - began
    await asyncio.sleep(1)  # until the router has seen that all have left
    router = server.held()["router"]
    crowd.memory |= {"peak": router.peak, "afterwards": router.memory}
    return crowd


async def _receive(reader: asyncio.StreamReader, crowd: Crowd) -> None:
    answer = (await reader.readuntil(b"\r\n\r\n")).decode()
    status = answer.split()[1]
    last = b""
    while chunk := await reader.read(65536):
        last = (last + chunk)[-5:]
    crowd.answers[status] += 1
    crowd.endless += status == "429" and "\nretry-after:" not in answer.lower()
    crowd.unfinished += status == "200" and last != b"0\r\n\r\n"


def raised(wanted: int) -> int:
    """How many connections a process here may have, at most `wanted`, once its limit is raised as far as possible."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard - SPARE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=checked(count), default=10_000)
    parser.add_argument("--tokens", type=checked(count), default=20, help="of each answer")
    parser.add_argument("--max-concurrent-requests", default="128", help="the server's limit")
    options = parser.parse_args()
    connections = raised(options.connections)
    if connections < options.connections:
        print(f"{connections} connections, not {options.connections}: ulimit -Hn allows no more open files")
    flags = ["--max-concurrent-requests", options.max_concurrent_requests, "--device", "cpu"]
    with tempfile.TemporaryDirectory() as folder, LocalServer(flags, Path(folder) / "log") as server:
        crowd = asyncio.run(gather(server, connections, options.tokens))
        code = server.stop()
    print(f"{connections} connections, {options.max_concurrent_requests} requests at once, answered within {crowd.seconds:.1f} s:")
    for status, answers in sorted(crowd.answers.items()):
        print(f"  {answers:6} {status}")
    print(f"429 without Retry-After: {crowd.endless}; 200 and then cut: {crowd.unfinished}; exit code: {code}")
    print("the router's memory: " + ", ".join(f"{size / MIB:.0f} MiB {when}" for when, size in crowd.memory.items()))
    print(f"  at most {crowd.growth / MIB:.0f} MiB more than at first, {crowd.growth / connections / 1024:.1f} KiB per connection")


if __name__ == "__main__":
    main()
