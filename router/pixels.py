"""Image decoding and preprocessing: turns encoded images (PNG, JPEG, WebP, GIF (its first frame), BMP) into pixels as the model's
image processor leaves them.

In worker processes, because the decoders are written in C, and their input is untrusted. There transformers' own processor does the
work (`resizing`), by Pillow and numpy; without torch, which would take 4 s and 400 MB to import. Knows no tokens and no HTTP.
"""

import hashlib
import io
import json
import logging
import sys
import warnings
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from ..proto.images import COLOURS, DESCRIPTIONS
from ..proto.processors import image_processor
from .request import Overloaded, Refused
from .resizing import MOST_PIXELS, ImageResizer, UnusableImage, resizing_of, words
from .worker_processes import Busy, Died, TimedOut, WorkerProcesses, serve

SECONDS = 10.0  # for one image: a photograph of 12 million pixels takes 0.3 s (x86, one core)
PATIENCE = 30.0  # seconds to wait for a free process
PROCESSES = 2
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

logger = logging.getLogger(__name__)


class Job(msgspec.Struct):
    folder: str  # of the model
    most: int  # pixel limit: larger images are scaled down
    data: bytes | None  # None: a blank image, as a test
    alone: bool = True  # the prompt has no other image


class Pixels(msgspec.Struct, frozen=True):
    """The pixels of one image: see Image in shard.proto."""

    rows: int
    columns: int
    shape: tuple[int, ...]
    pixels: bytes
    digest: bytes  # of all these
    size: tuple[int, ...] = ()


class PreparedImage(msgspec.Struct, frozen=True):
    """A preprocessed image: whole, or as tiles."""

    parts: list[Pixels]
    grid: tuple[int, int] = (0, 0)  # rows and columns of tiles, with the whole image after them; 0: only that


class Answer(msgspec.Struct):
    found: PreparedImage | None = None
    refused: str = ""  # what is wrong with the image, or ...
    unable: str = ""  # ... why no image can be prepared


_answers = msgspec.msgpack.Decoder(Answer)
_jobs = msgspec.msgpack.Decoder(Job)


class ImagePreparer:
    """Prepares images in worker processes, within limits."""

    def __init__(self, folder: str, most: int, seconds: float = SECONDS) -> None:
        """most: pixel limit: larger images are scaled down."""
        self._folder = folder
        self._most = most
        self._seconds = seconds
        self._workers = WorkerProcesses("penstock.router.pixels", PROCESSES, finishes=True)  # they have to import transformers

    async def start(self) -> None:
        """Returns when a worker is ready, and logs an error if it can't prepare images."""
        try:
            await self._workers.start()
            answer = await self._ask(None)
            unable = answer.unable or (answer.refused and f"a blank one {answer.refused}")
        except (Busy, TimedOut, Died):
            unable = "the process that does it does not start"
        if unable:
            _tell(unable)

    async def prepare(self, data: bytes, name: str, alone: bool = True) -> PreparedImage:
        """name: of the image, for error messages; alone: its prompt has no other. Raises Refused, or Overloaded."""
        try:
            await self._workers.start()
            answer = await self._ask(data, alone)
        except Busy:
            raise Overloaded("too many images are being prepared") from None
        except TimedOut:
            raise Refused(f"{name} takes more than {self._seconds:g} s to be read", "inputs") from None
        except Died:
            raise Refused(f"{name} can't be read: that needs too much memory, or ends what reads it", "inputs") from None
        if answer.unable:
            _tell(answer.unable)
            raise Refused("the server can't prepare images: its log says why", "inputs")
        if answer.found is None:
            raise Refused(f"{name} {answer.refused}", "inputs")
        return answer.found

    async def _ask(self, data: bytes | None, alone: bool = True) -> Answer:
        job = msgspec.msgpack.encode(Job(self._folder, self._most, data, alone))
        return _answers.decode(await self._workers.ask(job, self._seconds, PATIENCE))


def _tell(unable: str) -> None:
    logger.error("images can't be prepared, and requests with any are refused: %s", unable)


def _work(job: bytes) -> bytes:
    """The worker's job for one image."""
    return msgspec.msgpack.encode(_answer(_jobs.decode(job)))


def _answer(job: Job) -> Answer:
    try:
        resizer = _resizing(job.folder)
    except Exception as error:  # of a library, about files that came with a download
        return Answer(unable=words(error))
    try:
        if job.data is None:
            _prepared(resizer, _blank(), job.most)
            return Answer()
        return Answer(_prepared(resizer, _opened(job.data), job.most, job.alone))
    except UnusableImage as wrong:
        return Answer(refused=str(wrong))
    except MemoryError:
        return Answer(refused="can't be read: it needs too much memory")
    except Exception as error:  # an unknown kind of processor
        return Answer(unable=words(error))


@lru_cache(maxsize=1)
def _resizing(folder: str) -> ImageResizer:
    """The folder's own image processor."""
    if not any((Path(folder) / name).is_file() for name in DESCRIPTIONS):
        raise OSError(f"{folder} has neither {' nor '.join(DESCRIPTIONS)}: download it again")
    import transformers

    made = image_processor(transformers, Path(folder))
    own, model = (_read(Path(folder) / name) for name in (DESCRIPTIONS[1], "config.json"))
    return resizing_of(made, own, model)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _blank() -> Any:
    """A blank image, to test whether any can be prepared."""
    from PIL import Image

    return Image.new("RGB", (600, 400))


def _opened(data: bytes) -> Any:
    """As transformers' load_image reads it, with its EXIF orientation, in RGB; also where EXIF is broken, or grey has 16 bits."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise UnusableImage(f"has {width} x {height} pixels: at most {MOST_PIXELS} are read")
        image.load()
        try:
            ImageOps.exif_transpose(image, in_place=True)
        except MemoryError:
            raise
        except Exception as error:  # Pillow reads all of EXIF, and writes it again: what is broken there says nothing of the pixels
            logger.debug("an image's EXIF is left out: %r", error)
        if image.mode.startswith("I;16"):  # Pillow would make white of all above 255
            image = image.point(lambda value: value / 256)
        return image.convert("RGB")
    except UnidentifiedImageError:
        raise UnusableImage(f"is no image that can be read: {', '.join(FORMATS)} can") from None
    except (UnusableImage, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise UnusableImage(f"has too many pixels: at most {MOST_PIXELS} are read") from None
    except Exception as error:  # decoders raise anything
        raise UnusableImage(f"can't be read: {words(error)}") from None


def _prepared(resizer: ImageResizer, image: Any, most: int, alone: bool = True) -> PreparedImage:
    found = (resizer if alone else resizer.among)(image, most)
    if not 0 < sum(values.size for values in found.parts) // COLOURS <= most and not resizer.fixed:
        raise UnusableImage(f"is too thin: there is no size of at most {most} pixels in which it is wide enough")
    return PreparedImage([_pixels(*each, found.size) for each in zip(found.parts, found.tokens, strict=True)], found.grid)


def _pixels(values: Any, tokens: tuple[int, int], size: tuple[int, ...]) -> Pixels:
    import numpy

    pixels, shape = values.astype(numpy.uint8).tobytes(), values.shape
    digest = hashlib.sha256(b"%d %d %r %r " % (*tokens, shape, size) + pixels).digest()
    return Pixels(*tokens, shape, pixels, digest, size)


def _prepare_process() -> None:
    """Imports what takes time and memory before jobs, and memory limits, begin."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers asks whether it is installed
    logging.disable(logging.WARNING)  # of its messages then
    warnings.simplefilter("ignore")
    with suppress(ImportError):  # the first job reports it
        from transformers import AutoImageProcessor  # noqa: F401


if __name__ == "__main__":
    _prepare_process()
    serve(_work)
