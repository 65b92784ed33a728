"""Model loading: from a checkpoint folder to an engine, with device, ranks, weights and progress messages."""

import json
import logging
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from ..kernels.dispatch import triton_on
from ..kernels.linear import Invariance
from ..proto.speculation import OWN, Speculation, parse
from .adapters import Adapter
from .config import ShardConfig
from .decoding.grammar import Grammars
from .decoding.stops import StopStrings
from .drafter import Drafter
from .engine import Engine
from .masks import Masks
from .models.decoder import Decoder
from .models.draft_families import DraftShape, check_speculation, draft_shape, heard, levels, shaped
from .models.draft_head import Eagle3, MtpHead
from .models.families import beside, shape
from .models.fields import Config
from .models.lora import LoraAdapters
from .models.readout_families import ReadoutShape
from .models.readout_heads import readout_head
from .models.renamed import LegacySource
from .models.shape import Shape, Unsupported
from .models.taps import Taps
from .models.vision import Vision
from .parallel import Ranks
from .readout import Readout
from .speculator import DraftModel, Speculator
from .weights import DummyWeights, Source, Weights

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SECONDS_BETWEEN_LINES = 2.0
# Parameters of draft models small enough to be held as float32 on a CPU: there the overhead per call exceeds the arithmetic, most
# of all with 16-bit types.
SMALL_DRAFT = 4_000_000


class Progress:
    """Reports the share of loaded parameters as the stage, and now and then as a log line."""

    def __init__(self, total: int, stage: Callable[[str], None]) -> None:
        self._total = total
        self._stage = stage
        self._read = 0
        self._logged = time.monotonic()

    def __call__(self, read: int) -> None:
        """`read` more elements are loaded."""
        self._read += read
        line = f"loading weights {min(self._read / self._total, 1):.0%} of {self._total / 1e6:.0f} M parameters"
        self._stage(line)
        if time.monotonic() - self._logged > SECONDS_BETWEEN_LINES:
            self._logged = time.monotonic()
            log.info(line)


def load(config: ShardConfig, stage: Callable[[str], None]) -> Engine:
    """Loads this rank's engine, its pool still empty. `stage` is called with progress messages. Raises Unsupported."""
    folder = Path(config.folder)
    said = _config(folder)
    model = shape(said).within(config.longest).quantized(config.quantize)
    model.check_ranks(config.ranks)
    model.check_pages(config.page_size)
    model.check_cache(config.kv_cache_dtype, config.kv_offload_gib > 0)
    speculation = parse(config.speculate) if config.speculate else Speculation()
    check_speculation(model, speculation)
    device = _device(config)
    if triton_on(device) and find_spec("triton") is None:
        raise Unsupported(
            "the kernels need Triton, which is not installed: pip install 'triton>=3.6', or PENSTOCK_KERNELS=reference"
        )
    _check_able(device, config.kv_cache_dtype)
    if config.batch_invariant:
        _check_invariant(model, device)
    if config.ranks > 1:
        stage(f"waiting for {config.ranks} ranks")
    meeting = Path(config.meeting) if config.meeting else (config.master_addr, config.master_port)
    exact = Invariance.INVARIANT if config.batch_invariant else Invariance.USUAL
    ranks = Ranks(config.rank, config.ranks, device, meeting, config.neighbours, config.batch_invariant)
    grammars = Grammars(folder, model.vocabulary) if config.rank == 0 else None
    masks = Masks(grammars, model.vocabulary) if grammars else None
    progress = Progress(model.parameters(config.ranks), stage)
    stage("loading weights")
    cache_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8_e4m3fn" else None
    source = _source(config.load_format, folder, DTYPES[config.dtype], device, progress)
    first = [Adapter(name, Path(place), source.dtype, device) for name, place in config.adapters]
    adapters = LoraAdapters(first, config.max_loras, config.max_lora_rank)
    decoder = Decoder(model, source, ranks, device, exact, adapters)
    if config.image_pixels:
        stage("loading what encodes images")
        decoder.vision = _vision(config, said, source, model)
    stops = StopStrings(grammars) if grammars else None
    small = _draft_shape(config, speculation, model) if speculation.draft else None
    drafter = _drafter(config, speculation, small, decoder, source, stage) if small else None
    speculator = Speculator(ranks, device, speculation, drafter, masks, levels(small) if small else 0)
    ahead = config.overlap == "on" or (config.overlap == "auto" and device.type == "cuda")
    return Engine(decoder, device, config.page_size, config.prefix_caching, cache_dtype, masks, stops, speculator, ahead)


def _vision(config: ShardConfig, said: Config, source: Source, model: Shape) -> Vision | None:
    """The vision encoder. If the operator didn't ask for images explicitly, a failure means text only. Raises Unsupported."""
    try:
        return Vision(said, Path(config.folder), source, config.image_pixels, model)
    except Unsupported as error:
        if config.images_asked:
            raise
        log.warning("text alone is served: %s", error)
        return None


def _check_able(device: torch.device, cache: str) -> None:
    """Raises Unsupported where the kernels that will be needed can't be compiled."""
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        _check_amd(device, cache)
    elif triton_on(device):
        _check_nvidia(device, cache)
    if triton_on(device):
        _check_launcher()


def _check_amd(device: torch.device, cache: str) -> None:
    able = torch.cuda.get_arch_list()
    kind = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    if able and kind not in able:
        raise Unsupported(f"this build of torch is for {', '.join(able)}, and the GPU is {kind}: use --device cpu")
    if cache == "fp8_e4m3fn" and triton_on(device):
        raise Unsupported("keys and values of 8 bits are not there for AMD's GPUs: leave --kv-cache-dtype out")


def _check_nvidia(device: torch.device, cache: str) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise Unsupported(
            f"the kernels need an accelerator of compute capability 8.0 (Ampere) or newer, this one has {major}.{minor}: "
            "PENSTOCK_KERNELS=reference does without them, and is slow"
        )
    if cache == "fp8_e4m3fn" and (major, minor) < (8, 9):
        raise Unsupported(
            f"keys and values of 8 bits need compute capability 8.9 (Ada) or newer, this accelerator has {major}.{minor}: "
            "leave --kv-cache-dtype out"
        )


def _check_launcher() -> None:
    """Raises Unsupported where Triton can't build its launcher: now, not when all weights have been read."""
    from triton.runtime import driver  # not needed on CPUs

    try:
        driver.active.get_current_target()
    except (RuntimeError, AssertionError, OSError, subprocess.CalledProcessError) as error:
        raise Unsupported(
            f"Triton can't build what launches its kernels ({error}): it needs a C compiler and Python's headers: apt-get "
            "install gcc python3-dev, or set CC; a folder that it may write (TRITON_CACHE_DIR); and libcuda.so.1, which ldconfig "
            "finds, or in the folder of TRITON_LIBCUDA_PATH. PENSTOCK_KERNELS=reference does without, and is slow"
        ) from error


def _check_invariant(model: Shape, device: torch.device) -> None:
    """Raises Unsupported for features whose results are known to depend on the rest of the batch."""
    by_triton = triton_on(device)
    if device.type != "cpu" and not by_triton:
        raise Unsupported("--batch-invariant is there on an accelerator by our own kernels alone: leave PENSTOCK_KERNELS out")
    what = "latents on an accelerator" if model.latent and by_triton else ""
    if model.sinks and by_triton:
        what = "attention with sinks on an accelerator"
    if model.altup and by_triton:
        what = "streams that are predicted on an accelerator"
    if model.most:
        what = "sparse attention, whose scores are made in parts"
    if model.compressed:
        what = "attention to entries, whose scores are made in parts"
    if model.recurrent is not None:
        what = f"{model.recurrent.name}, which may go by how a prompt is divided"
    if what:
        raise Unsupported(f"--batch-invariant is not there for {what}: leave it out")


def _config(folder: Path) -> Config:
    """config.json of the model in a folder. Raises Unsupported."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unsupported(f"{folder} has no config.json: is it a model's folder?") from None
    except OSError as error:
        raise Unsupported(f"{path} can't be read ({error.strerror}): is it a model's folder, and this user's?") from None
    except RecursionError as error:
        raise Unsupported(f"{path} is nested too deeply ({error}): download it again") from None
    except ValueError as error:
        raise Unsupported(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(config, dict):
        raise Unsupported(f"{path} holds {config!r:.40}, an object is needed: download it again")
    return beside(config, folder)


def _draft_shape(config: ShardConfig, speculation: Speculation, target: Shape) -> DraftShape:
    """Shape of the draft model. Raises Unsupported."""
    own = speculation.draft == OWN
    found = draft_shape(_config(Path(config.folder if own else speculation.draft)), target, own)
    shaped(found, speculation)
    return found.within(config.longest) if isinstance(found, Shape) else found


def _drafter(
    config: ShardConfig,
    speculation: Speculation,
    model: DraftShape,
    target: Decoder,
    whole: Source,
    stage: Callable[[str], None],
) -> DraftModel | None:
    """Loads the draft model, unsharded, on rank 0: it is small, and with tensor parallelism the ranks would have to wait for each
    other in each of its rounds. The other ranks only learn which target features it uses. whole: all of the target's weights."""
    own, device, taps = speculation.draft == OWN, whole.device, heard(model)
    if taps is not None:
        target.kept = Taps(taps)
    if config.rank:
        return None
    stage("loading the draft model")
    whole = LegacySource(whole, target.shape, target.shape.layout) if target.shape.layout else whole
    few = taps is None and device.type == "cpu" and model.parameters() <= SMALL_DRAFT
    dtype = torch.float32 if few else whole.dtype
    folder = Path(config.folder if own else speculation.draft)
    source = _source(config.load_format, folder, dtype, device, Progress(model.parameters(), stage))
    if isinstance(model, ReadoutShape):
        return Readout(readout_head(model, source, target, whole), dtype, device)
    if model.recurrent is not None:
        raise Unsupported(
            f"--speculate draft={speculation.draft}: with {model.recurrent.name} it can't take drafts back: take another"
        )
    if taps is not None:
        made_up = config.load_format == "dummy"
        head = MtpHead(model, target, source, made_up) if own else Eagle3(model, source, target, whole)
        target.kept = head.taps
        return Drafter(head, target.shape.vocabulary, device, speculation.most)
    # Drafts need not be bit-exact.
    decoder = Decoder(model, source, Ranks(0, 1, device), device, exact=Invariance.GUESS)
    return Drafter(decoder, target.shape.vocabulary, device, speculation.most)


def _source(load_format: str, folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress) -> Source:
    return DummyWeights(dtype, device, progress) if load_format == "dummy" else Weights(folder, dtype, device, progress)


def _device(config: ShardConfig) -> torch.device:
    if config.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Unsupported("torch sees no CUDA device: install its build for CUDA (AMD's GPUs: for ROCm), or use --device cpu")
    if config.device_number >= torch.cuda.device_count():
        raise Unsupported(f"rank {config.rank} has no device: there are {torch.cuda.device_count()}; use a smaller --num-shard")
    device = torch.device("cuda", config.device_number)
    torch.cuda.set_device(device)
    return device
