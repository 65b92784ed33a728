"""NVIDIA GPUs and MIG instances, as a fake nvidia-smi prints them."""

from pathlib import Path

import pytest

from penstock.launcher import children, machine, nvidia, replicas
from penstock.launcher.gpus import Gpus
from penstock.launcher.options import Options
from penstock.proto import process

GIB = 1 << 30
WITHOUT_MIG = "0, GPU-aa11, 8192, Disabled\n1, GPU-bb22, 9216, [N/A]\n"
# NVIDIA's MIG User Guide, "Running MIG"; for a GPU divided by MIG, nvidia-smi prints another free size, or none.
WITH_MIG = "0, GPU-aa11, 1, Enabled\n1, GPU-bb22, [Insufficient Permissions], Enabled\n"
MIG_LIST = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa11)
  MIG 3g.40gb     Device  0: (UUID: MIG-7c00)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-7c11)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb22)
  MIG 1c.2g.20gb  Device  0: (UUID: MIG-c222)
"""


@pytest.fixture(autouse=True)
def no_real_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(process, "SYSTEM", tmp_path)  # so that no AMD GPU of this machine is found
    monkeypatch.setattr(nvidia, "DEVICES", tmp_path / "dev")


def write_fake_nvidia_smi(folder: Path, rows: str, listed: str = "") -> None:
    (folder / "rows").write_text(rows)
    (folder / "list").write_text(listed)
    tool = folder / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nif [ "$1" = -L ]; then cat {folder}/list; else cat {folder}/rows; fi\n')
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (8, 9)),
        ("", ()),
        ("-1", ()),
        ("1", (9,)),
        ("1,0", (9, 8)),
        ("GPU-bb", (9,)),
        ("0,7,1", (8,)),  # as in CUDA: an unknown GPU ends the list
    ],
)
def test_cuda_visible_devices_selects_gpus(
    tmp_path: Path, visible: str | None, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing about them is needed in /proc: in WSL and gVisor the driver belongs to another kernel."""
    write_fake_nvidia_smi(tmp_path, WITHOUT_MIG)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = machine.inspect()
    assert (found.gpus.memory, found.gpus.obstacle) == (tuple(size * GIB for size in expected), "")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [40]),
        ("MIG-7c11", [10]),
        ("MIG-c222,MIG-7c00", [20, 40]),
        ("1", [20]),  # the first instance of that GPU
        ("GPU-bb22", []),
    ],
)
def test_cuda_visible_devices_selects_mig_instances(tmp_path: Path, visible: str | None, expected: list[int]) -> None:
    write_fake_nvidia_smi(tmp_path, WITH_MIG, MIG_LIST)
    found = nvidia.find({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [size // 10**9 for size in found.memory] == expected


def test_gpu_without_mig_is_preferred_to_mig_instances(tmp_path: Path) -> None:
    write_fake_nvidia_smi(tmp_path, "0, GPU-aa11, 1, Enabled\n1, GPU-bb22, 9216, Disabled\n", MIG_LIST)
    assert nvidia.find({}).memory == (9 * GIB,)
    assert nvidia.find({"CUDA_VISIBLE_DEVICES": "MIG-7c1"}).memory == (10 * 10**9,)


def test_unknown_or_failed_gpus_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_nvidia_smi(tmp_path, WITH_MIG, MIG_LIST)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-9")
    assert machine.inspect().gpus.obstacle == (
        "CUDA_VISIBLE_DEVICES=MIG-9 names first what nvidia-smi does not list (0 MIG-7c00, 0 MIG-7c11, 1 MIG-c222): correct it, or "
        "leave it out"
    )
    write_fake_nvidia_smi(tmp_path, "0, GPU-aa11, [Unknown Error], Disabled\n")
    assert "no free memory of GPU-aa11" in nvidia.find({}).obstacle


@pytest.mark.parametrize("visible", ["0,0", "0,1,0", "GPU-aa11,GPU-aa11"])
def test_cuda_visible_devices_that_names_a_gpu_twice_is_reported(tmp_path: Path, visible: str) -> None:
    write_fake_nvidia_smi(tmp_path, WITHOUT_MIG)
    found = nvidia.find({"CUDA_VISIBLE_DEVICES": visible})
    assert (found.memory, "names a GPU twice" in found.obstacle) == ((), True)


def add_device_files(folder: Path) -> None:
    """Device files of a machine, or a container, with a GPU."""
    (folder / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (folder / "dev" / name).touch()


@pytest.mark.parametrize(
    ("said", "code"), [("No devices were found", 6), ("NVIDIA-SMI has failed\nbecause it couldn't reach the driver.", 9)]
)
def test_gpu_that_nvidia_smi_does_not_list_is_reported(tmp_path: Path, said: str, code: int) -> None:
    """Otherwise the server would run on the CPU without a word."""
    write_fake_nvidia_smi(tmp_path, said)
    with (tmp_path / "nvidia-smi").open("a") as tool:
        tool.write(f"exit {code}\n")
    assert nvidia.find({}) == Gpus()
    add_device_files(tmp_path)
    found = nvidia.find({})
    assert found.memory == ()
    assert f"dev/nvidia0 is a GPU, and nvidia-smi can't list it ({' '.join(said.split())}): mend" in found.obstacle


def test_gpu_without_nvidia_smi_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia.find({}) == Gpus()
    add_device_files(tmp_path)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in nvidia.find({}).obstacle
    assert nvidia.find({"CUDA_VISIBLE_DEVICES": ""}).obstacle == ""  # as the operator wants it


def test_ranks_get_the_other_gpus_by_uuid_when_one_has_failed(tmp_path: Path) -> None:
    """By number they would get the failed one."""
    write_fake_nvidia_smi(
        tmp_path, "0, GPU-aa11, [GPU is lost], [N/A]\n" + WITHOUT_MIG.splitlines()[1] + "\n2, GPU-cc33, 7168, [N/A]\n"
    )
    found = nvidia.find({})
    assert (found.memory, found.names) == ((9 * GIB, 7 * GIB), ("GPU-bb22", "GPU-cc33"))
    assert nvidia.find({"CUDA_VISIBLE_DEVICES": "2,1"}).names == ()
    assert nvidia.find({"CUDA_VISIBLE_DEVICES": "2,0"}).names == ("GPU-cc33",)
    write_fake_nvidia_smi(
        tmp_path, WITHOUT_MIG.splitlines()[1] + "\nUnable to determine the device handle for GPU 0000:0B:00.0: Unknown Error\n"
    )
    found = nvidia.find({})
    assert (found.memory, found.names) == ((9 * GIB,), ("GPU-bb22",))
    options = Options(replicas=2)
    places = replicas.divide(options, 1, "/p", {}, Gpus((9 * GIB, 7 * GIB), ("GPU-bb22", "GPU-cc33")))
    assert [place.environment for place in places] == [{"CUDA_VISIBLE_DEVICES": "GPU-bb22"}, {"CUDA_VISIBLE_DEVICES": "GPU-cc33"}]
    [place] = replicas.divide(Options(), 1, "/p", {}, Gpus((9 * GIB,), ("GPU-bb22",)))
    assert place.environment == {"CUDA_VISIBLE_DEVICES": "GPU-bb22"}


def test_memory_of_a_gpu_that_shares_the_machines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi lists a DGX Spark's."""
    monkeypatch.setattr(nvidia, "available_memory", lambda: 100 * GIB)
    write_fake_nvidia_smi(tmp_path, "0, GPU-aa11, [N/A], [N/A]\n")
    assert nvidia.find({}) == Gpus((100 * GIB,))


def test_cuda_device_order_defaults_to_pci_bus_id() -> None:
    assert children.environment({}, 1)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert children.environment({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, 1)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
