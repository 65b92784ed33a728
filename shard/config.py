"""What one shard process is told by the launcher. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """Settings of one rank. Sizes are tokens unless a name says otherwise."""

    folder: str  # of the model: config.json, safetensors
    model: str  # what the operator asked for, to be shown
    name: str = ""  # of this process in log lines; "": by its rank
    rank: int = 0
    ranks: int = 1
    local_rank: int = -1  # its number on its machine, which is also its device's; -1: as its rank
    local_ranks: int = 0  # on its machine, which share its memory; the first machine has the first ranks; 0: all
    device: str = "cpu"  # "cpu" or "cuda"
    dtype: str = "float32"  # of weights: "float32", "bfloat16", "float16"
    quantize: str = ""  # what the checkpoint's weights are, or are rounded to: see `Shape.quantized`
    adapters: tuple[tuple[str, str], ...] = ()  # by which requests may go: the name and the folder of each
    max_loras: int = 0  # of them at once, if others may come while it serves
    max_lora_rank: int = 16  # the highest that these may have
    hub_cache: str = ""  # where these are kept if they come from the hub; "": the hub's own
    load_format: str = "auto"  # "auto": safetensors of the folder; "dummy": random weights from config.json alone
    kv_cache_dtype: str = "auto"  # of keys and values: as the weights; "fp8_e4m3fn": 8 bits, with the checkpoint's scales or 1
    kernels: str = ""  # "reference" (plain torch) or "triton" for tests; "": Triton on CUDA, torch elsewhere
    cuda_graphs: str = "auto"  # which steps are recorded as graphs; see `graph_sizes.parse`
    overlap: str = "auto"  # "on": steps are begun before the tokens of the last one are known; "auto": on CUDA; "off"
    batch_invariant: bool = False  # what is computed for a token depends by no bit on what else is in the batch
    page_size: int = 16
    longest: int = 0  # prompt and answer together, of models that go by that; 0: all that they can
    kv_pages: int = 0  # size of the pool in pages; 0: from the memory that is left after warm-up
    kv_offload_gib: float = 0.0  # of the host's memory, of all ranks on a machine together, for copies of pages that others take
    prefix_caching: bool = True  # computed prefixes are kept for later requests while nobody needs their pages
    memory_fraction: float = 0.9  # of the device's memory (on a CPU: of this rank's share of what is available) to be used
    speculate: str = ""  # how drafts are proposed and verified, see `proto.speculation`; a draft model is named by its folder
    image_pixels: int = 0  # the most that an image has; 0: what encodes images is not loaded
    images_asked: bool = False  # by the operator: without what encodes them nothing is served, instead of text alone
    threads: int = 1  # compute threads of this rank (CPU)
    socket: str = ""  # unix socket of this rank's service
    listen: str = ""  # address:port of it instead, to be reached from other machines
    relay: str = ""  # unix socket on which rank 0 passes commands to the other ranks of its machine; "" on other machines
    relay_address: str = ""  # address:port at which it does for those of other machines
    token: str = ""  # by which the ranks of a group know each other there
    link_timeout: float = 20.0  # seconds of silence after which another machine is lost
    tls_cert: str = ""  # PEM files by which machines trust each other; "": no TLS
    tls_key: str = ""
    tls_ca: str = ""
    meeting: str = ""  # file by which the ranks of one machine meet (torch.distributed); "": these do at an address
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    json_output: bool = False  # log lines as JSON

    @property
    def neighbours(self) -> int:
        """Ranks on this machine."""
        return self.local_ranks or self.ranks

    @property
    def device_number(self) -> int:
        """Of this rank's device."""
        return self.rank if self.local_rank < 0 else self.local_rank
