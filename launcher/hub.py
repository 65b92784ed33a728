"""Finds a model's files: the embedded demo model, a folder, or a model of the Hugging Face hub, which is downloaded.

Knows nothing of what is in the files.
"""

import fnmatch
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..proto.hub import Unavailable, download
from .errors import UsageError
from .paths import expanded, in_utf8

DEMO = "penstock-demo"  # the model name that clients see for the embedded model
DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo" / "model"
DRAFT_FOLDER = DEMO_FOLDER.with_name("draft")
# Names of its embedded draft models: a small language model, and an EAGLE head, which drafts from the demo model's hidden states.
DRAFTS = {"demo-draft": DRAFT_FOLDER, "demo-eagle": DEMO_FOLDER.with_name("eagle")}

SMALL = ["*.json", "*.jinja", "tokenizer*"]
WEIGHTS = "*.safetensors"  # no other formats: those are pickles, which run code when they are loaded
PATTERNS = [WEIGHTS, *SMALL]
# Copies of the same weights, in Mistral's own format or in folders for other programs. Chat templates may have a folder.
IGNORED = ["consolidated*", "*/*.safetensors", "*/*.json", "*/tokenizer*"]


@dataclass(frozen=True, slots=True)
class HubWeights:
    """What the hub says of a model's weights: bytes by safetensors dtype, and the number of files. Empty where the hub cannot
    say."""

    sizes: Counter[str]
    files: int


def locate(
    model: str, revision: str = "", cache: str = "", progress: bool = True, weights: bool = True, only: Sequence[str] = ()
) -> tuple[str, Path]:
    """The name and the folder of `model` ("": the demo model). Downloads what is missing of a hub model. Raises UsageError.

    weights: whether they are needed; without, a download takes the small files only. only: the patterns of files to download, if
    they are not those of a model.
    """
    if revision and not on_hub(model):
        raise UsageError(
            f"--revision {revision} is for models of the hub, not {model or 'the demo model'}: leave it and REVISION out"
        )
    if not model:
        if not DEMO_FOLDER.is_dir():
            raise UsageError(
                "this installation lacks the embedded demo model: name a model (penstock serve MODEL), or install again"
            )
        return DEMO, DEMO_FOLDER
    if model in DRAFTS:
        if not DRAFTS[model].is_dir():
            raise UsageError(f"this installation lacks the embedded {model}: install it again")
        return model, DRAFTS[model]
    folder = expanded(model)
    if folder.is_dir():
        found = folder.resolve()
        if not in_utf8(model) or not in_utf8(found):
            raise UsageError(f"{model}: the path of a model has to be UTF-8, and {found} is not: rename the folder")
        return model, found
    if folder.exists():
        other = ", of a model as safetensors, since GGUF is not supported" if model.endswith(".gguf") else ""
        raise UsageError(f"{model} is a file: name the folder that holds config.json{other}")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise UsageError(f"no folder {model} (and that is no id of a hub model, which looks like owner/name)")
    return model, _download(model, revision, cache, progress, list(only) or (PATTERNS if weights else SMALL))


def on_hub(model: str) -> bool:
    """Whether `model`, if one is named, is a model of the hub."""
    return model not in ("", *DRAFTS) and not expanded(model).is_dir()


def remote(model: str, revision: str) -> HubWeights:
    """The hub's data about a model's weights, without a download: it reads the headers of the files. Raises UsageError."""
    try:
        found = _headers(model, revision)
    except UsageError:
        raise
    except Exception:  # offline, an odd header, no real hub: then a plan uses an estimate
        return HubWeights(Counter(), 0)
    sizes: Counter[str] = Counter()
    for file in found.values():
        for tensor in file.tensors.values():
            sizes[tensor.dtype] += tensor.data_offsets[1] - tensor.data_offsets[0]
    return HubWeights(sizes, len(found))


def _headers(model: str, revision: str) -> dict[str, Any]:
    """Headers of a hub repository's safetensors files, by name; if they are not named like a model's, of all that a download would
    take."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return dict(huggingface_hub.get_safetensors_metadata(model, revision=revision or None).files_metadata)
    except errors.NotASafetensorsRepoError:
        names = huggingface_hub.list_repo_files(model, revision=revision or None)
    found = [name for name in fnmatch.filter(names, WEIGHTS) if not any(fnmatch.fnmatch(name, other) for other in IGNORED)]
    if not found:
        raise UsageError(f"{model} has no weights as safetensors on the hub: take another model, or convert it")
    return {name: huggingface_hub.parse_safetensors_file_metadata(model, name, revision=revision or None) for name in found}


def _download(model: str, revision: str, cache: str, progress: bool, patterns: list[str]) -> Path:
    try:
        with _ended_by_signals():
            return download(model, revision, cache, patterns, IGNORED, progress)
    except Unavailable as error:
        raise UsageError(str(error)) from None


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside the context SIGINT and SIGTERM end this process at once. The hub's client would first wait for its threads, which
    complete their files, and the first process of a container gets no SIGTERM without a handler. The next start goes on where
    this one has stopped."""
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: os._exit(128 + number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
