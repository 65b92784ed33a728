"""The rules in docs/architecture.md hold: which package may import which, which may read the environment, and that the
functions on a request's way exist.

Imports inside functions and under TYPE_CHECKING count like any other: they hide an import cycle, they don't remove it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("proto", "kernels", "shard", "router", "launcher", "demo", "simulator", "bench")

# What the modules of a package may import from penstock, beside their own package; a name includes its submodules.
ALLOWED: dict[str, tuple[str, ...]] = {
    "proto": (),
    "kernels": (),
    "shard": ("proto", "kernels"),
    "router": ("proto",),
    "launcher": (
        *("proto", "router.config", "shard.config", "shard.graph_sizes"),
        *(
            "shard.models.families",
            "shard.models.draft_families",
            "shard.models.readout_families",
            "shard.models.shape",
            "bench.command",
        ),
    ),
    "demo": (),
    "bench": (),
    "simulator": ("router.scheduler", "router.policies", "router.cost", "router.admission"),
}
# Libraries that a package must not import. What the launcher imports of the shard must not import torch either: see the last test.
FORBIDDEN_LIBRARIES: dict[str, tuple[str, ...]] = {
    "router": ("torch", "transformers", "triton"),
    "launcher": ("torch", "transformers", "triton"),
    "simulator": ("torch", "transformers", "triton", "grpc", "aiohttp"),
    "bench": ("torch", "transformers", "triton", "grpc", "tokenizers"),
    "proto": ("torch", "transformers", "triton"),
    "kernels": ("transformers", "grpc"),
    "shard": ("transformers", "aiohttp", "tokenizers"),
}
# Modules that may import one nevertheless, in functions, for images: the router's separate image process (see the last test), and
# the vision encoder.
LIBRARY_EXCEPTIONS: dict[str, tuple[str, ...]] = {"router.pixels": ("transformers",), "shard.models.vision": ("transformers",)}
# Terms of the shard's bookkeeping. Kernels only know tensors: none of their classes and parameters may have such a name.
SEQUENCE_WORDS = ("sequence", "sequences", "group", "groups", "batch", "request", "requests", "pagepool", "pool")


def modules(root: Path) -> dict[str, Path]:
    """Every module of the packages, by its dotted name within penstock."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: Iterable[str]) -> Iterator[str]:
    """What module `name` imports: penstock's modules by name within the package (the deepest known one), others by full name."""
    known = set(known)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("penstock.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *base.split(".")]).strip(".")
            base = base.removeprefix("penstock").strip(".") if base.split(".")[0] == "penstock" else base
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                yield inner if inner in known or not base else base


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(root: Path) -> list[str]:
    """Every violation of the rules in the tree under `root`, one line each."""
    known = modules(root)
    violations_found = []
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        own_package = name.split(".")[0]
        for target in imports(name, path, known):
            target_package = target.split(".")[0]
            if target_package not in PACKAGES:
                violations_found += [
                    f"{name} imports {target}"
                    for package in FORBIDDEN_LIBRARIES.get(own_package, ())
                    if covers(package, target) and package not in LIBRARY_EXCEPTIONS.get(name, ())
                ]
                continue
            if target_package != own_package and not any(covers(prefix, target) for prefix in ALLOWED[own_package]):
                violations_found.append(f"{name} imports {target}")
            if target in known and target != name:
                graph[name].add(target)
        violations_found += [
            f"{name} reads the environment" for _ in environment_reads(path) if own_package not in ("launcher", "demo")
        ]
        if own_package == "kernels":
            violations_found += [
                f"{name} knows {word}" for word in sorted(class_and_parameter_names(path)) if word.lower() in SEQUENCE_WORDS
            ]
    return violations_found + [f"circle: {' > '.join(cycle)}" for cycle in import_cycles(graph)]


def environment_reads(path: Path) -> Iterator[ast.AST]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            yield node
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (alias for alias in node.names if alias.name in ("environ", "environb", "getenv"))


def class_and_parameter_names(path: Path) -> set[str]:
    """The names of its classes and of its functions' parameters."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    return classes | {node.arg for node in nodes if isinstance(node, ast.arg)}


def import_cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """One import cycle for each module that can be reached from itself; each cycle once."""
    seen: set[frozenset[str]] = set()
    for start in graph:
        paths = [[start]]
        visited = {start}
        while paths:
            path = paths.pop()
            for target in sorted(graph[path[-1]]):
                if target == start and frozenset(path) not in seen:
                    seen.add(frozenset(path))
                    yield [*path, start]
                elif target not in visited:
                    visited.add(target)
                    paths.append([*path, target])


def test_no_module_violates_the_layer_rules() -> None:
    assert violations(ROOT) == []


def test_every_package_has_modules_that_are_checked() -> None:
    assert {name.split(".")[0] for name in modules(ROOT)} == set(PACKAGES)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"router/batcher.py": "from ..shard import engine"}, "router.batcher imports shard"),
        ({"router/batcher.py": "from ..shard import config", "shard/config.py": ""}, "router.batcher imports shard.config"),
        ({"router/text.py": "import penstock.shard.config"}, "router.text imports shard.config"),
        ({"router/text.py": "import torch"}, "router.text imports torch"),
        ({"router/text.py": "def load():\n    from transformers import AutoTokenizer"}, "router.text imports transformers"),
        ({"router/api/app.py": "from ...kernels import norm"}, "router.api.app imports kernels"),
        ({"shard/engine.py": "from ..router import request"}, "shard.engine imports router"),
        ({"shard/engine.py": "from penstock.router.request import Token"}, "shard.engine imports router.request"),
        ({"shard/engine.py": "from ..launcher.plan import Plan"}, "shard.engine imports launcher.plan"),
        ({"kernels/norm.py": "from ..shard.sequence import Sequence"}, "kernels.norm imports shard.sequence"),
        ({"kernels/norm.py": "from ..proto import rpc"}, "kernels.norm imports proto"),
        ({"kernels/norm.py": "class Batch:\n    pass"}, "kernels.norm knows Batch"),
        ({"kernels/norm.py": "def norm(group):\n    pass"}, "kernels.norm knows group"),
        ({"proto/rpc.py": "from ..router import config"}, "proto.rpc imports router"),
        ({"launcher/plan.py": "from ..shard.models import decoder"}, "launcher.plan imports shard.models"),
        ({"launcher/plan.py": "from .. import router"}, "launcher.plan imports router"),
        ({"demo/train.py": "from ..shard.config import ShardConfig"}, "demo.train imports shard.config"),
        (
            {"simulator/replay.py": "from ..router import batcher", "router/batcher.py": ""},
            "simulator.replay imports router.batcher",
        ),
        ({"router/scheduler.py": "from ..simulator.shard import Asked"}, "router.scheduler imports simulator.shard"),
        ({"shard/cache.py": "import os\nx = os.environ['X']"}, "shard.cache reads the environment"),
        ({"router/text.py": "import os\nx = os.getenv('X')"}, "router.text reads the environment"),
        ({"proto/rpc.py": "from os import environ"}, "proto.rpc reads the environment"),
        ({"shard/a.py": "from . import b", "shard/b.py": "from .a import x"}, "circle: shard.a > shard.b > shard.a"),
        (
            {
                "router/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x",
                "router/b.py": "def f():\n    from .c import y",
                "router/c.py": "from . import a",
            },
            "circle: router.a > router.b > router.c > router.a",
        ),
    ],
)
def test_planted_violation_is_reported(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert violations(tmp_path) == [expected]


def defined(path: Path) -> set[str]:
    """The functions, classes and Class.methods that a module defines."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            methods = (item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {node.name, *(f"{node.name}.{name}" for name in methods)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def test_functions_on_a_requests_way_in_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", page)
    assert len(steps) > 20
    for path, names in steps:
        assert set(re.findall(r"`([\w.]+)`", names)) <= defined(ROOT / path), path


def test_allowed_imports_are_not_reported(tmp_path: Path) -> None:
    files = {
        "proto/rpc.py": "import grpc",
        "kernels/norm.py": "import torch\nfrom . import reference",
        "kernels/reference.py": "import torch",
        "shard/config.py": "",
        "shard/engine.py": "import torch\nfrom ..kernels import norm\nfrom ..proto.rpc import Stub\nfrom . import config",
        "router/config.py": "",
        "router/shards.py": "from ..proto import rpc",
        "launcher/cli.py": "import os\nfrom ..router.config import RouterConfig\nfrom ..shard import config\nx = os.environ",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    "module", ["penstock.router.__main__", "penstock.launcher.cli", "penstock.simulator.command", "penstock.bench.command"]
)
def test_entry_point_does_not_import_torch_transformers_triton_or_scipy(module: str) -> None:
    """The same rule at run time: also finds what libraries import indirectly."""
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers', 'triton', 'scipy') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "[]\n", answer.stderr
