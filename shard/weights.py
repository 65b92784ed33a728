"""Checkpoint reader: reads this rank's slices of the weights from safetensors files. Knows names, no model.

`Weights` reads a folder in Hugging Face's layout; `DummyWeights` has the same methods and makes random numbers from the names.
"""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .models.fields import AGAIN
from .models.shape import Unsupported

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Progress = Callable[[int], None]  # called with the number of elements read since the last call


class Source(Protocol):
    """A source of weights."""

    dtype: torch.dtype
    device: torch.device
    progress: Progress

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The tensor `name`, whose full shape must be `shape`, on the device and in `dtype`, by default the source's.

        cut: (dimension, start, stop) reads only that slice; beyond the tensor's end it is zero. Raises Unsupported, in one line
        with the remedy, if it isn't there or has another shape.
        """

    def stored(self, name: str, kinds: tuple[str, ...]) -> Tensor:
        """The tensor `name` as stored, in one of safetensors' dtypes `kinds`, on the device of the source. The caller, who knows
        how many weights it holds, reports to `progress`."""

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether there is such a tensor, or one of that shape, where that is not known without looking."""

    def scale(self, name: str, size: int) -> Tensor | None:
        """A scale for each of `size`, [size] float32, if the checkpoint has it: as many, or one for all. Else None."""


class Weights:
    """A folder with one safetensors file, or with several and their index."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress) -> None:
        self._folder = folder
        self.dtype = dtype
        self.device = device
        self.progress = progress
        self._files: dict[Path, Any] = {}
        self._places = _places(folder)

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See Source."""
        stored = self._stored(self._place(name), name)
        found, kind = tuple(stored.get_shape()), stored.get_dtype()
        if kind not in ("F64", "F32", "F16", "BF16"):  # two numbers in a byte also have another shape
            what = "by config.json it is not quantized, or no matrix of a layer, of which alone few bits are read"
            raise Unsupported(f"tensor {name} is stored as {kind}, and {what}: {AGAIN}")
        if found != shape:
            raise Unsupported(f"tensor {name} is {list(found)}, config.json says {list(shape)}: {AGAIN}")
        tensor = sliced(stored, cut)
        self.progress(tensor.numel())
        return tensor.to(self.device, dtype or self.dtype)

    def stored(self, name: str, kinds: tuple[str, ...]) -> Tensor:
        """See Source."""
        stored = self._stored(self._place(name), name)
        kind = stored.get_dtype()
        if kind not in kinds:
            raise Unsupported(
                f"tensor {name} is stored as {kind}, by config.json's quantization_config it is {' or '.join(kinds)}: {AGAIN}"
            )
        return sliced(stored, None).to(self.device)

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """See Source."""
        path = self._places.get(name)
        return path is not None and shape in (None, tuple(self._stored(path, name).get_shape()))

    def scale(self, name: str, size: int) -> Tensor | None:
        """See Source."""
        path = self._places.get(name)
        if path is None:
            return None
        stored = self._stored(path, name)
        if is_packed(stored):
            raise Unsupported(f"tensor {name} is stored as {stored.get_dtype()}, a number of 8 bits or more is needed: {AGAIN}")
        found = sliced(stored, None).float().flatten()
        if len(found) not in (1, size):
            raise Unsupported(f"tensor {name} has {len(found)} numbers, by config.json there are {size}: {AGAIN}")
        return found.expand(size).contiguous().to(self.device)

    def _place(self, name: str) -> Path:
        path = self._places.get(name)
        packed = name + "_packed", f"{name.removesuffix('weight')}qweight"
        few = next((other for other in packed if other in self._places), None)
        if path is None and few:
            raise Unsupported(
                f"{self._folder} has {few} instead of {name}: weights of few bits are read where config.json's "
                "quantization_config says how, and of the layers' matrices alone; take another checkpoint of the model"
            )
        if path is None:
            raise Unsupported(f"{self._folder} has no tensor {name}: is the download complete, and config.json the model's own?")
        return path

    def _stored(self, path: Path, name: str) -> Any:
        """The tensor as one of safetensors' slices, of which nothing is read yet."""
        if path not in self._files:
            self._files[path] = opened(path)
        try:
            return self._files[path].get_slice(name)
        except SafetensorError as error:
            raise Unsupported(f"{path} has no tensor {name} ({error}): download it again") from None


class DummyWeights:
    """Random weights that depend on nothing but their names: for trying sizes and speeds without a checkpoint."""

    def __init__(self, dtype: torch.dtype, device: torch.device, progress: Progress) -> None:
        self.dtype = dtype
        self.device = device
        self.progress = progress

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: tuple[int, int, int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See Source. Every rank draws the whole tensor, so that slices fit together."""
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        full = torch.randn(shape, generator=generator, device=self.device).mul_(0.02)
        if name.endswith("norm.weight"):
            full += 1
        tensor = sliced(full, cut)
        self.progress(tensor.numel())
        return tensor.to(self.device, dtype or self.dtype)

    def stored(self, name: str, kinds: tuple[str, ...]) -> Tensor:
        """See Source."""
        raise Unsupported(f"there is no {name} among random weights")

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """See Source. There are only tensors that are asked for."""
        return False

    def scale(self, name: str, size: int) -> Tensor | None:
        """See Source. There is none."""
        return None


def _places(folder: Path) -> dict[str, Path]:
    """Which file each tensor is in. As in transformers, a single file takes precedence over an index."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return dict.fromkeys(_names(single), single)
    if index.is_file():
        try:
            names = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
            raise Unsupported(f"{index} is not an index of tensors ({error!r}): download it again") from None
        for name, file in names.items():
            if not isinstance(file, str):
                raise Unsupported(f"{index} says that tensor {name} is in {file!r:.40}, a file's name is needed: download it again")
        missing = sorted({file for file in names.values() if not os.path.isfile(folder / file)})  # False for impossible names, too
        if missing:
            raise Unsupported(f"{folder} lacks {', '.join(missing)}, which {INDEX} lists: complete the download")
        return {name: folder / file for name, file in names.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Unsupported(f"{folder} has no safetensors files: penstock reads no other format; convert the checkpoint first")
    return {name: path for path in files for name in _names(path)}


def opened(path: Path) -> Any:
    """The file, for safetensors' methods. Raises Unsupported."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Unsupported(f"{path} can't be read ({error}): download it again") from None


def _names(path: Path) -> list[str]:
    return list(opened(path).keys())


def is_packed(stored: Any) -> bool:
    """Whether one of safetensors' slices has several numbers in a byte, which torch can't convert."""
    return stored.get_dtype().startswith(("F4", "F6_"))  # type: ignore[no-any-return]


def sliced(stored: Any, cut: tuple[int, int, int] | None) -> Tensor:
    """The slice `cut` of `Source.tensor`; stored: a tensor, or one of safetensors' slices."""
    if cut is None:
        return stored[...]  # type: ignore[no-any-return]  # a scalar has no dimension for [:]
    dimension, start, stop = cut
    part: Tensor = stored[(*[slice(None)] * dimension, slice(start, stop))]
    lacking = stop - start - part.shape[dimension]
    if not lacking:
        # A slice of columns is a view of a larger tensor: the copy frees that.
        return part.contiguous()
    padding = list(part.shape)
    padding[dimension] = lacking
    return torch.cat((part, part.new_zeros(padding)), dimension)
