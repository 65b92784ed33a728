"""Which models are served with images, the memory planned for their image encoder, and the settings of router and shards."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch

from penstock.launcher import checkpoint, children, option_types, plan, vision
from penstock.launcher.checkpoint import Checkpoint
from penstock.launcher.errors import UsageError
from penstock.launcher.machine import Machine
from penstock.launcher.options import Options
from penstock.proto import images, rpc

from ..shard.vision_models import make_model

MACHINE = Machine(cores=2, memory=1 << 30, fast_bfloat16=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_folder = tmp_path_factory.mktemp("model")
    make_model("Qwen2_5_VL", model_folder)
    (model_folder / "tokenizer.json").write_text("{}")
    return model_folder


@pytest.fixture
def model(folder: Path) -> Checkpoint:
    return checkpoint.read(folder, "auto")


def test_images_are_taken_by_default_if_the_model_has_an_encoder(model: Checkpoint) -> None:
    assert vision.resolve(Options(), model) == vision.Vision(8)
    assert vision.resolve(Options(max_images=3), model) == vision.Vision(3)
    assert vision.resolve(Options(max_images=0), model) == vision.Vision()
    assert vision.resolve(Options(), replace(model, random=True, encoder={})) == vision.Vision(8)


def test_images_larger_than_a_message_are_refused(model: Checkpoint) -> None:
    with pytest.raises(UsageError, match=r"-images 8 and --max-image-pixels 10000000 are 240000000 bytes .* lower one of them"):
        vision.resolve(Options(max_image_pixels=10_000_000), model)
    assert vision.resolve(Options(max_image_pixels=10_000_000, max_images=2), model).images == 2
    assert all(length >= 2 * images.MOST for _, length in rpc.OPTIONS)


def test_image_limit_of_models_with_a_fixed_image_size(model: Checkpoint) -> None:
    """Their size is set by the model, not by --max-image-pixels."""
    gemma = replace(model, config={"model_type": "gemma3", "vision_config": {"image_size": 896}})
    assert vision.resolve(Options(max_images=50, max_image_pixels=100), gemma).images == 50
    with pytest.raises(UsageError, match=r"images 60 and the model's 802816 pixels of each are 144506880 bytes .* lower the first"):
        vision.resolve(Options(max_images=60, max_image_pixels=100), gemma)
    assert "image_size None" in vision.resolve(Options(), replace(gemma, config={"model_type": "gemma3", "vision_config": {}})).why


def test_text_models_take_no_images() -> None:
    text = Checkpoint(folder=Path(), config={"model_type": "llama"}, dtype="float32", bytes=0, files=1)
    assert vision.resolve(Options(), text) == vision.Vision()
    with pytest.raises(
        UsageError, match=r"--max-images 2, but images are seen by models of type .*gemma3, .*'llama'.*--max-images 0"
    ):
        vision.resolve(Options(max_images=2), text)


def test_missing_encoder_or_packages_turn_images_off_with_a_reason(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is served all the same, and the reason is reported."""
    for other, reason in (
        (replace(model, encoder={}), "no weights of what encodes images"),
        (replace(model, encoder={"F8_E4M3": 3}), "weights of kind F8_E4M3"),
        (replace(model, folder=tmp_path), "no preprocessor_config.json"),
        (replace(model, config=model.config | {"model_type": "kimi_k25"}), "this one is 'kimi_k25'"),
    ):
        assert reason in vision.resolve(Options(), other).why
        assert not vision.resolve(Options(), other).images
        with pytest.raises(UsageError, match=reason):
            vision.resolve(Options(max_images=1), other)
    monkeypatch.setattr(vision, "find_spec", lambda name: None if name == "PIL" else find_spec(name))
    assert vision.resolve(Options(), model).why == "images need pillow: pip install -e '.[images]' in the checkout"


def test_image_limit_for_shards_started_separately(folder: Path, tmp_path: Path) -> None:
    """The folder of a router alone may have nothing but the tokenizer."""
    assert vision.of(Options(), folder) == 8
    assert vision.of(Options(max_images=0), folder) == 0
    assert vision.of(Options(), tmp_path) == 0
    assert vision.of(Options(max_images=0), tmp_path) == 0
    with pytest.raises(UsageError, match=r"config\.json"):
        vision.of(Options(max_images=1), tmp_path)


def test_router_knows_whether_max_images_was_set(folder: Path) -> None:
    for max_images, is_asked in ((None, False), (2, True)):
        assert children.router_config(Options(max_images=max_images), "name", folder, [], images=2).images_asked is is_asked
    assert not children.router_config(Options(max_images=0), "name", folder, []).images_asked


def test_image_encoder_is_planned_in_memory(folder: Path, model: Checkpoint) -> None:
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    encoder_bytes = sum(tensor.numel() for name, tensor in stored.items() if "visual." in name) * 4
    planned = plan.divide(Options(kv_pages=9), model, MACHINE)
    assert planned.vision.images == 8
    assert planned.encoder_bytes == encoder_bytes > 0
    assert "up to 8 of a request (--max-images)" in plan.table(planned, "name")
    without = plan.divide(Options(kv_pages=9, max_images=0), model, MACHINE)
    assert without.encoder_bytes == 0
    assert "images" not in plan.table(without, "name")
    half = plan.divide(Options(kv_pages=9, dtype="bfloat16"), model, MACHINE)
    assert half.encoder_bytes == encoder_bytes // 2


def test_encoder_is_found_by_its_tensor_names_in_other_checkpoints(folder: Path, tmp_path: Path, model: Checkpoint) -> None:
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    assert "visual.merger.mlp.0.weight" in stored
    renamed = {f"model.{name}" if name.startswith("visual.") else name: tensor for name, tensor in stored.items()}
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors")
    assert checkpoint.read(tmp_path, "auto").encoder == model.encoder


def test_image_options_reach_the_router_settings(folder: Path, model: Checkpoint) -> None:
    options = Options(max_image_pixels=5000, image_hosts="none", kv_pages=9)
    router = children.router_config(options, "name", folder, [], images=8)
    assert (router.max_images, router.max_image_pixels, router.image_hosts) == (8, 5000, "none")
    assert router.payload_limit == 20_000_000
    assert children.router_config(options, "name", folder, []).max_images == 0
    assert children.router_config(options, "name", folder, []).payload_limit == 2_000_000
    with_payload_limit = Options(payload_limit=3)
    assert children.router_config(with_payload_limit, "name", folder, [], images=8).payload_limit == 3
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2_5_vl"


@pytest.mark.parametrize("text", ["public", "none", "a.example,10.0.0.1:8080", "[::1]:80,[::1]"])
def test_image_hosts_are_accepted(text: str) -> None:
    assert option_types.hosts(text) == text


@pytest.mark.parametrize("text", ["", "a b", "http://a.example", "a.example,", "::1", "a:b", "*.example"])
def test_invalid_image_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="public, none, or hosts"):
        option_types.hosts(text)
