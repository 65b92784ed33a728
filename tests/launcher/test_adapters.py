"""`--lora-adapters`: adapters are found or refused in one line, planned in memory, and passed on to router and shards."""

import re
from pathlib import Path

import huggingface_hub
import pytest

from penstock.launcher import adapters, checkpoint, children, hub, plan
from penstock.launcher.adapters import parse, resolve
from penstock.launcher.errors import UsageError
from penstock.launcher.machine import Machine
from penstock.launcher.options import Options
from penstock.launcher.replicas import Place
from penstock.tests.shard import lora

DEMO = checkpoint.read(hub.DEMO_FOLDER, "auto")
MACHINE = Machine(cores=2, memory=1 << 32, fast_bfloat16=False)


def test_flag_is_parsed_into_names_and_sources() -> None:
    assert parse("") == parse(" , ") == {}
    assert parse("a/b, c=/folder ,d=e/f@main") == {"a/b": "a/b", "c": "/folder", "d": "e/f@main"}
    assert parse("a/b@v2,/x/a/b@c") == {"a/b": "a/b@v2", "/x/a/b@c": "/x/a/b@c"}
    assert parse("sql=/runs/lr=0.1/last") == {"sql": "/runs/lr=0.1/last"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a=", "--lora-adapters a=: NAME=FOLDER, NAME=OWNER/MODEL or OWNER/MODEL is needed"),
        ("=a", "--lora-adapters =a: NAME=FOLDER"),
        ("a b=c", "names without spaces"),
        ("a=b,a=c", "--lora-adapters names a twice: give one of them another name, NAME=c"),
        ("a/b@1,a/b@2", "--lora-adapters names a/b twice: give one of them another name, NAME=a/b@2"),
        ("model=/x", "--lora-adapters model: the model is called so itself"),
        ("a=/nowhere/at/all", "--lora-adapters a: no folder /nowhere/at/all"),
        ("a=/tmp@v2", "--lora-adapters a: /tmp is no model of the hub, and has no revisions: leave @v2 out"),
        (f"a={hub.DEMO_FOLDER}", "--lora-adapters a: .* has no adapter_config.json: is it an adapter's folder"),
    ],
)
def test_invalid_adapters_are_refused_in_one_line(text: str, error: str) -> None:
    with pytest.raises(UsageError, match=rf"^{error}" if error.startswith("--") else error):
        resolve(Options(lora_adapters=text), "model")


def test_router_alone_refuses_an_adapter_with_the_models_name() -> None:
    with pytest.raises(UsageError, match="the model is called so itself"):
        children.router_config(Options(lora_adapters="model=/x"), "model", hub.DEMO_FOLDER, [])


@pytest.fixture
def adapter_folder(tmp_path: Path) -> Path:
    return lora.adapter(hub.DEMO_FOLDER, tmp_path / "mine", 1, rank=8)


def test_adapters_in_folders_are_planned_and_reach_the_settings(adapter_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(adapter_folder.parent)
    options = Options(lora_adapters=f"first=mine,second={adapter_folder}")
    resolved = resolve(options, "model")
    assert [(one.name, one.folder) for one in resolved] == [("first", adapter_folder), ("second", adapter_folder)]
    planned, without_adapters = plan.divide(options, DEMO, MACHINE, changes=resolved), plan.divide(options, DEMO, MACHINE)
    assert planned.adapter_bytes == 2 * 2 * resolved[0].elements * plan.ITEM_BYTES[planned.dtype]
    assert re.search(r"\n  adapters +[\d.]+ [KM]iB  at most\n", plan.table(planned, "x"))
    assert "adapters" not in plan.table(without_adapters, "x")
    [shard] = children.shard_configs(options, "name", planned, Place(0, True, ["a"], "r", "m", (), {}), loras=resolved)
    assert shard.adapters == (("first", str(adapter_folder)), ("second", str(adapter_folder)))
    assert children.router_config(options, "name", hub.DEMO_FOLDER, []).adapters == ("first", "second")


def test_max_loras_plans_memory_for_adapters_loaded_later(adapter_folder: Path) -> None:
    options = Options(lora_adapters=f"first={adapter_folder}", max_loras=3, max_lora_rank=32)
    resolved = resolve(options, "model")
    planned = plan.divide(options, DEMO, MACHINE, changes=resolved)
    assert planned.adapter_bytes == 3 * 32 * planned.shape.adapted(1) * plan.ITEM_BYTES[planned.dtype]
    [shard] = children.shard_configs(options, "name", planned, Place(0, True, ["a"], "r", "m", (), {}), loras=resolved)
    assert (shard.max_loras, shard.max_lora_rank) == (3, 32)
    router = children.router_config(options, "name", hub.DEMO_FOLDER, [])
    assert (router.adapters, router.max_loras) == (("first",), 3)
    too_few, error = (
        Options(lora_adapters=f"first={adapter_folder},second={adapter_folder}", max_loras=1),
        "1 is less than the 2 that --lora-adapters names",
    )
    with pytest.raises(UsageError, match=error):
        resolve(too_few, "model")
    with pytest.raises(UsageError, match=error):
        children.router_config(too_few, "name", hub.DEMO_FOLDER, [])


def test_broken_adapter_folders_are_refused(adapter_folder: Path) -> None:
    (adapter_folder / lora.WEIGHTS).write_bytes(b"nothing to be read")
    with pytest.raises(UsageError, match=r"^--lora-adapters a: .* is no safetensors file, or is cut short: download it again"):
        resolve(Options(lora_adapters=f"a={adapter_folder}"), "model")
    (adapter_folder / lora.WEIGHTS).unlink()
    with pytest.raises(UsageError, match=r"^--lora-adapters a: .* has no adapter_model.safetensors: save it with peft"):
        resolve(Options(lora_adapters=f"a={adapter_folder}"), "model")
    assert resolve(Options(lora_adapters=f"a={adapter_folder}"), "model", weights=False)[0].elements == 0


def test_digests_differ_by_content(adapter_folder: Path, tmp_path: Path) -> None:
    """Nodes compare digests, as all of them must have the same adapters."""
    other = lora.adapter(hub.DEMO_FOLDER, tmp_path / "other", 2, rank=4)
    digests = [
        resolve(Options(lora_adapters=f"a={folder}"), "model")[0].digest for folder in (adapter_folder, adapter_folder, other)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_adapters_on_the_hub_are_downloaded_in_their_revision(adapter_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def download(repository: str, revision: str | None, **more: object) -> str:
        requests.append((repository, revision))
        return str(adapter_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolved = resolve(Options(lora_adapters="some/adapter,b=some/other@v2,some/third@v3"), "model")
    assert requests == [("some/adapter", None), ("some/other", "v2"), ("some/third", "v3")]
    assert adapters.names(resolved) == (
        ("some/adapter", str(adapter_folder)),
        ("b", str(adapter_folder)),
        ("some/third", str(adapter_folder)),
    )


@pytest.mark.parametrize("weights", [True, False])
def test_only_the_adapters_files_are_downloaded(weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that naming a whole model by mistake fails soon, before its weights are downloaded."""
    patterns = []

    def download(repository: str, revision: str | None, allow_patterns: list[str], **more: object) -> str:
        patterns.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UsageError, match=r"^--lora-adapters some/model: .* has no adapter_config.json"):
        resolve(Options(lora_adapters="some/model"), "model", weights)
    assert patterns == ["adapter_config.json", "adapter_model.safetensors"][: 1 + weights]
