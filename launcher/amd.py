"""Finds AMD GPUs as their driver (amdgpu, with its compute part, KFD) shows them in /sys, without any tool and without torch.

Never run where there is one: written from the kernel's and the runtimes' sources alone.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..proto import process
from ..proto.process import lines_of
from .gpus import CUDA, Gpus

DEVICES = Path("/dev")
RUNTIME = "ROCR_VISIBLE_DEVICES"  # applied first; the GPUs that it leaves are numbered anew
VISIBLE = ("HIP_VISIBLE_DEVICES", CUDA)  # the first that is set counts
# Bytes of its own memory that a GPU must have. An integrated GPU counts what its firmware takes from the machine's memory, some
# hundred MB unless somebody has set more.
LEAST = 4 << 30
LOCAL = ("1", "2")  # heap_type of a bank of the GPU's own memory, whether the host can reach it or not
BUILD = "torch is a build without ROCm, which AMD's GPUs need: install its ROCm build (pytorch.org says from which index)"
ACCESS = (
    "this user may not open {}, as AMD's GPUs need: join the group that owns it (render or video), or start the container with "
    "--device /dev/kfd --device /dev/dri"
)


@dataclass(frozen=True, slots=True)
class _Gpu:
    uuid: str
    minor: str  # of its device /dev/dri/renderD128...
    memory: int

    @property
    def device(self) -> Path:
        return DEVICES / "dri" / f"renderD{self.minor}"

    @property
    def free(self) -> int:
        """Free bytes, as far as they are known: of a partition of a GPU only its size is."""
        folder = process.SYSTEM / f"class/drm/renderD{self.minor}/device"
        total, used = (_number(folder / f"mem_info_vram_{name}") for name in ("total", "used"))
        return min(self.memory, total - used) if total else self.memory


def find(environment: Mapping[str, str]) -> Gpus:
    """The GPUs that the environment makes visible, in the order of the runtime, which is that of the driver's nodes."""
    there = [gpu for node in _nodes() if (gpu := _gpu(node))]
    usable = [gpu for gpu in there if os.access(gpu.device, os.R_OK | os.W_OK)]  # the runtime does not see others
    shown = _shown(usable, environment.get(RUNTIME))
    asked = next((environment[name] for name in VISIBLE if name in environment), None)
    chosen = [gpu for gpu in _shown(shown, asked) if gpu.memory >= LEAST]
    if not chosen:
        denied = [gpu for gpu in there if gpu not in usable and gpu.memory >= LEAST]
        return Gpus(obstacle=ACCESS.format(denied[0].device) if denied else "")
    if not os.access(DEVICES / "kfd", os.R_OK | os.W_OK):
        return Gpus(obstacle=ACCESS.format(DEVICES / "kfd"))
    if not _torch_has_rocm():
        return Gpus(obstacle=BUILD)
    # By their numbers, since integrated GPUs between them are left out.
    return Gpus(tuple(gpu.free for gpu in chosen), tuple(str(shown.index(gpu)) for gpu in chosen), VISIBLE[0])


def _nodes() -> list[Path]:
    """The driver's topology nodes: processors and GPUs."""
    root = process.SYSTEM / "class/kfd/kfd/topology/nodes"
    found = [path for path in root.iterdir() if path.name.isdigit()] if root.is_dir() else []
    return sorted(found, key=lambda path: int(path.name))


def _gpu(node: Path) -> _Gpu | None:
    """The GPU of a node; None: a processor alone, or another container's GPU, of which nothing can be read."""
    properties = _properties(node)
    if int(properties.get("simd_count", 0)) == 0:
        return None
    banks = map(_properties, (node / "mem_banks").glob("*"))
    memory = sum(int(bank.get("size_in_bytes", 0)) for bank in banks if bank.get("heap_type") in LOCAL)
    return _Gpu(f"GPU-{int(properties.get('unique_id', 0)):016x}", properties.get("drm_render_minor", ""), memory)


def _properties(folder: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in lines_of(folder / "properties") if " " in line.strip())


def _shown(gpus: Sequence[_Gpu], names: str | None) -> list[_Gpu]:
    """The GPUs that are named, by numbers or prefixes of their UUIDs, in that order; an unknown name ends the list. None: all."""
    if names is None:
        return list(gpus)
    found: list[_Gpu] = []
    for name in map(str.strip, names.split(",")):
        meant = [gpu for place, gpu in enumerate(gpus) if name == str(place) or (len(name) > 4 and gpu.uuid.startswith(name))]
        if len(meant) != 1 or meant[0] in found:
            break
        found += meant
    return found


def _number(path: Path) -> int:
    text = "".join(lines_of(path)).strip()
    return int(text) if text.isdigit() else 0


def _torch_has_rocm() -> bool:
    """Read from the package's version file; importing it would take a second."""
    spec = find_spec("torch")
    lines = lines_of(Path(spec.origin).with_name("version.py")) if spec and spec.origin else []
    return any(re.match(r"hip\b.*= *['\"]", line) for line in lines)
