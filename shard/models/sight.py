"""What encodes images: transformers' own modules of the model's family, with the checkpoint's weights. Every rank has all of it.

An image is encoded by itself, so that its features depend on nothing else.
"""

import math
from array import array
from collections.abc import Sequence as Listing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...proto.images import COLOURS, FORMS
from ..gallery import MOST, Gallery
from ..pictures import Picture, Pictures
from ..weights import Source
from .fields import AGAIN, Config
from .shape import Shape, Unsupported

ROOTS = ("model.", "")  # what names of its tensors begin with: as transformers 5 saves them, and as most checkpoints have them
REMEDY = "pip install -e '.[images]' in the checkout, or take --max-images 0, which serves text alone"


class Sight:
    """From pixels to features."""

    def __init__(self, config: Config, folder: Path, source: Source, pixels: int, form: Shape) -> None:
        """pixels: the most of an image; form: the decoder's. Raises Unsupported."""
        self._form = FORMS[config["model_type"]]
        self._gallery = Gallery()
        self._pixels = pixels
        self._turned = bool(form.rope.axes)
        self._dtype = source.dtype
        self._model = _modules(config, folder)
        self._grid = hasattr(self._model, "visual")  # else by sizes in pixels
        if self._grid and not self._turned:
            raise Unsupported(
                f"config.json's mrope_section is not three numbers, of pairs of features that turn, all together: {AGAIN}"
            )
        self._load(source)
        self._factor, *colours = _rescaling(folder)
        self._mean, self._deviation = (torch.tensor(values, device=source.device).view(COLOURS, 1, 1) for values in colours)
        vision = self._model.config.vision_config
        self._merged = int(getattr(vision, "spatial_merge_size", 0) or self._model.config.spatial_merge_size)
        self._patch = int(vision.patch_size)
        self._frames = int(getattr(vision, "temporal_patch_size", 1))
        deep = getattr(vision, "deepstack_visual_indexes", None) or ()
        if len(deep) >= form.layers:
            raise Unsupported(f"config.json says deepstack_visual_indexes {[*deep]}, and there are {form.layers} layers: {AGAIN}")

    def _load(self, source: Source) -> None:
        wanted = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        try:
            found = {name: source.tensor(_stored(name, source), shape) for name, shape in wanted.items()}
        except Unsupported as error:
            raise Unsupported(f"{error}; --max-images 0 does without") from None
        self._model.load_state_dict(found, strict=False, assign=True)
        self._model.to(source.device)  # buffers, too

    @property
    def bytes(self) -> int:
        """What its weights take in memory."""
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()))

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Of the pixels of an image with so many tokens."""
        if not self._grid:
            side = self._patch * self._merged
            return 1, COLOURS, rows * side, columns * side
        return rows * columns * self._merged**2, COLOURS, self._patch, self._patch

    @property
    def largest(self) -> int:
        """The most tokens of an image, without what ends rows."""
        return max(1, self._pixels // (self._patch * self._merged) ** 2)

    def blank(self, tokens: int) -> Picture:
        """An image of about so many tokens, on which is nothing."""
        rows = max(1, math.isqrt(tokens))
        columns = max(1, tokens // rows)
        return Picture(0, rows, columns, columns, torch.zeros(self.shape(rows, columns), dtype=torch.uint8))

    def places(self, images: Listing[Picture]) -> list[int] | None:
        """Of their tokens in the prompt, ascending; None: they overlap, or are not as `shape` says."""
        found, end = list[int](), 0
        for image in images:
            assert image.pixels is not None
            if image.start < end or not image.rows or tuple(image.pixels.shape) != self.shape(image.rows, image.columns):
                return None
            own = self._placed(image)
            found += (place for place, _ in own.between(own.start, own.end))
            end = own.end
        return found

    def pictures(self, images: Listing[Picture], prompt: "array[int]", cache_key: str) -> Pictures:
        """Those of a prompt, whose ids say what they show. cache_key: only with the same one others find what is computed."""
        own = [self._placed(image) for image in images]
        for image in own:
            image.key = cache_key, prompt[image.start : image.end].tobytes()
        return Pictures(own, self._turned)

    def _placed(self, image: Picture) -> Picture:
        return replace(image, width=self._form.length(1, image.columns))

    @property
    def most(self) -> int:
        """Tokens of images whose features are kept."""
        return max(MOST, self.largest)

    def look(self, picture: Picture) -> Tensor:
        """Its features. They are kept for a while, since others may ask for them."""
        return self._gallery.of(picture, self.encode)

    def encode(self, picture: Picture) -> Tensor:
        """[tokens, levels, hidden]: what stands for their embeddings, and what is added to the stream behind each of the first
        layers, in families that do so (Qwen 3 VL's DeepStack: Meng et al. 2024, arXiv:2406.04334)."""
        assert picture.pixels is not None
        pixels = picture.pixels.to(self._mean.device, torch.float32)
        pixels = (pixels * self._factor - self._mean) / self._deviation
        return self._of_patches(pixels, picture) if self._grid else self._of_picture(pixels)

    def _of_patches(self, pixels: Tensor, picture: Picture) -> Tensor:
        """As Qwen's and GLM's have it, for which a picture is a film that stands still."""
        film = pixels.unsqueeze(2).repeat(1, 1, self._frames, 1, 1).flatten(1)
        grid = torch.tensor([[1, picture.rows * self._merged, picture.columns * self._merged]], device=pixels.device)
        found = self._model.get_image_features(film.to(self._dtype), image_grid_thw=grid)
        deeper = getattr(found, "deepstack_features", None) or ()
        return torch.stack([level[0] for level in (found.pooler_output, *deeper)], 1)

    def _of_picture(self, pixels: Tensor) -> Tensor:
        """As Mistral's have it. Not by get_image_features, which fails for one token (transformers 5.24)."""
        sizes = torch.tensor([pixels.shape[-2:]], device=pixels.device)
        said = self._model.config.vision_feature_layer
        hidden = self._model.vision_tower(pixels.to(self._dtype), image_sizes=sizes, output_hidden_states=True).hidden_states
        chosen = torch.cat([hidden[layer] for layer in ([said] if isinstance(said, int) else said)], -1)
        found: Tensor = self._model.multi_modal_projector(chosen[0], sizes)
        return found.unsqueeze(1)


def _modules(config: Config, folder: Path) -> Any:
    """transformers' model without its text; its parameters have shapes, and no memory. Raises Unsupported."""
    transformers = _library()
    # Unlike the device "meta" this leaves buffers as they are, of which no checkpoint has a copy.
    hook = register_module_parameter_registration_hook(_empty)  # type: ignore[arg-type]
    try:
        known = transformers.AutoConfig.for_model(**config)
        text = known.text_config
        text.num_hidden_layers, text.layer_types, text.pad_token_id = 0, [], None
        known.quantization_config = None
        found = transformers.AutoModel.from_config(known, dtype=torch.float32).eval()
    except Exception as error:  # it has many, for a config.json that is none of its own
        line = str(error).strip().partition("\n")[0]
        raise Unsupported(f"{folder}: transformers can't make what encodes images ({line}): {REMEDY}") from None
    finally:
        hook.remove()
    del found.language_model
    return found


def _empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    return nn.Parameter(parameter.to("meta"), requires_grad=False) if parameter is not None else None


def _rescaling(folder: Path) -> tuple[float, list[float], list[float]]:
    """What pixels are multiplied by, and the colours' means and deviations: as what makes pixels of pictures has them. Raises
    Unsupported."""
    library = _library()
    try:
        found = library.AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
        mean, deviation = ([float(value) for value in values] for values in (found.image_mean, found.image_std))
        if not len(mean) == len(deviation) == COLOURS:
            raise ValueError(f"image_mean and image_std must have {COLOURS} numbers each")
        return float(found.rescale_factor), mean, deviation
    except (ImportError, OSError, ValueError, TypeError, AttributeError) as error:
        line = str(error).strip().partition("\n")[0]
        raise Unsupported(f"{folder} does not say how pictures are prepared ({line}): {REMEDY}") from None


def _library() -> Any:
    """transformers. Takes seconds, and is for images alone. Raises Unsupported."""
    try:
        import transformers
    except ImportError as error:
        raise Unsupported(f"images need transformers, which can't be imported ({error}): {REMEDY}") from None
    return transformers


def _stored(name: str, source: Source) -> str:
    """What the checkpoint calls a tensor."""
    return next((root + name for root in ROOTS if source.has(root + name)), ROOTS[0] + name)
