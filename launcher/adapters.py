"""The LoRA adapters that `--lora-adapters` names: where they are, and what memory they take."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import checkpoint, hub
from .errors import UsageError
from .options import Options

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FLAG = "--lora-adapters"
WITH_REVISION = re.compile(r"\A([\w.-]+/[\w.-]+)@.*")  # of a hub repository, whose adapter has the same name in all its revisions


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter whose files are all here, unless `elements` is 0: then its size is not known yet."""

    name: str  # by which requests ask for it
    folder: Path
    elements: int  # in all its tensors
    digest: str  # of its settings, and of the tensors' names, dtypes and sizes


def resolve(asked: Options, model: str, weights: bool = True) -> tuple[Adapter, ...]:
    """The adapters that the options name, in that order. Raises UsageError. model: the name of the base model.

    weights: whether they are needed; without, a download takes the small files only.
    """
    found = []
    for name, source in sources(asked, model).items():
        place, _, revision = source.partition("@") if hub.on_hub(source) else (source, "", "")
        if revision and not hub.on_hub(place):
            raise UsageError(f"{FLAG} {name}: {place} is no model of the hub, and has no revisions: leave @{revision} out")
        try:
            only = (CONFIG, WEIGHTS) if weights else (CONFIG,)  # there may be a whole model beside the adapter, or instead of it
            _, folder = hub.locate(place, revision, asked.huggingface_hub_cache, not asked.json_output, only=only)
            found.append(_read(name, folder, weights))
        except UsageError as error:
            raise UsageError(f"{FLAG} {name}: {error}") from None
    return tuple(found)


def sources(asked: Options, model: str) -> dict[str, str]:
    """The source of each adapter, by its name. Raises UsageError."""
    found = parse(asked.lora_adapters, model)
    if 0 < asked.max_loras < len(found):
        raise UsageError(f"--max-loras {asked.max_loras} is less than the {len(found)} that {FLAG} names: raise it")
    return found


def parse(text: str, model: str = "") -> dict[str, str]:
    """A source for each name: of "a=/folder,owner/name@v2" {"a": "/folder", "owner/name": "owner/name@v2"}. Raises UsageError.

    model: a name that no adapter may have.
    """
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, source = part.partition("=") if "=" in part else (WITH_REVISION.sub(r"\1", part), "", part)
        name, source = name.strip(), source.strip()
        if not re.fullmatch(r"[!-~]{1,200}", name) or not source:
            raise UsageError(f"{FLAG} {part}: NAME=FOLDER, NAME=OWNER/MODEL or OWNER/MODEL is needed, names without spaces")
        if name == model:
            raise UsageError(f"{FLAG} {name}: the model is called so itself, give the adapter another name: NAME={source}")
        if name in found:
            raise UsageError(f"{FLAG} names {name} twice: give one of them another name, NAME={source}")
        found[name] = source
    return found


def names(adapters: Sequence[Adapter]) -> tuple[tuple[str, str], ...]:
    """Names and folders, as in the shards' settings."""
    return tuple((adapter.name, str(adapter.folder)) for adapter in adapters)


def _read(name: str, folder: Path, weights: bool) -> Adapter:
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} has no {CONFIG}: is it an adapter's folder, as peft saves it?")
    settings = (folder / CONFIG).read_bytes()
    if not (folder / WEIGHTS).is_file():
        if not weights:
            return Adapter(name, folder, 0, "")
        raise UsageError(f"{folder} has no {WEIGHTS}: save it with peft as safetensors")
    tensors = checkpoint.header(folder / WEIGHTS)
    elements = sum(length // checkpoint.ITEM_BYTES.get(dtype, 1) for dtype, length in tensors.values())
    return Adapter(name, folder, elements, hashlib.sha256(settings + repr(sorted(tensors.items())).encode()).hexdigest()[:16])
