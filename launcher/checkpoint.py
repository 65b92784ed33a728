"""What a model folder holds, read from config.json and the headers of its safetensors files: kilobytes, no weights, no torch.

Finds here, before any process starts, what is missing or broken. Whether the tensors fit the architecture, the shard checks
when it loads them.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .mistake import Mistake

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model folder whose files are all there."""

    folder: Path
    config: dict[str, Any]
    dtype: str  # of most bytes of the weights; of config.json where there are none
    bytes: int  # of all weights as stored
    files: int  # safetensors files


def read(folder: Path, load_format: str) -> Checkpoint:
    """The checkpoint in `folder`; with `load_format` "dummy" its weights need not be there. Raises Mistake."""
    config = _json(folder / "config.json", "name a folder that holds a Hugging Face model")
    if load_format == "dummy":
        return Checkpoint(folder=folder, config=config, dtype=_named_dtype(config), bytes=0, files=0)
    if not (folder / "tokenizer.json").is_file():
        raise Mistake(f"{folder} lacks tokenizer.json: save its tokenizer with transformers' AutoTokenizer, which writes one")
    sizes: Counter[str] = Counter()
    paths = _weight_files(folder)
    for path in paths:
        sizes.update(_header(path))
    floats = [name for name, _ in sizes.most_common() if name in FLOATS]
    if not floats:
        raise Mistake(f"the weights in {folder} are {', '.join(sizes)}: only {', '.join(FLOATS)} can be loaded")
    return Checkpoint(folder=folder, config=config, dtype=FLOATS[floats[0]], bytes=sizes.total(), files=len(paths))


def _weight_files(folder: Path) -> list[Path]:
    """Every safetensors file of the model, all there."""
    if (folder / INDEX).is_file():
        weights = _json(folder / INDEX, "download the model again").get("weight_map")
        if not isinstance(weights, dict):
            raise Mistake(f"{folder / INDEX} has no weight_map: download the model again")
        names = sorted(set(weights.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise Mistake(f"{folder} lacks {', '.join(missing)}, which its index names: complete the download")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise Mistake(
            f"{folder} has its weights only as {pickles[0]}, a pickle, which may run code: save them as safetensors "
            "(transformers: model.save_pretrained)"
        )
    raise Mistake(f"{folder} has no weights ({SINGLE} or {INDEX}): complete it, or take random ones with --load-format dummy")


def _header(path: Path) -> Counter[str]:
    """Bytes per dtype in one safetensors file: 8 bytes of length, that much JSON, then the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise Mistake(f"{path} is no safetensors file, or is cut short: download it again")
        text = file.read(length)
    sizes: Counter[str] = Counter()
    try:
        for name, tensor in json.loads(text).items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                if not 0 <= start <= end <= size - 8 - length:
                    raise Mistake(f"{path} is cut short, {name} lies beyond its end: download it again")
                sizes[tensor["dtype"]] += end - start
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Mistake(f"{path} has a broken header: download it again") from None
    return sizes


def _named_dtype(config: dict[str, Any]) -> str:
    # transformers 5 writes `dtype`, earlier versions `torch_dtype`
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in FLOATS.values():
        raise Mistake(f"config.json names dtype {name}: one of {', '.join(FLOATS.values())} is needed")
    return str(name)


def _json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Mistake(f"{path.parent} has no {path.name}: {remedy}") from None
    except (OSError, ValueError) as error:
        raise Mistake(f"{path} can't be read: {error}") from None
    if not isinstance(value, dict):
        raise Mistake(f"{path} holds no JSON object: {remedy}")
    return value
