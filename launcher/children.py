"""What the launcher passes to its child processes: the settings of router and shards, their command line and environment."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..proto.speculation import NOTHING, Speculation, written
from ..router.config import RouterConfig
from ..shard.config import ShardConfig
from . import adapters, option_types, options
from .adapters import Adapter
from .options import Options
from .plan import Plan
from .replicas import Place
from .vision import BODY

SECRETS = ("API_KEY", "ADMIN_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")  # no child needs them


def router_config(asked: Options, name: str, folder: Path, addresses: Sequence[Sequence[str]], images: int = 0) -> RouterConfig:
    """The router's settings. Options and settings of the same name have the same value. addresses: of the ranks of each group that
    is started here; images: the most images of a request."""
    groups = (*map(tuple, addresses), *asked.remote_replicas)
    fields = {field.name for field in dataclasses.fields(RouterConfig)} & set(options.FIELDS)
    given = {field: value for field in fields if (value := getattr(asked, field)) is not None}
    given["speculate"] = asked.speculation.most
    given |= {"max_images": images, "images_asked": bool(images and asked.max_images)}
    if images and asked.payload_limit == options.ROUTER.payload_limit:
        given["payload_limit"] = BODY
    given["adapters"] = tuple(adapters.sources(asked, name))
    keys = option_types.keys_of(asked.api_key)
    return RouterConfig(folder=str(folder), model=name, groups=groups, api_keys=keys, **given)


def shard_configs(
    asked: Options, name: str, planned: Plan, place: Place, speculation: Speculation = NOTHING, loras: Sequence[Adapter] = ()
) -> list[ShardConfig]:
    """The settings of each rank of a group on this machine."""
    first = (asked.node_rank or 0) * planned.local_ranks
    return [
        ShardConfig(
            folder=str(planned.checkpoint.folder),
            model=name,
            name=place.process(rank),
            rank=rank,
            ranks=planned.ranks,
            local_rank=rank - first,
            local_ranks=planned.local_ranks,
            device=planned.device,
            dtype=planned.dtype,
            quantize=asked.quantize,
            adapters=adapters.names(loras),
            max_loras=asked.max_loras,
            max_lora_rank=asked.max_lora_rank,
            hub_cache=asked.huggingface_hub_cache if asked.max_loras else "",
            kv_cache_dtype=asked.kv_cache_dtype,
            kernels=asked.penstock_kernels,
            cuda_graphs=asked.cuda_graphs,
            overlap=asked.overlap,
            batch_invariant=asked.batch_invariant,
            load_format=asked.load_format,
            page_size=asked.page_size,
            # Other models ignore it, and nodes may differ in it.
            longest=asked.max_total_tokens if planned.shape.rope.kind == "longrope" else 0,
            kv_pages=asked.pool_pages,
            kv_offload_gib=asked.kv_offload_gib,
            prefix_caching=asked.prefix_caching == "on",
            speculate=written(speculation),
            image_pixels=asked.max_image_pixels if planned.vision.images else 0,
            images_asked=bool(asked.max_images),
            # Replicas on a CPU share its memory; the ranks of a group divide their replica's part themselves.
            memory_fraction=asked.cuda_memory_fraction / (asked.local_replicas if planned.device == "cpu" else 1),
            threads=planned.threads,
            socket="" if place.listen else place.sockets[rank - first],
            listen=place.listen[rank - first] if place.listen else "",
            tls_cert=asked.tls_cert if place.listen else "",
            tls_key=asked.tls_key if place.listen else "",
            tls_ca=asked.tls_ca if place.listen else "",
            relay=place.relay if planned.local_ranks > 1 else "",
            meeting=place.meeting if 1 < planned.ranks == planned.local_ranks else "",
            json_output=asked.json_output,
        )
        for rank in range(first, first + planned.local_ranks)
    ]


def command(module: str, configuration: str) -> list[str]:
    """The command line of a process: the module that it runs, and its settings as `proto.settings` reads them."""
    # -P: modules come from where penstock is installed, never from the working directory.
    return [sys.executable, "-P", "-m", module, configuration]


def hub_tokens(asked: Options, given: Mapping[str, str]) -> dict[str, str]:
    """Hub tokens for shards that may download private adapters."""
    names = [name for name in SECRETS if name.startswith(("HF_", "HUGGING_FACE_"))] if asked.max_loras else []
    return {name: given[name] for name in names if name in given}


def environment(given: Mapping[str, str], threads: int, interpret: bool = False, local: bool = False) -> dict[str, str]:
    """The launcher's environment without secrets, and with the variables that libraries read before any of our code runs.
    interpret: Triton runs kernels in its interpreter on a CPU; local: ranks talk within this machine only, where Gloo would
    otherwise listen at the address of the host name."""
    libraries = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    return {
        **{name: value for name, value in given.items() if name not in SECRETS},
        **{name: str(value) for name, value in libraries.items()},
        # Steps run on a thread of their own, whose malloc arena would return memory and fault it in again (7 % of a prefill).
        "MALLOC_ARENA_MAX": "1",
        # Waiting threads that spin take a busy machine's cores from those that they wait for: down to a thirtieth of the speed.
        "OMP_WAIT_POLICY": given.get("OMP_WAIT_POLICY", "PASSIVE"),
        # A message passes one thread instead of four that wake each other: saves half of gRPC's CPU time of a step, in router and
        # shard.
        "GRPC_EXPERIMENTS": given.get("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener"),
        # The order of nvidia-smi, from which the plan was made; CUDA's own order puts the fastest GPU first.
        "CUDA_DEVICE_ORDER": given.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "PYTHONUNBUFFERED": "1",  # their log lines arrive when they are written
        "TOKENIZERS_PARALLELISM": "false",  # one prompt at a time gains nothing from it
        **({"TRITON_INTERPRET": "1"} if interpret else {}),
        **({"GLOO_SOCKET_IFNAME": given.get("GLOO_SOCKET_IFNAME", "lo")} if local else {}),
    }
