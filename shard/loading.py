"""From a folder to an engine: device, ranks, weights, with progress for people."""

import json
import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from ..kernels.choose import triton_on
from .config import ShardConfig
from .decoding.grammar import Grammars
from .decoding.stops import Stops
from .engine import Engine
from .masks import Masks
from .models.decoder import Decoder
from .models.families import Unsupported, shape
from .parallel import Ranks
from .weights import DummyWeights, Source, Weights

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """Turns elements that were read into a stage for people, and now and then into a log line."""

    def __init__(self, total: int, stage: Callable[[str], None]) -> None:
        self._total = total
        self._stage = stage
        self._read = 0
        self._logged = time.monotonic()

    def __call__(self, read: int) -> None:
        """`read` more elements are there."""
        self._read += read
        line = f"loading weights {self._read / self._total:.0%} of {self._total / 1e6:.0f} M parameters"
        self._stage(line)
        if time.monotonic() - self._logged > SECONDS_BETWEEN_LINES:
            self._logged = time.monotonic()
            log.info(line)


def load(config: ShardConfig, stage: Callable[[str], None]) -> Engine:
    """The engine of this rank, its pool still empty. `stage` is told what is going on. Raises Unsupported."""
    folder = Path(config.folder)
    try:
        model = shape(json.loads((folder / "config.json").read_text()))
    except FileNotFoundError:
        raise Unsupported(f"{folder} has no config.json: is it a model's folder?") from None
    except RecursionError as error:
        raise Unsupported(f"{folder}/config.json is nested too deeply ({error}): download it again") from None
    except json.JSONDecodeError as error:
        raise Unsupported(f"{folder}/config.json is not JSON ({error}): download it again") from None
    model.check_ranks(config.ranks)
    device = _device(config)
    dtype = DTYPES[config.dtype]
    if triton_on(device) and find_spec("triton") is None:
        raise Unsupported(
            "the kernels need Triton, which is not installed: pip install 'triton>=3.6', or PENSTOCK_KERNELS=reference"
        )
    if config.ranks > 1:
        stage(f"waiting for {config.ranks} ranks")
    ranks = Ranks(config.rank, config.ranks, device, config.master_addr, config.master_port)
    grammars = Grammars(folder, model.vocabulary) if config.rank == 0 else None
    masks = Masks(grammars, model.vocabulary) if grammars else None
    progress = Progress(model.parameters(config.ranks), stage)
    source: Source = (
        DummyWeights(dtype, device, progress) if config.load_format == "dummy" else Weights(folder, dtype, device, progress)
    )
    stage("loading weights")
    cache_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8_e4m3fn" else None
    stops = Stops(grammars) if grammars else None
    return Engine(Decoder(model, source, ranks, device), device, config.page_size, config.prefix_caching, cache_dtype, masks, stops)


def _device(config: ShardConfig) -> torch.device:
    if config.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Unsupported("torch sees no CUDA device: install its CUDA build, or use --device cpu")
    if config.rank >= torch.cuda.device_count():
        raise Unsupported(f"rank {config.rank} has no device: there are {torch.cuda.device_count()}; use a smaller --num-shard")
    device = torch.device("cuda", config.rank)
    torch.cuda.set_device(device)
    return device
