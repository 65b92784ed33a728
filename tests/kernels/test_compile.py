"""Ahead-of-time compilation of kernels (`kernels/compile.py`): penstock's kernels compile, compiled code has the properties that
correctness and speed rely on, and planted faults (spills, too much shared memory, code that does not compile) are reported.

Other processes compile, since this one interprets kernels.
"""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

PLANTED_FAULTS_SCRIPT = '''
import triton
import triton.language as tl
from penstock.kernels import compile
from penstock.kernels.compilation import Compilation


@triton.jit
def spilling(x, SIZE: tl.constexpr):
    """Needs all values in registers at once: their sum comes before the first store."""
    place = tl.arange(0, SIZE)
    values = tl.load(x + place)
    tl.store(x + place, values / tl.sum(values * values, 0))


@triton.jit
def product(x, SIZE: tl.constexpr):
    """Both operands are [32, SIZE] and lie in shared memory as a whole."""
    low, long = tl.arange(0, 32), tl.arange(0, SIZE)
    left, right = tl.load(x + low[:, None] * SIZE + long[None, :]), tl.load(x + long[:, None] * 32 + low[None, :])
    tl.store(x + low[:, None] * 32 + low[None, :], tl.dot(left, right).to(tl.float16))


@triton.jit
def invalid(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.arange(0, 2 * SIZE))


def planted(kernel, pointer, size, warps, hot):
    constants = {"SIZE": size}
    return Compilation(kernel=kernel, name=kernel.__name__, types={"x": pointer}, constants=constants, warps=warps, hot=hot)


compilations = [
    planted(spilling, "*fp32", 16384, 1, True),
    planted(product, "*fp16", 2048, 4, False),
    planted(invalid, "*i32", 16, 1, False),
]
compile.gather = lambda: compilations
compile.TARGETS = [target for target in compile.TARGETS if target.name in ("sm_90", "gfx942")]
print(compile.main([]))
compilations[:] = [planted(spilling, "*fp32", 16384, 1, False), planted(spilling, "*fp32", 256, 1, True)]
print(compile.main([]))
'''


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=110)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_a_sample_of_kernels_compiles_for_all_targets() -> None:
    """One kernel of each sort, with the smallest heads; `make kernels` compiles all."""
    filters = "norm add 4096", "rotary and write 128 bf16", "swiglu bf16", "slot move bf16", "attend one 8 "
    process = run_python("-m", "penstock.kernels.compile", *filters)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1].startswith(
        "11 kernels, 5 targets, 0 faults"
    )  # rotary also with an fp8 cache, and launched early
    assert len(process.stdout.splitlines()) == 2 + 5 * 6 + 3 + 3 + 5  # the latter have fewer targets


INSPECTION_SCRIPT = """
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
import triton
from penstock.kernels import compile, paged_attention, paged_kernels

kernels = compile.gather()
[hopper] = [target for target in compile.TARGETS if target.name == "sm_90"]
for one in kernels:
    if one.early:
        code = compile._compiled(one, hopper).asm["ptx"]
        before, *behind = code.split("griddepcontrol.wait")
        accesses = [word for word in ("ld.global", "st.global", "cp.async", "atom", "red.global") if word in before]
        launches, writes = "griddepcontrol.launch_dependents" in code, any("st.global" in part for part in behind)
        if one.kernel in (paged_kernels.attend, paged_kernels.merge):  # they read the plan, which no kernel writes
            accesses = [word for word in accesses if word != "ld.global"]
            assert len(behind) == 2, one.name  # programs with nothing to do wait as well
        print("early:", one.name, launches, writes, accesses)
    if one.name in ("sampling draw", "sampling weigh"):
        print("vector loads:", one.constants["MASKED"], compile._compiled(one, hopper).asm["ptx"].count("ld.global.v4.b32"))
    if one.name in ("product down 16", "product vocabulary 32", "product output 64", "product gated 16"):
        code = compile._compiled(one, hopper).asm["ptx"]
        print("wgmma:", "wgmma.mma_async" in code, "mma.sync" in code, "cp.async.cg" in code, code.count("ld.global"))

for more in ({}, {"softcap": 50.0}, {"window": 4096}, {"softcap": 50.0, "window": 4096}):
    one = paged_attention._compilation(1, 128, 9, **more)  # the only tile of batch-invariant attention
    code = compile._compiled(one, hopper).asm["ptx"]
    loops = re.findall(r"^([$]L\\w+):(.*?)bra(?:[.]uni)?\\s+\\1;", code, re.DOTALL | re.MULTILINE)
    bodies = [body for _, body in loops if "ex2" in body]
    counts = [Counter(re.findall(r"^\\s+((?:fma|sub|mul|add)[.\\w]*f32)", body, re.MULTILINE)) for body in bodies]
    print("loops:", one.name, len(counts), all(found == counts[0] for found in counts), counts[0]["fma.rn.f32"] > 8)

[one] = [one for one in kernels if one.name == "noise all"]
for fuse in (one.fuse, True):
    for target in compile.TARGETS:
        if target.gpu.backend == "cuda":
            made = compile._compiled(replace(one, fuse=fuse), target)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(made.asm["cubin"])
                file.flush()
                code = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True).stdout
            ptx = made.asm["ptx"]
            products = len(re.findall(r"\\bmul(?:\\.rn)?\\.f32", ptx)), len(re.findall(r"\\bFMUL2?\\b", code))
            divides = bool(re.search("div.(full|approx)", ptx))
            print("exact:", target.name, fuse, "fma" in ptx, divides, products[1] >= products[0] > 0)

one = [one for one in kernels if one.name.startswith("hopper attend many 128 bf16 ratio 4 page 16")][0]
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(compile._compiled(one, hopper).asm["cubin"])
    file.flush()
    code = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True).stdout
labels, lines = {}, code.splitlines()
for i, line in enumerate(lines):
    if label := re.match(r"([.]L_x_\\d+):", line):
        labels[label[1]] = i
    elif (back := re.search(r"BRA.*`[(]([.]L_x_\\d+)[)]", line)) and back[1] in labels:
        words = re.findall(r"HGMMA|WARPGROUP[.]DEPBAR|MUFU|LDL|STL", " ".join(lines[labels[back[1]] : i]))
        if words.count("HGMMA") == 16:
            marks = "".join({"HGMMA": "p", "WARPGROUP.DEPBAR": "|", "MUFU": "e"}.get(word, "l") for word in words)
            print("overlap:", re.sub(r"(.)\\1+", r"\\1", marks))
"""


@pytest.fixture(scope="module")
def compiled_code() -> dict[str, list[str]]:
    """Findings about compiled code: lines by the label before the colon. One process finds all of them: starting it takes
    seconds."""
    process = run_python("-c", INSPECTION_SCRIPT)
    assert process.returncode == 0, process.stdout + process.stderr
    found = [line.split(": ", 1) for line in process.stdout.splitlines()]
    labels = "early", "vector loads", "wgmma", "exact", "loops", "overlap"
    return {label: [line for line_label, line in found if line_label == label] for label in labels}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_kernels_launched_early_access_nothing_that_kernels_write_before_they_wait(compiled_code: dict[str, list[str]]) -> None:
    """Programmatic dependent launch."""
    assert len(compiled_code["early"]) >= 5, compiled_code
    for line in compiled_code["early"]:
        assert line.endswith("True True []"), line


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_masked_and_unmasked_attention_loops_contract_the_same_operations(compiled_code: dict[str, list[str]]) -> None:
    """How a prompt is chunked decides in which loop of attention a key is. What is contracted to an FMA in one loop must be in all
    of them."""
    for line, loop_count in zip(compiled_code["loops"], (2, 2, 3, 3), strict=True):
        assert line.endswith(f" {loop_count} True True"), line


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_products_of_few_rows_use_wgmma_with_operands_in_shared_memory(compiled_code: dict[str, list[str]]) -> None:
    """Asynchronous copies put both operands there: nothing is loaded through registers."""
    assert compiled_code["wgmma"] == ["True False True 0"] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_compile_reports_planted_faults_and_exits_with_1(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(PLANTED_FAULTS_SCRIPT)
    process = run_python(str(path))
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    found = {(line.split()[0], line.split()[1]): line for line in lines[1:7]}
    for target in ("sm_90", "gfx942"):
        assert f"bytes of shared memory, {target} has" in found["product", target]
        assert "does not compile" in found["invalid", target]
    assert "spills" in found["spilling", "sm_90"]
    # gfx942 has twice the registers: enough for this kernel, not for the product.
    assert "spills" not in found["spilling", "gfx942"]
    assert int(found["product", "gfx942"].split()[3]) > 0
    assert lines[7].startswith("3 kernels, 2 targets, 5 faults")
    assert lines[8] == "1"
    # Spills are allowed in kernels that are not hot, and a small kernel has none.
    assert lines[-2].startswith("2 kernels, 2 targets, 0 faults")
    assert lines[-1] == "0"


@pytest.mark.parametrize(("columns", "fault"), [(512, ""), (1024, "1024 columns of tensor memory, sm_100 has 512")])
def test_compile_reports_too_much_tensor_memory(monkeypatch: pytest.MonkeyPatch, columns: int, fault: str) -> None:
    """Triton compiles kernels that need more tensor memory than there is, and fails when they are launched."""
    gate = importlib.import_module("penstock.kernels.compile")
    made = SimpleNamespace(asm={"cubin": b""}, metadata=SimpleNamespace(shared=0, tmem_size=columns))
    monkeypatch.setattr(gate, "_compiled", lambda compilation, target: made)
    monkeypatch.setattr(gate, "_cuda_usage", lambda binary: (32, 0))
    [target] = [target for target in gate.TARGETS if target.name == "sm_100"]
    assert gate.build(SimpleNamespace(name="one", hot=True), target).fault == fault


def test_documentation_names_every_module_of_kernels() -> None:
    gate = importlib.import_module("penstock.kernels.compile")
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    modules = {f"{one.kernel.fn.__module__.rpartition('.')[2]}.py" for one in gate.gather()}
    assert "fused_norm.py" in modules
    assert not {module for module in modules if f"`{module}`" not in page}


def test_make_kernels_runs_the_compilation() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    process = subprocess.run(["make", "-n", "kernels"], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert "-m penstock.kernels.compile" in process.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_noise_contracts_no_product_with_a_sum(compiled_code: dict[str, list[str]]) -> None:
    """That makes it bit-identical on all devices. Neither Triton nor ptxas contracts, not even where they may: some versions of
    ptxas do not ask."""
    assert [line.split(" ", 2)[2] for line in compiled_code["exact"]] == ["False False True"] * 8, compiled_code


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_logits_are_loaded_four_at_a_time_with_and_without_grammar_masks(compiled_code: dict[str, list[str]]) -> None:
    """A program's 4,096 logits, by 256 threads."""
    assert compiled_code["vector loads"] == ["True 4"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_hopper_attention_overlaps_exponentials_with_the_product_with_values(compiled_code: dict[str, list[str]]) -> None:
    """In the unmasked loops of both consumers, exponentials (e) come after the wait for logits (|) and before the wait for the
    product with values. Nothing is spilled there (l), and products (p) are not waited for one by one."""
    assert compiled_code["overlap"].count("p|e|") == 2, compiled_code["overlap"]
