"""The GPUs of this machine that a server may use, as `nvidia.py` and `amd.py` find them."""

from dataclasses import dataclass

CUDA = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs that are to be used, in order."""

    memory: tuple[int, ...] = ()  # free bytes of each
    names: tuple[str, ...] = ()  # of each in `variable`; (): their places among those that are visible will do
    variable: str = CUDA  # by which a process is shown some of them
    obstacle: str = ""  # why GPUs that are here cannot be used, with a remedy
