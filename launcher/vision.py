"""Decides whether a model is served with images: whether it has an image encoder, and the packages for preprocessing are
installed."""

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..proto.images import COLOURS, DESCRIPTIONS, FORMS, MOST, image_format_of
from . import checkpoint
from .checkpoint import FLOATS, Checkpoint
from .errors import UsageError
from .options import ROUTER, Options

USUAL = 8  # images of a request, by default
PACKAGES = {"transformers": "transformers", "PIL": "pillow"}  # package names by the names of their modules
BODY = 10 * ROUTER.payload_limit  # bytes of a request's body where images are taken, in which they are base64 text


@dataclass(frozen=True, slots=True)
class Vision:
    """Whether a model is served with images."""

    images: int = 0  # most images of a request; 0: text alone is served
    why: str = ""  # why not, if somebody might expect images


def resolve(asked: Options, model: Checkpoint) -> Vision:
    """The images of `--max-images` for this model. Raises UsageError if it asks for what is not possible."""
    if asked.max_images == 0:
        return Vision()
    problem = _problem(model)
    if problem and asked.max_images:
        raise UsageError(f"--max-images {asked.max_images}, but {problem}; or take --max-images 0, which serves text alone")
    if problem:
        return Vision(why=problem if "vision_config" in model.config else "")
    images = USUAL if asked.max_images is None else asked.max_images
    pixels, said, lower = asked.max_image_pixels, f"--max-image-pixels {asked.max_image_pixels}", "one of them"
    form = image_format_of(model.config)
    if form and form.fixed:
        pixels = model.config["vision_config"]["image_size"] ** 2
        said, lower = f"the model's {pixels} pixels of each", "the first"
    if (needed := images * pixels * COLOURS) > MOST:
        raise UsageError(
            f"--max-images {images} and {said} are {needed} bytes together, and a request may have {MOST}: lower {lower}"
        )
    return Vision(images)


def of(asked: Options, folder: Path) -> int:
    """Most images of a request to shards that are started elsewhere; the folder has the model's tokenizer, and perhaps no more.
    Raises UsageError."""
    if asked.max_images == 0 or (asked.max_images is None and not (folder / "config.json").is_file()):
        return 0
    return resolve(asked, checkpoint.read(folder, "dummy")).images


def digest(folder: Path) -> str:
    """A hash of how the model in this folder has images preprocessed."""
    found = [path.read_bytes() if (path := folder / name).is_file() else b"" for name in DESCRIPTIONS]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _problem(model: Checkpoint) -> str:
    """Why no images can be taken; "": they can."""
    form = image_format_of(model.config)
    if not isinstance(model.config.get("vision_config"), dict) or form is None:
        return f"images are seen by models of type {', '.join(sorted(FORMS))}, and this one is {model.config.get('model_type')!r}"
    side = model.config["vision_config"].get("image_size")
    if form.fixed and (type(side) is not int or side < 1):
        return f"config.json says image_size {side!r} of images, a number is needed: download the model again"
    if not any((model.folder / name).is_file() for name in DESCRIPTIONS):
        return f"{model.folder} has no {DESCRIPTIONS[0]}, which says how pictures are prepared: complete the download"
    if missing := [package for name, package in PACKAGES.items() if find_spec(name) is None]:
        return f"images need {' and '.join(missing)}: pip install -e '.[images]' in the checkout"
    if model.here and not model.random and not model.encoder:
        return f"{model.folder} has no weights of what encodes images: take a copy of the model that has"
    if strange := sorted(set(model.encoder) - set(FLOATS)):
        return f"what encodes images has weights of kind {', '.join(strange)}, and {', '.join(FLOATS)} are read there"
    return ""
