"""Finds NVIDIA GPUs by nvidia-smi, without torch.

A GPU divided by MIG shows its instances in its place, of which a process sees one at most: NVIDIA's "MIG User Guide", "CUDA Device
Enumeration". No MIG instance has ever been at hand: they are parsed as that guide prints them.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..proto.process import available_memory
from .errors import UsageError
from .gpus import CUDA, Gpus

DEVICES = Path("/dev")  # GPUs that a container was given are here, those of its host in /proc
PATIENCE = 20  # seconds until nvidia-smi must have answered; with a hung driver it waits for ever
WORDS = 300  # characters of what nvidia-smi says that are quoted
PART = re.compile(r"\s+MIG \S*?(\d+)gb\S*\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")


SHARED = ("[N/A]", "[Not Supported]")  # instead of its free memory, of a GPU that has none of its own, such as GB10's (DGX Spark)
NO_TOOL = (
    "there is no nvidia-smi, which would list it: install it (it comes with the driver), or start the container with "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)


@dataclass(frozen=True, slots=True)
class _Gpu:
    number: str
    uuid: str
    memory: int  # free; 0: it has failed
    part: bool = False

    def called(self, name: str) -> bool:
        return name == self.number or (name != "" and self.uuid.startswith(name))


def find(environment: Mapping[str, str]) -> Gpus:
    """The GPUs that the environment makes visible."""
    visible = environment.get(CUDA)
    if visible is not None and visible.strip() in ("", "-1"):
        return Gpus()
    if not shutil.which("nvidia-smi"):
        return Gpus(obstacle=_unlisted(NO_TOOL))
    there, words = _gpus()
    shown = _shown(there, visible)
    if len({gpu.uuid for gpu in shown}) < len(shown):
        return Gpus(obstacle=f"{CUDA}={visible} names a GPU twice, and CUDA then shows none at all: name each once")
    usable = [gpu for gpu in shown if gpu.memory]
    if usable:
        all_seen = len(usable) == len(there if visible is None else shown) and not words
        names = () if all_seen else tuple(gpu.uuid for gpu in usable)  # by numbers a process would find the others, too
        return Gpus(tuple(gpu.memory for gpu in usable), names)
    if not there:
        return Gpus(
            obstacle=_unlisted(f"nvidia-smi can't list it ({words or 'it says nothing'}): mend its driver, or restart the machine")
        )
    if not shown:
        listed = ", ".join(f"{gpu.number} {gpu.uuid}" for gpu in there)
        return Gpus(obstacle=f"{CUDA}={visible} names first what nvidia-smi does not list ({listed}): correct it, or leave it out")
    return Gpus(obstacle=f"nvidia-smi tells no free memory of {shown[0].uuid}: reset it, or its driver")


def _unlisted(why: str) -> str:
    """Why a GPU that is here was not found; "": none is here, as in an image for GPUs on a machine without. In WSL and gVisor,
    where the driver is another kernel's, there is nothing to be seen."""
    here = next(iter(sorted(DEVICES.glob("nvidia[0-9]*"))), None)
    return f"{here} is a GPU, and {why}" if here else ""


def _gpus() -> tuple[list[_Gpu], str]:
    """All GPUs in the order of the bus; and what else nvidia-smi says, above all where one of them is lost. MIG instances stand
    where their GPU would, with its number."""
    lines = _ask("--query-gpu=index,uuid,memory.free,mig.mode.current", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    cells = [row for row in rows if len(row) >= 3 and row[0].isdigit()]
    words = " ".join(" ".join(line for line, row in zip(lines, rows, strict=True) if row not in cells).split())[:WORDS]
    parts = _parts() if any(row[3:] == ["Enabled"] for row in cells) else {}
    found: list[_Gpu] = []
    for number, uuid, free, *divided in cells:
        if divided == ["Enabled"]:
            found += [_Gpu(number, name, size, part=True) for name, size in parts.get(uuid, [])]
        else:
            found.append(_Gpu(number, uuid, _free(free)))
    return found, words


def _free(cell: str) -> int:
    """Free bytes, by a cell of nvidia-smi's; 0: it has failed, for which there are many words."""
    if cell in SHARED:
        return available_memory()
    return int(cell) << 20 if cell.isdigit() else 0


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
    """The lines that nvidia-smi prints, its complaints included: of one GPU that is lost, beside the rows of others, it says so and
    fails. Raises UsageError if it hangs."""
    command = ["nvidia-smi", *arguments]
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"nvidia-smi has not answered for {PATIENCE} s: restart the GPU's driver, or do without GPUs: CUDA_VISIBLE_DEVICES=-1"
        ) from None
    return answer.stdout.splitlines()
