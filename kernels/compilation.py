"""The description of a kernel that `compile` needs to compile it ahead of time, on a machine without an accelerator."""

from dataclasses import dataclass

from triton import JITFunction

# Names in `compile.TARGETS`.
NVIDIA, AMD = ("sm_80", "sm_90", "sm_100", "sm_120"), ("gfx942",)
VENDORS = {"": NVIDIA, "amd": AMD}  # by their names in the report
EIGHT_BIT_TARGETS = ("sm_90", "sm_100", "sm_120")  # targets with instructions for float8_e4m3fn; gfx942 has another such format
WARP = 64  # most threads of a warp: AMD's; NVIDIA's have 32
EARLY_TARGETS = ("sm_90", "sm_100", "sm_120")  # targets on which kernels can begin early (`dependent_launch`)
GENERATIONS = {0: "amd", 8: "ampere", 9: ""}  # names of the classes of `paged_attention.device_class` in the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One kernel in one configuration that is used. Modules of kernels return theirs from a function `compilations()`."""

    kernel: JITFunction
    name: str  # unique; shown in the report
    # Types of arguments, of those that are not constants at least: {"x": "*bf16", "stride": "i64:16"}. Pointers are taken to be
    # aligned to 16 bytes; ":16" after a number's type says that it is divisible by 16.
    types: dict[str, str]
    constants: dict[str, object]  # all other arguments
    warps: int = 4
    stages: int = 2
    # Whether multiplications and additions may be contracted; must agree with the launch (enable_fp_fusion).
    fuse: bool = False
    early: bool = False  # begins before the kernel before it ends (`dependent_launch`)
    hot: bool = False  # runs in every layer of every step: must not spill
    targets: tuple[str, ...] = ()  # names in `compile.TARGETS` on which it is used; none: all

    @property
    def signature(self) -> dict[str, str]:
        """Type of every argument that is not a constant, in the order of the kernel's."""
        return {name: self.types[name] for name in self.kernel.arg_names if name not in self.constants}
