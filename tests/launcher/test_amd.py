"""AMD GPUs in made-up trees of /sys and /dev: which are found, with which indices, and why others can't be used."""

import os
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from penstock.launcher import amd, checkpoint, cli, hub, machine, plan, replicas
from penstock.launcher.gpus import Gpus
from penstock.launcher.options import Options
from penstock.tests.launcher.test_machine import system_tree, write_file

__all__ = ["system_tree"]

GIB = 1 << 30
AddGpu = Callable[..., None]


@pytest.fixture(autouse=True)
def torch_version_file(system_tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up installation of torch's ROCm build. Returns its version file."""
    monkeypatch.setattr(amd, "DEVICES", system_tree / "dev")
    monkeypatch.setenv("PATH", str(system_tree / "bin"))
    for name in (amd.RUNTIME, *amd.VISIBLE):
        monkeypatch.delenv(name, raising=False)
    write_file(system_tree / "dev/kfd", "")
    write_file(system_tree / "torch/version.py", "cuda: str | None = None\nhip: str | None = '6.4.43482-0f2d60242'\n")
    spec = ModuleSpec("torch", None, origin=str(system_tree / "torch/__init__.py"))
    monkeypatch.setattr(amd, "find_spec", lambda name: spec)
    return system_tree / "torch/version.py"


@pytest.fixture
def add_gpu(system_tree: Path) -> AddGpu:
    """Adds a topology node of the driver: a CPU if memory is 0, else a GPU, with a device file unless `device` is False."""

    def add(node: int, memory: int = 0, used: int = 0, *, heap: int = 1, unique: int = 0, device: bool = True) -> None:
        folder = system_tree / f"sys/class/kfd/kfd/topology/nodes/{node}"
        minor = 128 + node
        simds, kind = (304, heap) if memory else (0, 0)
        write_file(folder / "properties", f"simd_count {simds}\ndrm_render_minor {minor}\nunique_id {unique}\n")
        write_file(folder / "mem_banks/0/properties", f"heap_type {kind}\nsize_in_bytes {memory or 512 * GIB}\nflags 0\n")
        if memory and device:
            write_file(system_tree / f"dev/dri/renderD{minor}", "")
        if memory:
            card = system_tree / f"sys/class/drm/renderD{minor}/device"
            write_file(card / "mem_info_vram_total", f"{memory}\n")
            write_file(card / "mem_info_vram_used", f"{used}\n")

    return add


def test_gpus_are_found_in_the_order_of_their_nodes(add_gpu: AddGpu) -> None:
    """Node 10 comes after node 9. CPUs are no GPUs, though they are nodes with memory."""
    add_gpu(0)
    add_gpu(10, 64 * GIB)
    add_gpu(9, 192 * GIB, 2 * GIB, heap=2)
    found = machine.inspect()
    assert (found.gpus.memory, found.gpus.names, found.gpus.obstacle) == ((190 * GIB, 64 * GIB), ("0", "1"), "")
    assert amd.find({}) == Gpus((190 * GIB, 64 * GIB), ("0", "1"), "HIP_VISIBLE_DEVICES")


def test_no_gpu_is_found_without_gpu_nodes(system_tree: Path, add_gpu: AddGpu) -> None:
    assert amd.find({}) == Gpus()
    add_gpu(0)
    assert amd.find({}) == Gpus()
    assert machine.inspect() == machine.Machine(cores=2, memory=1 << 30, fast_bfloat16=False)


def test_integrated_gpu_is_not_used_but_keeps_its_index(add_gpu: AddGpu) -> None:
    """The runtime counts an integrated GPU: if it had no index, ranks would be given the wrong GPUs."""
    add_gpu(0)
    add_gpu(1, GIB // 2)
    assert amd.find({}) == Gpus()
    add_gpu(2, 24 * GIB)
    add_gpu(3, 16 * GIB)
    assert amd.find({}) == Gpus((24 * GIB, 16 * GIB), ("1", "2"), "HIP_VISIBLE_DEVICES")
    assert amd.find({"HIP_VISIBLE_DEVICES": "0"}) == Gpus()
    assert amd.find({"HIP_VISIBLE_DEVICES": "2,0,1"}) == Gpus((16 * GIB, 24 * GIB), ("2", "1"), "HIP_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [
        ({"HIP_VISIBLE_DEVICES": "3,1"}, "31"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "0,-1,1"}, "0"),  # an unknown GPU ends the list
        ({"HIP_VISIBLE_DEVICES": "0,4"}, "0"),
        ({"HIP_VISIBLE_DEVICES": "0,0,1"}, "0"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, ""),
        ({"HIP_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "3, 2"}, "01"),  # numbered anew, from 0
        ({"ROCR_VISIBLE_DEVICES": "3,2", "HIP_VISIBLE_DEVICES": "1"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "3,2", "HIP_VISIBLE_DEVICES": "2"}, ""),
        ({"HIP_VISIBLE_DEVICES": "GPU-00000000000000a2"}, "2"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000a3,1"}, "01"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000"}, ""),  # ambiguous
    ],
)
def test_visible_devices_variables_select_gpus(environment: dict[str, str], numbers: str, add_gpu: AddGpu) -> None:
    for node in range(4):
        add_gpu(node, (100 + node) * GIB, unique=0xA0 + node)
    assert amd.find(environment).names == tuple(numbers)
    if "ROCR_VISIBLE_DEVICES" not in environment:
        assert amd.find(environment).memory == tuple((100 + int(number)) * GIB for number in numbers)


def test_rocr_visible_devices_renumbers_gpus_in_its_order(add_gpu: AddGpu) -> None:
    for node in range(4):
        add_gpu(node, (100 + node) * GIB)
    assert amd.find({"ROCR_VISIBLE_DEVICES": "3,1"}) == Gpus((103 * GIB, 101 * GIB), ("0", "1"), "HIP_VISIBLE_DEVICES")


def test_partition_of_a_gpu_has_only_its_own_memory(system_tree: Path, add_gpu: AddGpu) -> None:
    """Partitioned MI300: the first partition's files have the figures of the whole GPU, the other partitions have none."""
    add_gpu(1, 24 * GIB)
    add_gpu(2, 24 * GIB)
    write_file(system_tree / "sys/class/drm/renderD129/device/mem_info_vram_total", f"{192 * GIB}\n")
    (system_tree / "sys/class/drm/renderD130/device/mem_info_vram_total").unlink()
    assert amd.find({}).memory == (24 * GIB, 24 * GIB)


def test_gpu_of_another_container_is_not_counted(system_tree: Path, add_gpu: AddGpu) -> None:
    """The driver lists its node, whose properties can't be read; or its device file is missing."""
    for node in range(3):
        add_gpu(node, (100 + node) * GIB, device=node != 1)
    properties = system_tree / "sys/class/kfd/kfd/topology/nodes/0/properties"
    properties.unlink()
    properties.mkdir()  # so that it can't be read, not even by root
    assert amd.find({}) == Gpus((102 * GIB,), ("0",), "HIP_VISIBLE_DEVICES")


def test_reasons_for_unused_gpus_are_reported_with_a_remedy(
    system_tree: Path, torch_version_file: Path, add_gpu: AddGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpu(0)
    add_gpu(1, GIB // 2)
    torch_version_file.write_text("hip: str | None = None\n")
    assert amd.find({}).obstacle == "", "an integrated GPU is not reported as unused"
    add_gpu(2, 24 * GIB)
    assert amd.find({}) == Gpus(obstacle=amd.BUILD)
    assert amd.find({"HIP_VISIBLE_DEVICES": ""}) == Gpus(), "GPUs are hidden on purpose"
    torch_version_file.unlink()
    assert amd.find({}) == Gpus(obstacle=amd.BUILD)
    denied = system_tree / "dev/kfd"
    monkeypatch.setattr(os, "access", lambda path, mode: path != denied)
    assert "may not open" in amd.find({}).obstacle
    assert f"{denied}," in amd.find({}).obstacle
    denied = system_tree / "dev/dri/renderD130"
    assert f"{denied}," in amd.find({}).obstacle


def test_torch_build_decides_between_amd_and_nvidia_gpus(system_tree: Path, torch_version_file: Path, add_gpu: AddGpu) -> None:
    write_file(system_tree / "bin/nvidia-smi", "#!/bin/sh\necho '0, GPU-aa11, 8'\n")
    (system_tree / "bin/nvidia-smi").chmod(0o755)
    add_gpu(1, 24 * GIB)
    assert machine.inspect().gpus.names == ("0",)
    torch_version_file.write_text("hip: str | None = None\n")
    found = machine.inspect()
    assert (found.gpus.memory, found.gpus.names, found.gpus.obstacle) == ((8 << 20,), (), "")


def test_rocm_detection_agrees_with_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd, "find_spec", find_spec)
    assert amd._torch_has_rocm() == (torch.version.hip is not None)


def test_plan_names_the_device_or_why_a_gpu_is_not_used(
    system_tree: Path, torch_version_file: Path, add_gpu: AddGpu, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(system_tree / "proc/meminfo", f"MemAvailable: {4 << 20} kB\n")
    add_gpu(1, 24 * GIB)
    assert cli.main(["plan"]) == 0
    assert "device        cuda, bfloat16\n" in capsys.readouterr().out
    torch_version_file.write_text("hip: str | None = None\n")
    assert cli.main(["plan"]) == 0
    assert f"device        cpu, float32\n              a GPU is not used: {amd.BUILD}\n" in capsys.readouterr().out
    assert cli.main(["plan", "--device", "cpu"]) == 0
    assert "not used" not in capsys.readouterr().out
    assert cli.main(["plan", "--device", "cuda"]) == 2
    assert f"--device cuda, but {amd.BUILD}; or use --device cpu\n" in capsys.readouterr().err


def test_ranks_get_the_indices_of_the_gpus_found() -> None:
    gpus = Gpus((24 * GIB,) * 4, ("1", "2", "5", "4"), "HIP_VISIBLE_DEVICES")

    def devices_of_replicas(options: Options, environment: dict[str, str], ranks: int) -> list[dict[str, str]]:
        return [dict(place.environment) for place in replicas.divide(options, ranks, "/p", environment, gpus)]

    assert devices_of_replicas(Options(), {}, 3) == [{"HIP_VISIBLE_DEVICES": "1,2,5"}]
    environment = {"HIP_VISIBLE_DEVICES": "0,1,2,5,4", "CUDA_VISIBLE_DEVICES": "7"}
    assert devices_of_replicas(Options(replicas=2), environment, 2) == [
        {"HIP_VISIBLE_DEVICES": "1,2"},
        {"HIP_VISIBLE_DEVICES": "5,4"},
    ]


def test_cpu_plan_has_no_gpu_indices(tmp_path: Path) -> None:
    found = machine.Machine(cores=1, memory=1 << 34, fast_bfloat16=True, gpus=Gpus((24 * GIB,), ("1",)))
    _, folder = hub.locate("")
    model = checkpoint.read(folder, "auto")
    assert plan.divide(Options(), model, found).gpus.names == ("1",)
    assert plan.divide(Options(device="cpu"), model, found).gpus == Gpus()
