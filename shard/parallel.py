"""Tensor-parallel process group: all-reduce, gather and broadcast among the ranks. Knows torch.distributed, no model.

With one rank everything here does nothing, and torch.distributed is not started.
"""

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

RENDEZVOUS_SECONDS = 120
# How long NCCL waits for a rank, which may be compiling what others don't need. A hang in a step is ended by the router long
# before.
ANSWER_SECONDS = 900

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
        self._invariant = invariant and size > 2  # two have only one order
        if size > 1:
            timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = _store(rank, size, meeting, timeout)
            answer = timedelta(seconds=ANSWER_SECONDS) if backend == "nccl" else timeout  # Gloo's rendezvous uses it, too
            distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=answer)
            # Gloo connects here, NCCL only at its first collective, after weights were loaded.
            store.set(f"here {rank}", "")
            store.wait([f"here {other}" for other in range(size)], timeout)

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
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor([value], dtype=torch.int64, device=device)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN)
        return int(tensor.item())


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
            why = os.strerror(error.errno or 0)
            raise RendezvousFailed(f"the ranks can't meet at {address}, port {port}: {why}") from None
        settings |= {"master_listen_fd": listening.detach(), "wait_for_workers": False}
    return distributed.TCPStore(address, port, size, **settings)  # type: ignore[attr-defined]
