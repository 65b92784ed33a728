"""--lora-adapters: what it names is found, or said in one line not to be there; processes are told, and memory is planned."""

import re
from pathlib import Path

import huggingface_hub
import pytest

from penstock.launcher import adapters, checkpoint, children, hub, plan
from penstock.launcher.adapters import parse, resolve
from penstock.launcher.machine import Machine
from penstock.launcher.mistake import Mistake
from penstock.launcher.options import Options
from penstock.launcher.replicas import Place
from penstock.tests.shard import lora

DEMO = checkpoint.read(hub.DEMO_FOLDER, "auto")
MACHINE = Machine(cores=2, memory=1 << 32, fast_bfloat16=False)


def test_names_and_sources() -> None:
    assert parse("") == parse(" , ") == {}
    assert parse("a/b, c=/folder ,d=e/f@main") == {"a/b": "a/b", "c": "/folder", "d": "e/f@main"}
    assert parse("a/b@v2,/x/a/b@c") == {"a/b": "a/b@v2", "/x/a/b@c": "/x/a/b@c"}
    assert parse("sql=/runs/lr=0.1/last") == {"sql": "/runs/lr=0.1/last"}


@pytest.mark.parametrize(
    ("text", "words"),
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
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(Mistake, match=rf"^{words}" if words.startswith("--") else words):
        resolve(Options(lora_adapters=text), "model")


def test_a_router_alone_refuses_the_models_name_as_well() -> None:
    with pytest.raises(Mistake, match="the model is called so itself"):
        children.router_config(Options(lora_adapters="model=/x"), "model", hub.DEMO_FOLDER, [])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return lora.adapter(hub.DEMO_FOLDER, tmp_path / "mine", 1, rank=8)


def test_a_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.parent)
    asked = Options(lora_adapters=f"first=mine,second={place}")
    found = resolve(asked, "model")
    assert [(one.name, one.folder) for one in found] == [("first", place), ("second", place)]
    planned, usual = plan.divide(asked, DEMO, MACHINE, changes=found), plan.divide(asked, DEMO, MACHINE)
    assert planned.adapter_bytes == 2 * 2 * found[0].elements * plan.ITEM_BYTES[planned.dtype]
    assert re.search(r"\n  adapters +[\d.]+ [KM]iB  at most\n", plan.table(planned, "x"))
    assert "adapters" not in plan.table(usual, "x")
    [shard] = children.shard_configs(asked, "name", planned, Place(0, True, ["a"], "r", "m", (), {}), loras=found)
    assert shard.adapters == (("first", str(place)), ("second", str(place)))
    assert children.router_config(asked, "name", hub.DEMO_FOLDER, []).adapters == ("first", "second")


def test_room_for_others(place: Path) -> None:
    asked = Options(lora_adapters=f"first={place}", max_loras=3, max_lora_rank=32)
    found = resolve(asked, "model")
    planned = plan.divide(asked, DEMO, MACHINE, changes=found)
    assert planned.adapter_bytes == 3 * 32 * planned.shape.adapted(1) * plan.ITEM_BYTES[planned.dtype]
    [shard] = children.shard_configs(asked, "name", planned, Place(0, True, ["a"], "r", "m", (), {}), loras=found)
    assert (shard.max_loras, shard.max_lora_rank) == (3, 32)
    router = children.router_config(asked, "name", hub.DEMO_FOLDER, [])
    assert (router.adapters, router.max_loras) == (("first",), 3)
    few, words = (
        Options(lora_adapters=f"first={place},second={place}", max_loras=1),
        "1 is less than the 2 that --lora-adapters names",
    )
    with pytest.raises(Mistake, match=words):
        resolve(few, "model")
    with pytest.raises(Mistake, match=words):
        children.router_config(few, "name", hub.DEMO_FOLDER, [])


def test_broken_folders(place: Path) -> None:
    (place / lora.WEIGHTS).write_bytes(b"nothing to be read")
    with pytest.raises(Mistake, match=r"^--lora-adapters a: .* is no safetensors file, or is cut short: download it again"):
        resolve(Options(lora_adapters=f"a={place}"), "model")
    (place / lora.WEIGHTS).unlink()
    with pytest.raises(Mistake, match=r"^--lora-adapters a: .* has no adapter_model.safetensors: save it with peft"):
        resolve(Options(lora_adapters=f"a={place}"), "model")
    assert resolve(Options(lora_adapters=f"a={place}"), "model", weights=False)[0].elements == 0


def test_other_contents_are_told_apart(place: Path, tmp_path: Path) -> None:
    """By nodes, which must have the same."""
    other = lora.adapter(hub.DEMO_FOLDER, tmp_path / "other", 2, rank=4)
    digests = [resolve(Options(lora_adapters=f"a={folder}"), "model")[0].digest for folder in (place, place, other)]
    assert digests[0] == digests[1] != digests[2]


def test_the_hub_is_asked_for_a_revision(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, revision: str | None, **more: object) -> str:
        asked.append((repository, revision))
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve(Options(lora_adapters="some/adapter,b=some/other@v2,some/third@v3"), "model")
    assert asked == [("some/adapter", None), ("some/other", "v2"), ("some/third", "v3")]
    assert adapters.names(found) == (("some/adapter", str(place)), ("b", str(place)), ("some/third", str(place)))


@pytest.mark.parametrize("weights", [True, False])
def test_of_a_model_on_the_hub_nothing_but_the_adapter_is_downloaded(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever names a whole model by mistake is told so soon."""
    taken = []

    def download(repository: str, revision: str | None, allow_patterns: list[str], **more: object) -> str:
        taken.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(Mistake, match=r"^--lora-adapters some/model: .* has no adapter_config.json"):
        resolve(Options(lora_adapters="some/model"), "model", weights)
    assert taken == ["adapter_config.json", "adapter_model.safetensors"][: 1 + weights]
