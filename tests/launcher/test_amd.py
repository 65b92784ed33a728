"""AMD's GPUs in made-up trees of /sys and /dev: which are found, by which numbers, and what is said of those that can't be used."""

import os
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from penstock.launcher import amd, checkpoint, cli, hub, machine, plan, replicas
from penstock.launcher.amd import Found
from penstock.launcher.options import Options
from penstock.tests.launcher.test_machine import tree, write

__all__ = ["tree"]

GIB = 1 << 30
Gpu = Callable[..., None]


@pytest.fixture(autouse=True)
def rocm(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build of torch for ROCm; the file in which it says so."""
    monkeypatch.setattr(amd, "DEVICES", tree / "dev")
    monkeypatch.setenv("PATH", str(tree / "bin"))
    for name in (amd.RUNTIME, *amd.VISIBLE):
        monkeypatch.delenv(name, raising=False)
    write(tree / "dev/kfd", "")
    write(tree / "torch/version.py", "cuda: str | None = None\nhip: str | None = '6.4.43482-0f2d60242'\n")
    spec = ModuleSpec("torch", None, origin=str(tree / "torch/__init__.py"))
    monkeypatch.setattr(amd, "find_spec", lambda name: spec)
    return tree / "torch/version.py"


@pytest.fixture
def gpu(tree: Path) -> Gpu:
    """Adds a node of the driver's: a processor, or a GPU with so much memory, some of it used, with a device to be opened by."""

    def add(node: int, memory: int = 0, used: int = 0, *, heap: int = 1, unique: int = 0, device: bool = True) -> None:
        folder = tree / f"sys/class/kfd/kfd/topology/nodes/{node}"
        minor = 128 + node
        simds, kind = (304, heap) if memory else (0, 0)
        write(folder / "properties", f"simd_count {simds}\ndrm_render_minor {minor}\nunique_id {unique}\n")
        write(folder / "mem_banks/0/properties", f"heap_type {kind}\nsize_in_bytes {memory or 512 * GIB}\nflags 0\n")
        if memory and device:
            write(tree / f"dev/dri/renderD{minor}", "")
        if memory:
            card = tree / f"sys/class/drm/renderD{minor}/device"
            write(card / "mem_info_vram_total", f"{memory}\n")
            write(card / "mem_info_vram_used", f"{used}\n")

    return add


def test_a_machine_with_several(gpu: Gpu) -> None:
    """Processors are no GPUs, though they have memory and nodes; node 10 comes after node 9."""
    gpu(0)
    gpu(10, 64 * GIB)
    gpu(9, 192 * GIB, 2 * GIB, heap=2)
    found = machine.inspect()
    assert (found.gpu_memory, found.amd, found.obstacle) == ((190 * GIB, 64 * GIB), ("0", "1"), "")
    assert amd.find({}) == Found(("0", "1"), (190 * GIB, 64 * GIB))


def test_without_any(tree: Path, gpu: Gpu) -> None:
    assert amd.find({}) == Found()
    gpu(0)
    assert amd.find({}) == Found()
    assert machine.inspect() == machine.Machine(cores=2, memory=1 << 30, fast_bfloat16=False)


def test_a_part_of_a_processor_is_none_and_keeps_its_number(gpu: Gpu) -> None:
    """By which ranks would else be given it: the runtime counts it."""
    gpu(0)
    gpu(1, GIB // 2)
    assert amd.find({}) == Found()
    gpu(2, 24 * GIB)
    gpu(3, 16 * GIB)
    assert amd.find({}) == Found(("1", "2"), (24 * GIB, 16 * GIB))
    assert amd.find({"HIP_VISIBLE_DEVICES": "0"}) == Found()
    assert amd.find({"HIP_VISIBLE_DEVICES": "2,0,1"}) == Found(("2", "1"), (16 * GIB, 24 * GIB))


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [
        ({"HIP_VISIBLE_DEVICES": "3,1"}, "31"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "0,-1,1"}, "0"),  # what comes after one that is none is not read
        ({"HIP_VISIBLE_DEVICES": "0,4"}, "0"),
        ({"HIP_VISIBLE_DEVICES": "0,0,1"}, "0"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, ""),
        ({"HIP_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "3, 2"}, "01"),  # counted anew
        ({"ROCR_VISIBLE_DEVICES": "3,2", "HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "3,2", "HIP_VISIBLE_DEVICES": "2"}, ""),
        ({"HIP_VISIBLE_DEVICES": "GPU-00000000000000a2"}, "2"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000a3,1"}, "01"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000"}, ""),  # which of them?
    ],
)
def test_what_the_environment_shows(environment: dict[str, str], numbers: str, gpu: Gpu) -> None:
    for node in range(4):
        gpu(node, (100 + node) * GIB, unique=0xA0 + node)
    assert amd.find(environment).numbers == tuple(numbers)
    if "ROCR_VISIBLE_DEVICES" not in environment:
        assert amd.find(environment).memory == tuple((100 + int(number)) * GIB for number in numbers)


def test_numbers_of_what_the_runtime_leaves_are_those_of_its_order(gpu: Gpu) -> None:
    for node in range(4):
        gpu(node, (100 + node) * GIB)
    assert amd.find({"ROCR_VISIBLE_DEVICES": "3,1"}) == Found(("0", "1"), (103 * GIB, 101 * GIB))


def test_a_part_of_a_gpu_has_no_more_than_its_own(tree: Path, gpu: Gpu) -> None:
    """MI300 in parts: the first has the figures of the whole, the others none."""
    gpu(1, 24 * GIB)
    gpu(2, 24 * GIB)
    write(tree / "sys/class/drm/renderD129/device/mem_info_vram_total", f"{192 * GIB}\n")
    (tree / "sys/class/drm/renderD130/device/mem_info_vram_total").unlink()
    assert amd.find({}).memory == (24 * GIB, 24 * GIB)


def test_one_of_another_container_is_not_counted(tree: Path, gpu: Gpu) -> None:
    """The driver shows its node, and lets nobody read it; or its device is not there."""
    for node in range(3):
        gpu(node, (100 + node) * GIB, device=node != 1)
    properties = tree / "sys/class/kfd/kfd/topology/nodes/0/properties"
    properties.unlink()
    properties.mkdir()  # can't be read, by root neither
    assert amd.find({}) == Found(("0",), (102 * GIB,))


def test_obstacles_are_named_with_their_remedy(tree: Path, rocm: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(0)
    gpu(1, GIB // 2)
    rocm.write_text("hip: str | None = None\n")
    assert amd.find({}).obstacle == "", "a part of a processor is nothing that anybody misses"
    gpu(2, 24 * GIB)
    assert amd.find({}) == Found(obstacle=amd.BUILD)
    assert amd.find({"HIP_VISIBLE_DEVICES": ""}) == Found(), "as the operator wants it"
    rocm.unlink()
    assert amd.find({}) == Found(obstacle=amd.BUILD)
    denied = tree / "dev/kfd"
    monkeypatch.setattr(os, "access", lambda path, mode: path != denied)
    assert "may not open" in amd.find({}).obstacle
    assert f"{denied}," in amd.find({}).obstacle
    denied = tree / "dev/dri/renderD130"
    assert f"{denied}," in amd.find({}).obstacle


def test_torch_decides_between_amds_and_nvidias(tree: Path, rocm: Path, gpu: Gpu) -> None:
    write(tree / "bin/nvidia-smi", "#!/bin/sh\necho '0, GPU-aa11, 8'\n")
    (tree / "bin/nvidia-smi").chmod(0o755)
    gpu(1, 24 * GIB)
    assert machine.inspect().amd == ("0",)
    rocm.write_text("hip: str | None = None\n")
    found = machine.inspect()
    assert (found.gpu_memory, found.amd, found.obstacle) == ((8 << 20,), (), "")


def test_this_torch_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd, "find_spec", find_spec)
    assert amd._torch_has_rocm() == (torch.version.hip is not None)


def test_plans(tree: Path, rocm: Path, gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    write(tree / "proc/meminfo", f"MemAvailable: {4 << 20} kB\n")
    gpu(1, 24 * GIB)
    assert cli.main(["plan"]) == 0
    assert "device        cuda, bfloat16\n" in capsys.readouterr().out
    rocm.write_text("hip: str | None = None\n")
    assert cli.main(["plan"]) == 0
    assert f"device        cpu, float32\n              a GPU is not used: {amd.BUILD}\n" in capsys.readouterr().out
    assert cli.main(["plan", "--device", "cpu"]) == 0
    assert "not used" not in capsys.readouterr().out
    assert cli.main(["plan", "--device", "cuda"]) == 2
    assert f"--device cuda, but {amd.BUILD}; or use --device cpu\n" in capsys.readouterr().err


def test_ranks_see_those_that_were_found() -> None:
    def seen(asked: Options, environment: dict[str, str], ranks: int, count: int) -> list[dict[str, str]]:
        paths = [str(path) for path in range(count * (ranks + 2))]
        return [dict(place.environment) for place in replicas.divide(asked, ranks, True, paths, environment, ("1", "2", "5", "4"))]

    assert seen(Options(), {}, 3, 1) == [{"HIP_VISIBLE_DEVICES": "1,2,5"}]
    given = {"HIP_VISIBLE_DEVICES": "0,1,2,5,4", "CUDA_VISIBLE_DEVICES": "7"}
    assert seen(Options(replicas=2), given, 2, 2) == [{"HIP_VISIBLE_DEVICES": "1,2"}, {"HIP_VISIBLE_DEVICES": "5,4"}]


def test_a_plan_for_a_cpu_knows_none(tmp_path: Path) -> None:
    found = machine.Machine(cores=1, memory=1 << 34, fast_bfloat16=True, gpu_memory=(24 * GIB,), amd=("1",))
    _, folder = hub.locate("")
    model = checkpoint.read(folder, "auto")
    assert plan.divide(Options(), model, found).amd == ("1",)
    assert plan.divide(Options(device="cpu"), model, found).amd == ()
