"""The ahead-of-time gate compiles what we have, and finds a kernel that spills or wants more shared memory than there is.

They are compiled by other processes: in this one they are interpreted."""

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

PLANTED = '''
import triton
import triton.language as tl
from penstock.kernels import compile
from penstock.kernels.compilation import Compilation


@triton.jit
def wide(x, SIZE: tl.constexpr):
    """Everything has to be there twice before anything is done with it."""
    place = tl.arange(0, SIZE)
    values = tl.load(x + place)
    tl.store(x + place, values / tl.sum(values * values, 0))


@triton.jit
def product(x, SIZE: tl.constexpr):
    """Both factors are [32, SIZE], and lie in shared memory whole."""
    low, long = tl.arange(0, 32), tl.arange(0, SIZE)
    left, right = tl.load(x + low[:, None] * SIZE + long[None, :]), tl.load(x + long[:, None] * 32 + low[None, :])
    tl.store(x + low[:, None] * 32 + low[None, :], tl.dot(left, right).to(tl.float16))


@triton.jit
def wrong(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.arange(0, 2 * SIZE))


def planted(kernel, pointer, size, warps, hot):
    constants = {"SIZE": size}
    return Compilation(kernel=kernel, name=kernel.__name__, signature={"x": pointer}, constants=constants, warps=warps, hot=hot)


compilations = [
    planted(wide, "*fp32", 16384, 1, True),
    planted(product, "*fp16", 2048, 4, False),
    planted(wrong, "*i32", 16, 1, False),
]
compile.gather = lambda: compilations
compile.TARGETS = [target for target in compile.TARGETS if target.name in ("sm_90", "gfx942")]
print(compile.main([]))
compilations[:] = [planted(wide, "*fp32", 16384, 1, False), planted(wide, "*fp32", 256, 1, True)]
print(compile.main([]))
'''


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=110)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_some_of_ours_compile() -> None:
    """One of each kind, and the smallest heads; `make kernels` does all."""
    kinds = "norm add 4096", "rotary and write 128 bf16", "swiglu bf16", "slot move bf16", "attend one 8 "
    answer = run("-m", "penstock.kernels.compile", *kinds)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[-1].startswith("12 kernels, 5 targets, 0 faults")  # rotary with an fp8 cache, two early, too
    assert len(answer.stdout.splitlines()) == 2 + 5 * 6 + 3 + 3 + 3 + 5  # these have fewer targets


CODE = """
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
import triton
from penstock.kernels import compile, paged_attention

kernels = compile.gather()
[hopper] = [target for target in compile.TARGETS if target.name == "sm_90"]
for one in kernels:
    if one.early:
        code = compile._compiled(one, hopper).asm["ptx"]
        before, after = code.split("griddepcontrol.wait")
        touches = [word for word in ("ld.global", "st.global", "cp.async", "atom", "red.global") if word in before]
        launches = "griddepcontrol.launch_dependents" in code
        print("early:", one.name, launches, "st.global" in after, touches)
        if one.name in ("vector gated early", "product down early 32"):
            print("asked:", before.count("prefetch.global.L2"), after.count("prefetch.global.L2"))
    if one.name in ("sampling draw", "sampling weigh"):
        print("wide:", one.constants["MASKED"], compile._compiled(one, hopper).asm["ptx"].count("ld.global.v4.b32"))
    if one.name in ("product down 16", "product vocabulary 32", "product output 64", "product gated 16"):
        code = compile._compiled(one, hopper).asm["ptx"]
        print("units:", "wgmma.mma_async" in code, "mma.sync" in code, "cp.async.cg" in code, code.count("ld.global"))

for more in ({}, {"softcap": 50.0}, {"window": 4096}, {"softcap": 50.0, "window": 4096}):
    one = paged_attention._compilation(1, 128, 9, **more)  # the one tile where nothing may depend on the batch
    code = compile._compiled(one, hopper).asm["ptx"]
    loops = re.findall(r"^([$]L\\w+):(.*?)bra(?:[.]uni)?\\s+\\1;", code, re.DOTALL | re.MULTILINE)
    bodies = [body for _, body in loops if "ex2" in body]
    counts = [Counter(re.findall(r"^\\s+((?:fma|sub|mul|add)[.\\w]*f32)", body, re.MULTILINE)) for body in bodies]
    print("loops:", one.name, len(counts), all(found == counts[0] for found in counts), counts[0]["fma.rn.f32"] > 8)

[one] = [one for one in kernels if one.name == "sampling draw"]
for fuse in (one.fuse, True):
    for target in compile.TARGETS:
        if target.gpu.backend == "cuda":
            made = compile._compiled(replace(one, fuse=fuse), target)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(made.asm["cubin"])
                file.flush()
                code = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True).stdout
            told = made.asm["ptx"]
            products = len(re.findall(r"\\bmul(?:\\.rn)?\\.f32", told)), len(re.findall(r"\\bFMUL2?\\b", code))
            divides = bool(re.search("div.(full|approx)", told))
            print("exact:", target.name, fuse, "fma" in told, divides, products[1] >= products[0] > 0)

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
            print("apart:", re.sub(r"(.)\\1+", r"\\1", marks))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What is looked for in compiled code, in lines by their first word. One process finds all: starting it takes seconds."""
    answer = run("-c", CODE)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = [line.split(": ", 1) for line in answer.stdout.splitlines()]
    words = "early", "asked", "wide", "units", "exact", "loops", "apart"
    return {word: [line for first, line in found if first == word] for word in words}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_kernels_that_begin_early_touch_nothing_before_the_others_are_over(told: dict[str, list[str]]) -> None:
    assert len(told["early"]) >= 7, told
    for line in told["early"]:
        assert line.endswith("True True []"), line
    # Lines that each of 128 threads asks for while it waits: of 4 KB of 64 outputs, and of 4 of two weights.
    assert sorted(told["asked"]) == ["16 0", "2 0"]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_keys_are_added_up_alike_whether_some_are_hidden_or_none(told: dict[str, list[str]]) -> None:
    """Which loop of attention a key is in goes by how a prompt is cut: what is contracted in one must be in all."""
    for line, more in zip(told["loops"], (2, 2, 3, 3), strict=True):
        assert line.endswith(f" {more} True True"), line


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_products_of_few_rows_go_by_hoppers_units_without_a_detour(told: dict[str, list[str]]) -> None:
    """Which take both operands from shared memory, where copies have put them: nothing goes through registers."""
    assert told["units"] == ["True False True 0"] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_planted_faults_are_found(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(PLANTED)
    answer = run(str(path))
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    found = {(line.split()[0], line.split()[1]): line for line in lines[1:7]}
    for target in ("sm_90", "gfx942"):
        assert f"bytes of shared memory, {target} has" in found["product", target]
        assert "does not compile" in found["wrong", target]
    assert "spills" in found["wide", "sm_90"]
    # gfx942 has twice the registers: enough for this one, not for the product.
    assert "spills" not in found["wide", "gfx942"]
    assert int(found["product", "gfx942"].split()[3]) > 0
    assert lines[7].startswith("3 kernels, 2 targets, 5 faults")
    assert lines[8] == "1"
    # Spills are allowed where a kernel is not hot, and a small one has none.
    assert lines[-2].startswith("2 kernels, 2 targets, 0 faults")
    assert lines[-1] == "0"


@pytest.mark.parametrize(("columns", "fault"), [(512, ""), (1024, "1024 columns of tensor memory, sm_100 has 512")])
def test_tensor_memory_is_looked_at(monkeypatch: pytest.MonkeyPatch, columns: int, fault: str) -> None:
    """Triton compiles what needs more than there is, and fails when it is launched."""
    gate = importlib.import_module("penstock.kernels.compile")
    made = SimpleNamespace(asm={"cubin": b""}, metadata=SimpleNamespace(shared=0, tmem_size=columns))
    monkeypatch.setattr(gate, "_compiled", lambda compilation, target: made)
    monkeypatch.setattr(gate, "_cuda_usage", lambda binary: (32, 0))
    [target] = [target for target in gate.TARGETS if target.name == "sm_100"]
    assert gate.build(SimpleNamespace(name="one", hot=True), target).fault == fault


def test_make_knows_it() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    answer = subprocess.run(["make", "-n", "kernels"], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert "-m penstock.kernels.compile" in answer.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_noise_is_rounded_as_it_is_written(told: dict[str, list[str]]) -> None:
    """That is what makes it the same on every device: no product is contracted with a sum, neither by Triton nor by ptxas, not even
    where they may: there are versions of ptxas that don't ask."""
    assert [line.split(" ", 2)[2] for line in told["exact"]] == ["False False True"] * 8, told


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_logits_are_loaded_four_at_a_time_behind_a_grammar_too(told: dict[str, list[str]]) -> None:
    """A program's 4,096, by 256 threads."""
    assert told["wide"] == ["True 4"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_exponentials_are_taken_while_values_are_multiplied(told: dict[str, list[str]]) -> None:
    """In both consumers' loops, where nothing is hidden: behind the wait for logits (|), before that for the product with values.
    Nothing is spilled there, and products (p) are not waited for one by one."""
    assert told["apart"].count("p|e|") == 2, told["apart"]
