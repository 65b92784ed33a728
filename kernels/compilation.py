"""What the ahead-of-time gate has to know of a kernel to compile it on a machine that has no accelerator."""

from dataclasses import dataclass

from triton import JITFunction

# Names in `compile.TARGETS`.
NVIDIA, AMD = ("sm_80", "sm_90", "sm_100", "sm_120"), ("gfx942",)
EIGHT_BIT_TARGETS = ("sm_90", "sm_100", "sm_120")  # that have instructions for float8_e4m3fn; gfx942 has other such numbers
WARP = 64  # threads of one at most: AMD's; NVIDIA's have 32
EARLY_TARGETS = ("sm_90", "sm_100")  # on which kernels can begin early (`dependent_launch`)
GENERATIONS = {0: "amd", 8: "ampere", 9: ""}  # what those of `paged_attention.generation_of` are called in the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One kernel in one configuration that is used. Modules of kernels give theirs by a function `compilations()`."""

    kernel: JITFunction
    name: str  # unique: shown in the report
    # Type of every argument that is no constant: {"x": "*bf16", "stride": "i64:16"}. Pointers are taken to be aligned to 16 bytes;
    # of a number ":16" says that it is divisible by 16.
    signature: dict[str, str]
    constants: dict[str, object]  # all other arguments
    warps: int = 4
    stages: int = 2
    fuse: bool = False  # may multiplications and additions be contracted? Say at the launch what is said here (enable_fp_fusion)
    early: bool = False  # begins before the kernel before it ends (`dependent_launch`)
    hot: bool = False  # runs in every layer of every step: must not spill
    targets: tuple[str, ...] = ()  # names in `compile.TARGETS` of those it is used on; none: all
