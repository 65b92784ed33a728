"""Finds NVIDIA GPUs by nvidia-smi, without torch.

A GPU divided by MIG shows its instances in its place, of which a process sees one at most: NVIDIA's "MIG User Guide", "CUDA Device
Enumeration". No MIG instance has ever been at hand: they are parsed as that guide prints them.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .mistake import Mistake

VISIBLE = "CUDA_VISIBLE_DEVICES"
PATIENCE = 20  # seconds until nvidia-smi must have answered; with a hung driver it waits for ever
PART = re.compile(r"\s+MIG \S*?(\d+)gb\S*\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Found:
    """Free bytes of all GPUs that are to be used, in order."""

    memory: tuple[int, ...] = ()
    obstacle: str = ""  # why GPUs that are here cannot be used, with a remedy


@dataclass(frozen=True, slots=True)
class _Gpu:
    number: str
    uuid: str
    memory: int  # free; 0: it has failed
    part: bool = False

    def called(self, name: str) -> bool:
        return name == self.number or (name != "" and self.uuid.startswith(name))


def find(environment: Mapping[str, str]) -> Found:
    """The GPUs that the environment makes visible."""
    visible = environment.get(VISIBLE)
    if (visible is not None and visible.strip() in ("", "-1")) or not shutil.which("nvidia-smi"):
        return Found()
    there = _gpus()
    shown = _shown(there, visible)
    if memory := tuple(gpu.memory for gpu in shown if gpu.memory):
        return Found(memory)
    if there and not shown:
        names = ", ".join(f"{gpu.number} {gpu.uuid}" for gpu in there)
        return Found(
            obstacle=f"{VISIBLE}={visible} names first what nvidia-smi does not list ({names}): correct it, or leave it out"
        )
    return Found(obstacle=f"nvidia-smi tells no free memory of {shown[0].uuid}: reset it, or its driver" if shown else "")


def _gpus() -> list[_Gpu]:
    """All GPUs in the order of the bus. MIG instances stand where their GPU would, with its number."""
    rows = [
        line.split(",") for line in _ask("--query-gpu=index,uuid,memory.free,mig.mode.current", "--format=csv,noheader,nounits")
    ]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) >= 3]
    parts = _parts() if any(row[3:] == ["Enabled"] for row in cells) else {}
    found: list[_Gpu] = []
    for number, uuid, free, *divided in cells:
        if divided == ["Enabled"]:
            found += [_Gpu(number, name, size, part=True) for name, size in parts.get(uuid, [])]
        else:
            found.append(_Gpu(number, uuid, int(free) << 20 if free.isdigit() else 0))  # else "[N/A]"
    return found


def _parts() -> dict[str, list[tuple[str, int]]]:
    """The MIG instances of each GPU: UUIDs and bytes, of which a profile such as 3g.40gb has a little more than its name says."""
    found: dict[str, list[tuple[str, int]]] = {}
    for line in _ask("-L"):
        if gpu := re.match(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)", line):
            own = found.setdefault(gpu[1], [])
        elif part := PART.match(line):
            own.append((part[2], int(part[1]) * 10**9))
    return found


def _shown(gpus: Sequence[_Gpu], names: str | None) -> list[_Gpu]:
    """The GPUs named in CUDA_VISIBLE_DEVICES, in that order; an unknown name ends the list. None: all whole GPUs, or one MIG
    instance."""
    if names is None:
        return [gpu for gpu in gpus if not gpu.part] or list(gpus[:1])
    found: list[_Gpu] = []
    for name in map(str.strip, names.split(",")):
        called = next((gpu for gpu in gpus if gpu.called(name)), None)
        if called is None:
            break
        found.append(called)
    return found


def _ask(*arguments: str) -> list[str]:
    """The lines that nvidia-smi prints; [] where it fails. Raises Mistake if it hangs."""
    command = ["nvidia-smi", *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise Mistake(
            f"nvidia-smi has not answered for {PATIENCE} s: restart the GPU's driver, or do without GPUs: CUDA_VISIBLE_DEVICES=-1"
        ) from None
    return answer.stdout.splitlines() if answer.returncode == 0 else []
