"""The image encoder: transformers' own modules of the model's family, with the checkpoint's weights. Every rank has all of it.

Each image is encoded by itself, so that its features depend on nothing else.
"""

from array import array
from collections.abc import Sequence as Listing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...kernels.transfer import to_device
from ...proto.images import COLOURS, image_format_of
from ...proto.processors import image_processor
from ..image_cache import MOST, ImageCache
from ..pictures import PromptImage, PromptImages
from ..weights import Source
from .encoders import ENCODERS
from .fields import AGAIN, Config
from .shape import Shape, Unsupported
from .vision_names import PARTS, VisionNames

REMEDY = "pip install -e '.[images]' in the checkout, or take --max-images 0, which serves text alone"


class Vision:
    """Turns images' pixels into features, which replace token embeddings."""

    def __init__(self, config: Config, folder: Path, source: Source, pixels: int, form: Shape) -> None:
        """pixels: the most of an image; form: the decoder's shape. Raises Unsupported."""
        found = image_format_of(config)
        assert found is not None
        self._form = found
        self._cache = ImageCache()
        self._whole = bool(form.whole_images)
        self._dtype = source.dtype
        self._model = _modules(config, folder)
        try:
            self._encoder = ENCODERS[config["model_type"]](self._model, pixels)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise Unsupported(
                f"config.json says nonsense of images ({_said(error)}): {AGAIN}; --max-images 0 does without"
            ) from None
        if self._encoder.turned and not form.rope.axes:
            raise Unsupported(
                f"config.json's mrope_section is not three numbers, of pairs of features that turn, all together: {AGAIN}"
            )
        self._load(source)
        self._factor, *colours = _rescaling(folder)
        self._mean, self._deviation = (torch.tensor(values, device=source.device).view(COLOURS, 1, 1) for values in colours)
        deep = getattr(self._model.config.vision_config, "deepstack_visual_indexes", None) or ()
        if len(deep) >= form.layers:
            raise Unsupported(f"config.json says deepstack_visual_indexes {[*deep]}, and there are {form.layers} layers: {AGAIN}")
        self._try(form.hidden)

    def _load(self, source: Source) -> None:
        config = self._model.config
        names = VisionNames(source, PARTS.get(config.model_type, ()), getattr(config.vision_config, "num_attention_heads", 0))
        wanted = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        try:
            found = {name: names.tensor(name, shape) for name, shape in wanted.items()}
        except Unsupported as error:
            raise Unsupported(f"{error}; --max-images 0 does without") from None
        self._model.load_state_dict(found, strict=False, assign=True)
        self._model.to(source.device)  # buffers, too

    @torch.inference_mode()
    def _try(self, hidden: int) -> None:
        """Encodes a blank image: modules that could be built may still contradict each other. Raises Unsupported."""
        try:
            blank = self.blank(1)
            tokens, _, size = self.encode(blank).shape
        except Exception as error:  # of many types
            raise Unsupported(
                f"what encodes images fails by config.json ({_said(error)}): {AGAIN}; --max-images 0 does without"
            ) from None
        if (tokens, size) != (blank.tokens, hidden):
            raise Unsupported(f"by config.json features of images have {size} numbers, and tokens {hidden}: {AGAIN}")

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return sum(tensor.nbytes for tensor in (*self._model.parameters(), *self._model.buffers()))

    @property
    def largest(self) -> int:
        """The most tokens of an image, without those that end rows."""
        return self._encoder.largest

    @property
    def whole(self) -> int:
        """The most tokens of an image where it must be computed in one step, because its tokens attend to each other; else 0."""
        return self.largest if self._whole else 0

    def blank(self, tokens: int) -> PromptImage:
        """A blank image of about so many tokens."""
        return self._encoder.blank(tokens)

    def places(self, images: Listing[PromptImage]) -> list[int] | None:
        """The positions of images' tokens in the prompt, ascending; None: images overlap, or their pixels don't fit their
        tokens."""
        found, end = list[int](), 0
        for image in images:
            assert image.pixels is not None
            if (
                image.start < end
                or not 0 < image.tokens <= self.largest
                or not self._encoder.fits(image, tuple(image.pixels.shape))
            ):
                return None
            own = self._placed(image)
            found += (place for place, _ in own.between(own.start, own.end))
            end = own.end
        return found

    def pictures(self, images: Listing[PromptImage], prompt: "array[int]", cache_key: str) -> PromptImages:
        """A prompt's images, keyed by the prompt's ids in their places. cache_key: computed features are shared among requests with
        the same one."""
        own = [self._placed(image) for image in images]
        for image in own:
            image.key = cache_key, prompt[image.start : image.end].tobytes()
        return PromptImages(own, self._encoder.turned, self._whole)

    def _placed(self, image: PromptImage) -> PromptImage:
        return replace(image, width=self._form.length(1, image.columns))

    @property
    def most(self) -> int:
        """Tokens of images whose features are cached."""
        return max(MOST, self.largest)

    def look(self, picture: PromptImage) -> Tensor:
        """An image's features, from the cache if it was encoded lately."""
        return self._cache.of(picture, self.encode)

    def encode(self, picture: PromptImage) -> Tensor:
        """Encodes an image to [tokens, levels, hidden]: what replaces its tokens' embeddings, and in some families what is added to
        the stream after each of the first layers (Qwen 3 VL's DeepStack: Meng et al. 2024, arXiv:2406.04334)."""
        assert picture.pixels is not None
        kind = self._encoder.normalizing
        pixels = to_device(picture.pixels, self._mean.device).to(kind)
        pixels = (pixels * self._factor - self._mean.to(kind)) / self._deviation.to(kind)
        return self._encoder(pixels.to(self._dtype), picture)


def _modules(config: Config, folder: Path) -> Any:
    """transformers' model without its language model; parameters have shapes, but no memory. Raises Unsupported."""
    transformers = _library()
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        known = f"transformers {transformers.__version__} knows no model_type {config['model_type']}"
        raise Unsupported(f"{folder}: {known}, whose images are to be seen: {REMEDY}")
    # Unlike the device "meta" this keeps buffers, of which no checkpoint has a copy.
    hook = register_module_parameter_registration_hook(_empty)  # type: ignore[arg-type]
    try:
        known = transformers.AutoConfig.for_model(**config)
        text = known.text_config
        text.num_hidden_layers, text.layer_types, text.pad_token_id = 0, [], 0
        for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):  # of the language model's layers, too
            if hasattr(text, name):
                setattr(text, name, 0)
        known.quantization_config = None
        if getattr(known, "audio_config", None) is not None:
            known.audio_config = None
        found = transformers.AutoModel.from_config(known, dtype=torch.float32).eval()
    except ImportError as error:
        raise Unsupported(f"{folder}: transformers can't make what encodes images ({_said(error)}): {REMEDY}") from None
    except Exception as error:  # of many types, for an inconsistent config.json
        raise Unsupported(
            f"{folder}: transformers can't make what encodes images ({_said(error)}): {AGAIN}; --max-images 0 does without"
        ) from None
    finally:
        hook.remove()
    delattr(found, "language_model" if hasattr(found, "language_model") else "text_model")
    return found


def _empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    return nn.Parameter(parameter.to("meta"), requires_grad=False) if parameter is not None else None


def _rescaling(folder: Path) -> tuple[float, list[float], list[float]]:
    """The factor of pixels, and the colours' means and deviations, as the image processor has them. Raises Unsupported."""
    library = _library()
    try:
        found = image_processor(library, folder)
        factor = float(found.rescale_factor) if found.do_rescale else 1.0
        if not found.do_normalize:
            return factor, [0.0] * COLOURS, [1.0] * COLOURS
        mean, deviation = ([float(value) for value in values] for values in (found.image_mean, found.image_std))
        if not len(mean) == len(deviation) == COLOURS:
            raise ValueError(f"image_mean and image_std must have {COLOURS} numbers each")
        return factor, mean, deviation
    except (ImportError, OSError, ValueError, TypeError, AttributeError) as error:
        raise Unsupported(f"{folder} does not say how pictures are prepared ({_said(error)}): {REMEDY}") from None


def _said(error: Exception) -> str:
    """The first lines of a library's message."""
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:2])


def _library() -> Any:
    """Imports transformers, which takes seconds, and is needed for images alone. Raises Unsupported."""
    try:
        import transformers
    except ImportError as error:
        raise Unsupported(f"images need transformers, which can't be imported ({error}): {REMEDY}") from None
    return transformers
