"""Tensor-parallel process group: all-reduce, gather and broadcast among the ranks, and look-ups in tables that they share. Knows
torch.distributed, no model.

With one rank everything here does nothing, and torch.distributed is not started.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.nn import functional

from ..proto.link import reason

log = logging.getLogger(__name__)

RENDEZVOUS_SECONDS = 120
# How long NCCL waits for a rank, which may be compiling what others don't need. A hang in a step is ended by the router long
# before.
ANSWER_SECONDS = 900
SLOW_SECONDS = 60  # after which the operator is told that NCCL has not connected the ranks
SLOW = (
    f"NCCL has not connected the ranks within {SLOW_SECONDS} s: NCCL_DEBUG=INFO says what it does; NCCL_P2P_DISABLE=1 helps where "
    "GPUs can't reach each other although they report that they can"
)

Meeting = Path | tuple[str, int]  # a file that does not exist yet, for ranks of one machine; else an address and a port


class RendezvousFailed(Exception):
    """The ranks can't meet where they should. Its text is for the operator."""


class Ranks:
    """One rank's view of its group. NCCL on CUDA, Gloo on CPU."""

    def __init__(
        self, rank: int, size: int, device: torch.device, meeting: Meeting = Path(), neighbours: int = 0, invariant: bool = False
    ) -> None:
        """meeting: rendezvous of several ranks; neighbours: ranks on this machine, this one included; 0: all; invariant: sums are
        made in a fixed order, whatever else is in the batch."""
        self.rank = rank
        self.size = size
        self.neighbours = neighbours or size
        self._device = device
        self._invariant = invariant and size > 2  # two have only one order
        if size > 1:
            timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = _store(rank, size, meeting, timeout)
            answer = timedelta(seconds=ANSWER_SECONDS) if backend == "nccl" else timeout  # Gloo's rendezvous uses it, too
            distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=answer)
            store.set(f"here {rank}", "")
            store.wait([f"here {other}" for other in range(size)], timeout)
            if backend == "nccl":
                self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Has NCCL connect the ranks, as it does at the first collective: before the weights are read, so that what keeps it from
        it is seen early, and while no rank is late: torch looks for the others' address for `RENDEZVOUS_SECONDS` only.

        Not by init_process_group's `device_id`, which lets NCCL connect beside us; it has hung then (pytorch issue 153960).
        """
        began = time.perf_counter()
        with _told_if_slow():
            distributed.all_reduce(torch.zeros(1, dtype=torch.int64, device=device))
            torch.cuda.synchronize(device)
        log.info(f"NCCL connected {self.size} ranks in {time.perf_counter() - began:.1f} s")

    def all_reduce(self, x: Tensor) -> Tensor:
        """x, overwritten by the sum of all ranks' x."""
        if self._invariant:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            distributed.all_gather(parts, x.contiguous())
            x.copy_(parts[0])
            for part in parts[1:]:
                x.add_(part)
        elif self.size > 1:
            distributed.all_reduce(x)
        return x

    def look_up(self, table: Tensor, rows: Tensor) -> Tensor:
        """These rows of a table, [*rows.shape, features], of which each rank has as many, one rank's after another's."""
        if self.size == 1:
            return functional.embedding(rows, table)
        own = rows - self.rank * len(table)
        elsewhere = (own < 0) | (own >= len(table))
        found = functional.embedding(own.masked_fill(elsewhere, 0), table)
        return self.all_reduce(found.masked_fill_(elsewhere.unsqueeze(-1), 0))

    def gather(self, x: Tensor) -> Tensor | None:
        """On rank 0: all ranks' x [rows, n] side by side, [rows, size * n]. Elsewhere: None."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        distributed.gather(x.contiguous(), parts, dst=0)
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, written over the other ranks' x of the same shape."""
        if self.size > 1:
            distributed.broadcast(x, src=0)
        return x

    def minimum(self, value: int) -> int:
        """The smallest of all ranks' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN)
        return int(tensor.item())


@contextmanager
def _told_if_slow() -> Iterator[None]:
    timer = threading.Timer(SLOW_SECONDS, log.warning, [SLOW])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _store(rank: int, size: int, meeting: Meeting, timeout: timedelta) -> Any:
    """The rendezvous store. Rank 0 listens at that address only: by default torch would listen on all addresses of the machine."""
    if isinstance(meeting, Path):
        store = distributed.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)  # torch sets it only for stores that it creates itself; else ranks wait for five minutes
        return store
    address, port = meeting
    settings: dict[str, Any] = {"is_master": not rank, "timeout": timeout}
    if not rank:
        try:
            listening = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            raise RendezvousFailed(f"the ranks can't meet at {address}, port {port}: {reason(error)}") from None
        settings |= {"master_listen_fd": listening.detach(), "wait_for_workers": False}
    return distributed.TCPStore(address, port, size, **settings)  # type: ignore[attr-defined]
