"""Which models are served with images, and with what that is planned."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch

from penstock.launcher import checkpoint, children, option_types, plan, vision
from penstock.launcher.checkpoint import Checkpoint
from penstock.launcher.machine import Machine
from penstock.launcher.mistake import Mistake
from penstock.launcher.options import Options
from penstock.proto import images, rpc

from ..shard.seeing import made

MACHINE = Machine(cores=2, memory=1 << 30, fast_bfloat16=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    made("Qwen2_5_VL", found)
    (found / "tokenizer.json").write_text("{}")
    return found


@pytest.fixture
def model(folder: Path) -> Checkpoint:
    return checkpoint.read(folder, "auto")


def test_by_default_where_it_can_be(model: Checkpoint) -> None:
    assert vision.resolve(Options(), model) == vision.Vision(8)
    assert vision.resolve(Options(max_images=3), model) == vision.Vision(3)
    assert vision.resolve(Options(max_images=0), model) == vision.Vision()
    assert vision.resolve(Options(), replace(model, random=True, encoder={})) == vision.Vision(8)


def test_more_than_fits_into_a_message(model: Checkpoint) -> None:
    with pytest.raises(Mistake, match=r"-images 8 and --max-image-pixels 10000000 are 240000000 bytes .* lower one of them"):
        vision.resolve(Options(max_image_pixels=10_000_000), model)
    assert vision.resolve(Options(max_image_pixels=10_000_000, max_images=2), model).images == 2
    assert all(length >= 2 * images.MOST for _, length in rpc.OPTIONS)


def test_images_of_one_size(model: Checkpoint) -> None:
    """Which the operator has no say in."""
    gemma = replace(model, config={"model_type": "gemma3", "vision_config": {"image_size": 896}})
    assert vision.resolve(Options(max_images=50, max_image_pixels=100), gemma).images == 50
    with pytest.raises(Mistake, match=r"images 60 and the model's 802816 pixels of each are 144506880 bytes .* lower the first"):
        vision.resolve(Options(max_images=60, max_image_pixels=100), gemma)
    assert "image_size None" in vision.resolve(Options(), replace(gemma, config={"model_type": "gemma3", "vision_config": {}})).why


def test_models_of_text_have_none() -> None:
    text = Checkpoint(folder=Path(), config={"model_type": "llama"}, dtype="float32", bytes=0, files=1)
    assert vision.resolve(Options(), text) == vision.Vision()
    with pytest.raises(Mistake, match=r"--max-images 2, but images are seen by models of type .*gemma3, .*'llama'.*--max-images 0"):
        vision.resolve(Options(max_images=2), text)


def test_why_not(model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is served all the same, and what is lacking is told."""
    for other, words in (
        (replace(model, encoder={}), "no weights of what encodes images"),
        (replace(model, encoder={"F8_E4M3": 3}), "weights of kind F8_E4M3"),
        (replace(model, folder=tmp_path), "no preprocessor_config.json"),
        (replace(model, config=model.config | {"model_type": "kimi_k25"}), "this one is 'kimi_k25'"),
    ):
        assert words in vision.resolve(Options(), other).why
        assert not vision.resolve(Options(), other).images
        with pytest.raises(Mistake, match=words):
            vision.resolve(Options(max_images=1), other)
    monkeypatch.setattr(vision, "find_spec", lambda name: None if name == "PIL" else find_spec(name))
    assert vision.resolve(Options(), model).why == "images need pillow: pip install -e '.[images]' in the checkout"


def test_for_shards_that_somebody_else_starts(folder: Path, tmp_path: Path) -> None:
    """The folder may have a tokenizer alone."""
    assert vision.of(Options(), folder) == 8
    assert vision.of(Options(max_images=0), folder) == 0
    assert vision.of(Options(), tmp_path) == 0
    assert vision.of(Options(max_images=0), tmp_path) == 0
    with pytest.raises(Mistake, match=r"config\.json"):
        vision.of(Options(max_images=1), tmp_path)


def test_who_asks_for_images_is_told_if_there_are_none(folder: Path) -> None:
    for given, said in ((None, False), (2, True)):
        assert children.router_config(Options(max_images=given), "name", folder, [], images=2).images_asked is said
    assert not children.router_config(Options(max_images=0), "name", folder, []).images_asked


def test_what_encodes_them_is_planned(folder: Path, model: Checkpoint) -> None:
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    bytes_of = sum(tensor.numel() for name, tensor in stored.items() if "visual." in name) * 4
    planned = plan.divide(Options(kv_pages=9), model, MACHINE)
    assert planned.vision.images == 8
    assert planned.sight_bytes == bytes_of > 0
    assert "up to 8 of a request (--max-images)" in plan.table(planned, "name")
    without = plan.divide(Options(kv_pages=9, max_images=0), model, MACHINE)
    assert without.sight_bytes == 0
    assert "images" not in plan.table(without, "name")
    half = plan.divide(Options(kv_pages=9, dtype="bfloat16"), model, MACHINE)
    assert half.sight_bytes == bytes_of // 2


def test_names_of_other_checkpoints_count(folder: Path, tmp_path: Path, model: Checkpoint) -> None:
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    assert "visual.merger.mlp.0.weight" in stored
    renamed = {f"model.{name}" if name.startswith("visual.") else name: tensor for name, tensor in stored.items()}
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors")
    assert checkpoint.read(tmp_path, "auto").encoder == model.encoder


def test_what_router_and_shards_are_told(folder: Path, model: Checkpoint) -> None:
    asked = Options(max_image_pixels=5000, image_hosts="none", kv_pages=9)
    router = children.router_config(asked, "name", folder, [], images=8)
    assert (router.max_images, router.max_image_pixels, router.image_hosts) == (8, 5000, "none")
    assert router.payload_limit == 20_000_000
    assert children.router_config(asked, "name", folder, []).max_images == 0
    assert children.router_config(asked, "name", folder, []).payload_limit == 2_000_000
    given = Options(payload_limit=3)
    assert children.router_config(given, "name", folder, [], images=8).payload_limit == 3
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2_5_vl"


@pytest.mark.parametrize("text", ["public", "none", "a.example,10.0.0.1:8080", "[::1]:80,[::1]"])
def test_hosts(text: str) -> None:
    assert option_types.hosts(text) == text


@pytest.mark.parametrize("text", ["", "a b", "http://a.example", "a.example,", "::1", "a:b", "*.example"])
def test_what_are_no_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="public, none, or hosts"):
        option_types.hosts(text)
