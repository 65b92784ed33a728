"""Inspects a model folder: config.json and the headers of its safetensors files. Kilobytes are read, no weights, and torch is not
needed.

Missing or broken files are found here, before any process starts. Whether the tensors fit the architecture is checked by the shard
when it loads them.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..shard.models.families import beside
from .errors import UsageError
from .hub import HubWeights

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1}
MOST_BYTES = 1 << 60  # JSON as Python reads it also has NaN and Infinity
# Prefixes of the names of an image encoder's and projector's tensors.
ENCODERS = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "image_newline", "connector.", "embed_vision."),
    *("vision_encoder.", "vision_projection.", "projector.", "mlp_AR.", "patch_merge_mlp.", "vision_embedder."),
    *("vit_large_projector.", "vit.", "sam_model.", "qwen2_model.", "view_sep"),
    *("vision_language_adapter.", "pre_mm_projector_norm.", "patch_merger."),
)
NO_GGUF = "GGUF is not supported: take the model that it was made of, as safetensors; --quantize int4 makes that small, too"
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model folder whose files are all there, or, for a plan of a hub model, all but the weights."""

    folder: Path
    config: dict[str, Any]
    dtype: str  # of most bytes of the weights; config.json's where there are none
    bytes: int  # of all weights as stored
    files: int  # safetensors files; 0: none, or unknown
    random: bool = False  # the weights are not read
    here: bool = True  # the weights are in the folder
    encoder: Mapping[str, int] = field(default_factory=dict)  # the image encoder's bytes by safetensors dtype


def read(folder: Path, load_format: str, ask: Callable[[], HubWeights] | None = None, text: bool = True) -> Checkpoint:
    """The checkpoint in `folder`. Raises UsageError.

    The weights may be missing with `load_format` "dummy", or if `ask` can say how large they are. text: a tokenizer must be there.
    """
    config = config_of(folder)
    if load_format == "dummy":
        return Checkpoint(folder=folder, config=config, dtype=_named_dtype(config), bytes=0, files=0, random=True)
    if text:
        check_tokenizer(folder)
    if ask is not None and not _has_weights(folder):
        return _absent(folder, config, ask)
    sizes, encoder = Counter[str](), Counter[str]()
    named = _weight_files(folder)
    for path, names in named.items():
        found = header(path)
        lacking = next((name for name in names if name not in found), None)
        if lacking is not None:
            raise UsageError(f"{path} has no tensor {lacking}, which {INDEX} puts there: download the model again")
        for name, (dtype, length) in found.items():
            sizes[dtype] += length
            if name.removeprefix("model.").startswith(ENCODERS):
                encoder[dtype] += length
    dtype = _stored_dtype(folder, sizes)
    return Checkpoint(folder=folder, config=config, dtype=dtype, bytes=sizes.total(), files=len(named), encoder=encoder)


def config_of(folder: Path) -> dict[str, Any]:
    """The model's config.json, completed by files beside it. Raises UsageError."""
    if not (folder / "config.json").is_file():
        _check_other(folder)
    config = _json(folder / "config.json", "name a folder that holds a Hugging Face model")
    try:
        return beside(config, folder)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_other(folder: Path) -> None:
    """Raises UsageError if it is a folder of something else that people have."""
    if gguf := next(folder.glob("*.gguf"), None):
        raise UsageError(f"{folder} has no config.json, and {gguf.name}: {NO_GGUF}")
    if (folder / "adapter_config.json").is_file():
        base = _json(folder / "adapter_config.json", "").get("base_model_name_or_path")
        raise UsageError(f"{folder} is an adapter: serve its model ({base}), with --lora-adapters NAME={folder}")


def digest(model: Checkpoint) -> str:
    """A hash that identifies the model: of config.json, and the names and sizes of its weight files."""
    files = {} if model.random or not model.files else {path.name: path.stat().st_size for path in _weight_files(model.folder)}
    return hashlib.sha256(json.dumps([model.config, files], sort_keys=True).encode()).hexdigest()[:16]


def check_tokenizer(folder: Path) -> None:
    """Raises UsageError unless the folder has a tokenizer.json."""
    if has_tokenizer(folder):
        return
    if (folder / "tekken.json").is_file():
        raise UsageError(f"{folder} has Mistral's tekken.json, and lacks tokenizer.json: take a copy of the model that has one")
    raise UsageError(f"{folder} lacks tokenizer.json: save its tokenizer with transformers' AutoTokenizer, which writes one")


def has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def _has_weights(folder: Path) -> bool:
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return any(path.is_file() for path in folder.glob("*.safetensors"))
    return all((folder / name).is_file() for name in _index(folder)[1].values())


def _absent(folder: Path, config: dict[str, Any], ask: Callable[[], HubWeights]) -> Checkpoint:
    """The checkpoint of a model whose weights are not here. The index says how large they are; a single file has none, so `ask` is
    asked."""
    dtype = _named_dtype(config)
    if (folder / INDEX).is_file():
        total, names = _index(folder)
        files = len(set(names.values())) if total else 0
        return Checkpoint(folder=folder, config=config, dtype=dtype, bytes=total, files=files, here=False)
    remote = ask()
    if remote.files:
        dtype = _stored_dtype(folder, remote.sizes)
    return Checkpoint(folder=folder, config=config, dtype=dtype, bytes=remote.sizes.total(), files=remote.files, here=False)


def _index(folder: Path) -> tuple[int, dict[str, str]]:
    """Bytes of all weights, 0 if the index does not say, and the file of each tensor. Raises UsageError."""
    index = _json(folder / INDEX, "download the model again")
    weights, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weights, dict) or not weights:
        raise UsageError(f"{folder / INDEX} has no weight_map: download the model again")
    for file in weights.values():
        # A path out of the folder would make us read files that are not the model's.
        if not isinstance(file, str) or not file.isprintable() or file in ("", ".", "..") or "/" in file:
            raise UsageError(f"{folder / INDEX} names {file!r}, a file of the same folder is needed: download the model again")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(total) if isinstance(total, int | float) and 0 < total < MOST_BYTES else 0, weights


def _stored_dtype(folder: Path, sizes: Counter[str]) -> str:
    floats = [name for name, _ in sizes.most_common() if name in FLOATS]
    if not floats:
        raise UsageError(f"the weights in {folder} are {', '.join(sizes) or 'none'}: only {', '.join(FLOATS)} can be loaded")
    return FLOATS[floats[0]]


def elements(folder: Path) -> dict[str, int]:
    """The number of elements of each tensor, of weights that are there. Raises UsageError."""
    headers = [header(path) for path in _weight_files(folder)]
    return {name: length // ITEM_BYTES.get(dtype, 1) for own in headers for name, (dtype, length) in own.items()}


def _weight_files(folder: Path) -> dict[Path, list[str]]:
    """Every safetensors file of the model, all checked to be there, with the tensors that the index puts into it. A single file has
    precedence, and files of other names are taken only where there is neither."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: []}
    if (folder / INDEX).is_file():
        files: dict[str, list[str]] = {}
        for name, file in _index(folder)[1].items():
            files.setdefault(file, []).append(name)
        missing = [file for file in sorted(files) if not (folder / file).is_file()]
        if missing:
            raise UsageError(f"{folder} lacks {', '.join(missing)}, which its index names: complete the download")
        return {folder / file: names for file, names in sorted(files.items())}
    if others := sorted(folder.glob("*.safetensors")):
        return {path: [] for path in others}
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise UsageError(
            f"{folder} has its weights only as {pickles[0]}, a pickle, which may run code: save them as safetensors "
            "(transformers: model.save_pretrained)"
        )
    if gguf := next(folder.glob("*.gguf"), None):
        raise UsageError(f"{folder} has its weights only as {gguf.name}, and {NO_GGUF}")
    raise UsageError(f"{folder} has no weights ({SINGLE} or {INDEX}): complete it, or take random ones with --load-format dummy")


def header(path: Path) -> dict[str, tuple[str, int]]:
    """dtype and bytes of each tensor in a safetensors file: 8 bytes of length, that much JSON, then the tensors without gaps.
    Raises UsageError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise UsageError(f"{path} is no safetensors file, or is cut short: download it again")
            text = file.read(length)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from None
    try:
        tensors = {name: _extent(tensor) for name, tensor in json.loads(text).items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path} has a broken header: download it again") from None
    position, end = 0, size - 8 - length
    for name, (_, start, stop) in sorted(tensors.items(), key=lambda item: item[1][1:]):
        if stop > end:
            raise UsageError(f"{path} is cut short, {name} lies beyond its end: download it again")
        if start != position:
            raise UsageError(f"{path} has a broken header, {name} overlaps another tensor or leaves a gap: download it again")
        position = stop
    if position != end:
        raise UsageError(f"{path} is {end - position} bytes longer than its header says: download it again")
    return {name: (dtype, stop - start) for name, (dtype, start, stop) in tensors.items()}


def _extent(tensor: dict[str, Any]) -> tuple[str, int, int]:
    """dtype, start and stop of a tensor. Raises ValueError unless its shape takes exactly these bytes."""
    dtype, shape, (start, stop) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in (start, stop, *shape)):
        raise ValueError
    if math.prod(shape) * ITEM_BYTES.get(dtype, 0) not in (0, stop - start) or stop < start:
        raise ValueError
    return dtype, start, stop


def _named_dtype(config: dict[str, Any]) -> str:
    # transformers 5 writes `dtype`, earlier versions `torch_dtype`
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in FLOATS.values():
        raise UsageError(f"config.json names dtype {name}: one of {', '.join(FLOATS.values())} is needed")
    return str(name)


def _json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path.parent} has no {path.name}: {remedy}") from None
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} can't be read ({error}): download it again") from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply: {remedy}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds no JSON object: {remedy}")
    return value
