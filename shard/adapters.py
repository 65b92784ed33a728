"""Reads LoRA adapters in peft's format from a folder or the hub. Knows names of matrices, and no model."""

import hashlib
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..proto.hub import Unavailable, download
from .models.shape import Unsupported
from .weights import is_packed, opened, sliced

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A matrix as peft names it, within the language model, and which of its two factors. Vision towers have layers of their own.
NAME = re.compile(
    r"(?:base_model\.model\.)?((?:(?:model|language_model|backbone)\.)*(layers\.\d+\..+))\.lora_([AB])(?:\.default)?\.weight"
)
ON_HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?")
CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that change the base model's weights
# Features of adapters beyond plain low-rank products for the listed matrices.
OTHERWISE = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "lora_bias",
    "layer_replication",
)
# features that can't be merged into weights, since they don't apply to all tokens
NEVER_MERGED = ("alora_invocation_tokens", "arrow_config")
# A safe pattern from an untrusted adapter: characters, of which few are repeated, so that matching never takes long.
TAME = re.compile(r"\^?(?:(?:[\w-]|\\?\.|\\d|\[[\w-]+\])[*+]?)*\$?")
REPEATS, PATTERNS, LONGEST_NAME = 2, 1000, 128  # each name is matched with each pattern, in time cubic in its length
LONGEST_CONFIG = 1 << 20  # bytes
REMEDY = "merge it into the weights (peft's merge_and_unload)"


def place_of(name: str, source: str, cache: str) -> Path:
    """The folder of an adapter, given as a local folder, or on the hub as OWNER/MODEL or OWNER/MODEL@REVISION, which may take a
    while to download. cache: see `proto.hub`. Raises Unsupported."""
    found = ON_HUB.fullmatch(source)
    try:
        if not found or Path(source).is_dir():
            return Path(source)
        return download(found[1], found[2] or "", cache, (CONFIG, WEIGHTS))
    except (Unavailable, OSError) as error:
        raise Unsupported(f"adapter {name}: {error}") from None


def pinned(source: str, place: Path) -> str:
    """A source that names the same files later: on the hub with the revision that was found, which is the name of its folder."""
    found = ON_HUB.fullmatch(source)
    return f"{found[1]}@{place.name}" if found and place != Path(source) else source


def digest_of(place: Path) -> str:
    """SHA-256 of its files, by which they are recognized later."""
    found = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (place / name).open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


class Adapter:
    """One LoRA adapter. Its tensors are read as they are asked for."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype, device: torch.device, tame: bool = False) -> None:
        """name: by which requests choose it; tame: allow only patterns that are quick to match. Raises Unsupported, in one line
        with the remedy."""
        self.name = name
        self._dtype, self._device = dtype, device
        self._config = _config(name, folder / CONFIG, tame)
        patterns = self._config.get("alpha_pattern") or {}
        if not (folder / WEIGHTS).is_file():
            raise Unsupported(f"adapter {name}: {folder} has no {WEIGHTS}: save it with peft as safetensors")
        self._file = opened(folder / WEIGHTS)
        self._places: dict[tuple[str, str], str] = {}  # by matrix, and A or B
        self._called: dict[str, str] = {}  # peft's name of each matrix
        for key in list(self._file.keys()):
            found = NAME.fullmatch(key)
            if found is None:
                raise Unsupported(f"adapter {name} changes {key}, which is not supported: {REMEDY}")
            called, matrix, factor = found.groups()
            if tame and patterns and len(called) > LONGEST_NAME:
                raise Unsupported(f"adapter {name} changes {key:.80}..., no matrix has so long a name: download it again")
            other = self._places.setdefault((matrix, factor), key)
            if other != key:
                raise Unsupported(f"adapter {name} has both {other} and {key}, for the same matrix: save it again")
            self._called[matrix] = called
        if not self._places:
            raise Unsupported(f"adapter {name}: {folder / WEIGHTS} has no tensors: save it again")
        self._unread = set(self._places)

    def pair(self, names: Sequence[str], outputs: int, inputs: int) -> tuple[Tensor, Tensor] | None:
        """The LoRA factors of a matrix of that shape: [rank, inputs], and [outputs, rank] times its scaling; None: it has none.
        names: possible names of the matrix, such as "layers.0.self_attn.q_proj". Raises Unsupported."""
        matrix = self._known(names)
        if matrix is None:
            return None
        down, up = (self._tensor(matrix, factor) for factor in "AB")
        if not len(down):
            raise Unsupported(f"adapter {self.name} has rank 0 for {matrix}: download it again")
        if down.shape != (len(down), inputs) or up.shape != (outputs, len(down)):
            raise Unsupported(
                f"adapter {self.name} has {list(down.shape)} and {list(up.shape)} for {matrix}, which is [{outputs}, {inputs}]: "
                "they belong to different models"
            )
        up = up.float() * self._factor(matrix, len(down))
        # A copy in any case: the file may be written to while it is used.
        return down.to(self._device, self._dtype, copy=True), up.to(self._device, self._dtype)

    def has(self, names: Sequence[str]) -> bool:
        """Whether it changes a matrix with one of these names."""
        return self._known(names) is not None

    def _known(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if (name, "A") in self._places or (name, "B") in self._places), None)

    @property
    def rank(self) -> int:
        """The highest rank of its matrices."""
        shapes = [self._file.get_slice(key).get_shape() for (_, factor), key in self._places.items() if factor == "A"]
        return max((int(shape[0]) for shape in shapes if shape), default=0)

    def check(self) -> None:
        """Called after all matrices were asked for. Raises Unsupported if it has more than these."""
        if self._unread:
            matrix = min(matrix for matrix, _ in self._unread)
            raise Unsupported(f"adapter {self.name} changes {matrix}, which is not supported, or not in this model: {REMEDY}")

    def _tensor(self, matrix: str, factor: str) -> Tensor:
        key = self._places.get((matrix, factor))
        if key is None:
            raise Unsupported(f"adapter {self.name} has no lora_{factor} for {matrix}: download it again")
        self._unread.discard((matrix, factor))
        stored = self._file.get_slice(key)
        if is_packed(stored):
            raise Unsupported(f"adapter {self.name}: {key} is stored as {stored.get_dtype()}, a number of 8 bits or more is needed")
        found = sliced(stored, None)
        if not found.is_floating_point() or found.dim() != 2:
            raise Unsupported(f"adapter {self.name}: {key} is {list(found.shape)} of {found.dtype}, a matrix of floats is needed")
        return found

    def _factor(self, matrix: str, rank: int) -> float:
        """The LoRA scaling, alpha / rank or alpha / sqrt(rank)."""
        alpha = _number(self.name, "lora_alpha", self._config.get("lora_alpha", 8))
        for pattern, own in (self._config.get("alpha_pattern") or {}).items():
            if re.fullmatch(_within(pattern), self._called[matrix]):
                alpha = _number(self.name, "alpha_pattern", own)
                break
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _config(name: str, path: Path, tame: bool) -> dict[str, Any]:
    try:
        if path.stat().st_size > LONGEST_CONFIG:
            raise ValueError(f"it has more than {LONGEST_CONFIG} bytes")
        if not path.is_file():  # reading a pipe would never end
            raise ValueError("it is no file")
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Unsupported(f"adapter {name}: {path} can't be read ({error}): is it an adapter's folder, as peft saves it?") from None
    if not isinstance(found, dict):
        raise Unsupported(f"adapter {name}: {path} holds {found!r:.40}, an object is needed: download it again")
    if found.get("peft_type") != "LORA":
        raise Unsupported(f"adapter {name} is of peft_type {found.get('peft_type')!r:.40}, only 'LORA' is supported")
    for field in (*OTHERWISE, *NEVER_MERGED):
        if found.get(field):
            raise Unsupported(f"adapter {name} has {field}, which is not supported" + f": {REMEDY}" * (field in OTHERWISE))
    start = found.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGED):
        raise Unsupported(
            f"adapter {name} is for weights that init_lora_weights {start!r:.40} has changed: save it again as what it adds to the "
            "model's own (peft's path_initial_model_for_weight_conversion)"
        )
    patterns = found.get("alpha_pattern") or {}
    if tame and isinstance(patterns, dict):
        _check_tame(name, patterns)  # before they are compiled, which may take long, too
    try:
        if not isinstance(patterns, dict):
            raise TypeError("an object is needed")
        for pattern in patterns:
            re.compile(_within(pattern))
    except (TypeError, ValueError, OverflowError, RecursionError, re.error) as error:
        raise Unsupported(f"adapter {name}: {CONFIG} says alpha_pattern {patterns!r:.40} ({error}): download it again") from None
    if found.get("bias", "none") != "none":
        raise Unsupported(f"adapter {name} has bias {found['bias']!r:.40}, which is not supported: {REMEDY}")
    return found


def _check_tame(name: str, patterns: dict[str, Any]) -> None:
    """Raises Unsupported if patterns are not safe to match."""
    if len(patterns) > PATTERNS:
        raise Unsupported(f"adapter {name}: {CONFIG} has {len(patterns)} patterns in alpha_pattern, up to {PATTERNS} are supported")
    for pattern in patterns:
        if any(not TAME.fullmatch(part) or sum(map(part.count, "*+")) > REPEATS for part in pattern.split("|")):
            raise Unsupported(
                f"adapter {name}: {CONFIG} says alpha_pattern {pattern!r:.80}, and one that is loaded while the server runs has no "
                f"more than names, ., \\d, [abc], up to {REPEATS} of * and +, and | between such: start the server with it "
                "(--lora-adapters)"
            )


def _within(pattern: str) -> str:
    """The pattern as peft applies it, to the end of a matrix's name."""
    return rf"(?:.*\.)?(?:{pattern})"


def _number(name: str, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < sys.float_info.max:
        raise Unsupported(f"adapter {name}: {CONFIG} says {field} {value!r:.40}, a number is needed")
    return float(value)
