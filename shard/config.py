"""Configuration of one shard process, sent by the launcher. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """Settings of one rank. Sizes are tokens unless a name says otherwise."""

    folder: str  # of the model: config.json, safetensors
    model: str  # the name the operator asked for, for display
    name: str = ""  # of this process in log lines; "": by its rank
    rank: int = 0
    ranks: int = 1
    local_rank: int = -1  # its number on its machine, which is also its device's; -1: as its rank
    local_ranks: int = 0  # ranks on its machine, which share its memory; the first machine has the first ranks; 0: all
    device: str = "cpu"  # "cpu" or "cuda"
    dtype: str = "float32"  # of weights: "float32", "bfloat16", "float16"
    quantize: str = ""  # quantization of the checkpoint, or to apply to its weights: see `Shape.quantized`
    adapters: tuple[tuple[str, str], ...] = ()  # LoRA adapters: the name and the folder of each
    max_loras: int = 0  # the most LoRA adapters at once, if others may be loaded while it serves
    max_lora_rank: int = 16  # the highest rank of those
    hub_cache: str = ""  # download folder for those from the hub; "": the hub's own
    load_format: str = "auto"  # "auto": safetensors of the folder; "dummy": random weights from config.json alone
    kv_cache_dtype: str = "auto"  # of the KV cache: as the weights; "fp8_e4m3fn": 8 bits, with the checkpoint's scales or 1
    kernels: str = ""  # "reference" (plain torch) or "triton" for tests; "": Triton on CUDA, torch elsewhere
    cuda_graphs: str = "auto"  # sizes of steps recorded as CUDA graphs; see `graph_sizes.parse`
    overlap: str = "auto"  # "on": steps are begun before the tokens of the last one are known; "auto": on CUDA; "off"
    batch_invariant: bool = False  # results for a token are bit-identical whatever else is in the batch
    page_size: int = 16
    longest: int = 0  # prompt and answer together, of models that depend on it (longrope, chunked attention); 0: their maximum
    kv_pages: int = 0  # size of the pool in pages; 0: from the memory that is left after warm-up
    kv_offload_gib: float = 0.0  # host memory for copies of evicted KV pages, for all ranks on a machine together
    prefix_caching: bool = True  # prefix caching: computed prefixes stay cached while nobody needs their pages
    memory_fraction: float = 0.9  # of the device's memory (on a CPU: of this rank's share of what is available) to be used
    speculate: str = ""  # speculative decoding, see `proto.speculation`; a draft model is given by its folder
    image_pixels: int = 0  # the most pixels of an image; 0: the vision encoder is not loaded
    # the operator requires images: if the vision encoder can't be loaded, fail instead of serving text only
    images_asked: bool = False
    threads: int = 1  # compute threads of this rank (CPU)
    socket: str = ""  # unix socket of this rank's service
    listen: str = ""  # address:port of the service instead, to be reached from other machines
    relay: str = ""  # unix socket on which rank 0 relays commands to the other ranks of its machine; "" on other machines
    relay_address: str = ""  # address:port on which it does so for those of other machines
    token: str = ""  # shared secret by which the ranks of a group recognize each other there
    link_timeout: float = 20.0  # seconds of silence after which another machine counts as lost
    tls_cert: str = ""  # PEM files for mutual TLS between machines; "": no TLS
    tls_key: str = ""
    tls_ca: str = ""
    meeting: str = ""  # rendezvous file for the ranks of one machine (torch.distributed); "": they use the address below
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    json_output: bool = False  # log lines as JSON

    @property
    def neighbours(self) -> int:
        """Ranks on this machine."""
        return self.local_ranks or self.ranks

    @property
    def device_number(self) -> int:
        """Number of this rank's device."""
        return self.rank if self.local_rank < 0 else self.local_rank
