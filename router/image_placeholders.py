"""Images in prompts: replaces each placeholder of the model's family with the image's own tokens.

Their ids are outside the vocabulary, see `proto.images`. Preprocessing is done by `pixels`. Knows no HTTP.
"""

import hashlib
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..proto.images import Tiles, image_format_of
from .config import Misconfigured, RouterConfig
from .folder import model_config
from .pixels import ImagePreparer, Pixels, PreparedImage
from .request import Image, Overloaded, Refused

NO_IMAGES = "only text is supported: the model sees no images, or the server was started without (--max-images)"
MARK = "![]("  # up to the next ")"
IDS = 1 << 32  # ids are numbers of 32 bits
TIMES = 4  # pixels of all requests may have so many times the bytes of all bodies: what is sent is compressed


class ImagePlacer:
    """Puts images into prompts, for one vision-language model."""

    def __init__(
        self,
        config: RouterConfig,
        token_text: Callable[[int], str],
        added_id: Callable[[str], int | None],
        encode: Callable[[str], list[int]],
    ) -> None:
        """token_text, added_id, encode: the tokenizer's, the last without special tokens around. Raises Misconfigured if the model
        does not support images, or its tokenizer has no token for them; Unusable."""
        model = model_config(Path(config.folder))
        form = image_format_of(model)
        if form is None:
            kind = model.get("model_type")
            raise Misconfigured(f"--max-images {config.max_images}: models of type {kind!r} see no images here; leave it out")
        named = (model[name] for name in ("image_token_id", "image_token_index") if model.get(name) is not None)
        place = next(named, added_id(form.word))
        ids = [added_id(name) for name in form.breaks or ()]
        if place is None or None in ids:
            raise Misconfigured(
                f"the tokenizer of {config.folder} has no {form.breaks or form.word}, which a prompt with images needs"
            )
        if type(place) is not int or not 0 <= place < IDS:
            raise Misconfigured(f"config.json says image_token_id {place!r}, the id of a token is needed: download it again")
        if form.tiles and encode(form.tiles.written(token_text(place), 1, 1)).count(place) != 2:
            raise Misconfigured(f"config.json says image_token_id {place}, which the tokenizer does not make of {form.word}")
        self._place = place
        self._tiles = form.tiles
        self._encode = encode
        self._breaks = tuple(id for id in ids if id is not None)
        self._preparer = ImagePreparer(config.folder, config.max_image_pixels)
        self._most_together = TIMES * config.payload_limit_total
        self._held = 0  # bytes of pixels of all unanswered requests
        around = [name if added_id(name) is not None else "" for name in form.around]
        self._own = token_text(place)
        self._words = " or ".join(dict.fromkeys([form.written or self._own, self._own]))
        self._whole = self._own.join(around).join([form.margin] * 2)
        self.text = form.written or self._whole  # the placeholder of an image in a prompt's text

    async def start(self) -> None:
        """Returns when images can be prepared, so that the first one need not wait for that."""
        await self._preparer.start()

    def worded(self, prompt: str) -> str:
        """The prompt's text with each placeholder written out, with all that surrounds an image's tokens."""
        return prompt.replace(self.text, self._whole) if self.text != self._whole else prompt

    async def put(self, ids: Sequence[int], images: Sequence[bytes], vocabulary: int) -> tuple[list[int], tuple[Image, ...]]:
        """The prompt with these encoded images in their places. Raises Refused, or Overloaded."""
        places = ids.count(self._place)
        if places != len(images):
            raise Refused(
                f"`inputs` has {places} places for images ({self._words}), and {len(images)} images: a text must not have "
                f"{self._words} itself, and a chat template must write it for each",
                "inputs",
            )
        found, own = list[PreparedImage](), 0
        try:
            for number, image in enumerate(images, 1):
                found.append(await self._preparer.prepare(image, f"image {number}", len(images) == 1))
                length = sum(len(part.pixels) for part in found[-1].parts)
                own += length
                self._hold(length)
                if own < self._held > self._most_together:  # a single one may have more: else it would be told to retry for ever
                    raise Overloaded(f"the images of all requests have more than {self._most_together} bytes together")
        except BaseException:  # the client may have left, too
            self._held -= own
            raise
        if self._tiles:
            ids = self._with_tiles(ids, [one.grid for one in found], self._tiles)
        parts = [part for one in found for part in one.parts]
        prompt, shown = expanded(ids, self._place, parts, self._breaks, vocabulary)
        for one in shown:  # held as long as the Image exists: until the answer is complete, or the request is refused
            weakref.finalize(one, self._hold, -len(one.pixels)).atexit = False
        return prompt, shown

    def _with_tiles(self, ids: Sequence[int], grids: Sequence[tuple[int, int]], tiles: Tiles) -> list[int]:
        """The ids with one place per tile, where there was one per image."""
        rest, found = iter(grids), list[int]()
        for id in ids:
            own = self._encode(tiles.written(self._own, *next(rest))) if id == self._place else [id]
            shared = tiles.once and id == self._place and found[-1:] == own[:1]
            found += own[shared:]
        return found

    def _hold(self, length: int) -> None:
        """Counts `length` more bytes of pixels."""
        self._held += length


def marked(text: str, word: str) -> tuple[str, list[str]]:
    """For a text with images in Markdown, `![](URL)` as in text-generation-inference: the text with `word` instead of each, and the
    URLs."""
    parts, urls, at = [], [], 0
    while (start := text.find(MARK, at)) >= 0 and (end := text.find(")", start)) >= 0:
        parts.append(text[at:start])
        urls.append(text[start + len(MARK) : end])
        at = end + 1
    return word.join((*parts, text[at:])), urls


def expanded(
    ids: Sequence[int], place: int, images: Sequence[Pixels], breaks: Sequence[int], vocabulary: int
) -> tuple[list[int], tuple[Image, ...]]:
    """The prompt's tokens with each image's own instead of its place. breaks: tokens of the vocabulary that end each row, and the
    last."""
    prompt: list[int] = []
    shown = []
    rest = iter(images)
    for id in ids:
        if id != place:
            prompt.append(id)
            continue
        one = next(rest)
        shown.append(
            Image(start=len(prompt), rows=one.rows, columns=one.columns, pixels=one.pixels, shape=one.shape, size=one.size)
        )
        prompt += _tokens(one, breaks, vocabulary)
    return prompt, tuple(shown)


def _tokens(image: Pixels, breaks: Sequence[int], vocabulary: int) -> Iterator[int]:
    ids = own_ids(image.digest, image.rows * image.columns, vocabulary)
    if not breaks:
        yield from ids
        return
    for row in range(image.rows):
        yield from ids[row * image.columns : (row + 1) * image.columns]
        yield breaks[row == image.rows - 1]


def own_ids(digest: bytes, count: int, vocabulary: int) -> list[int]:
    """`count` ids outside the vocabulary, derived from the digest alone."""
    drawn = struct.unpack(f"<{count}I", hashlib.shake_256(digest).digest(4 * count))
    return [vocabulary + number % (IDS - vocabulary) for number in drawn]
