"""Cost models of a model on a device: numbers to simulate with. Knows no scheduler."""

from dataclasses import dataclass

from .shard import Outcome


@dataclass(frozen=True, slots=True)
class Speed:
    """A linear cost model of a step, in seconds."""

    step: float  # per step
    token: float  # per query token
    prompt_key: float  # per key that a prompt's token attends to
    decode_key: float  # per key that a decode's token attends to: these are read for one token only
    row: float  # per sampled token

    def seconds(self, done: Outcome) -> float:
        """Seconds of a step."""
        tokens = done.prompt_tokens + done.decode_tokens
        if not tokens:
            return 0.0
        keys = self.prompt_key * done.prompt_keys + self.decode_key * done.decode_keys
        return self.step + self.token * tokens + keys + self.row * done.rows

    def sample(self, tokens: int) -> float:
        """Seconds of one prompt of `tokens` tokens: what the router measures at warm-up."""
        return self.seconds(Outcome(prompt_tokens=tokens, prompt_keys=tokens * (tokens + 1) // 2, rows=1))


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a device."""

    what: str
    speed: Speed
    tokens: int  # whose keys and values its memory holds
    step_tokens: int


MACHINES = {
    # 15 GB of weights and 128 KiB of keys and values per token at 4.3 TB/s; 16 GFLOP per token at 0.8 PFLOP/s. Not measured.
    "8b-h200": Machine("8 B parameters in bfloat16 on one H200", Speed(3.9e-3, 2.0e-5, 0.9e-9, 3.0e-8, 1.0e-6), 800_000, 4096),
    # Read off benchmarks/latency.py and load.py on a small machine.
    "cpu-demo": Machine("the demo model on one CPU core", Speed(4.5e-3, 2.2e-4, 1.1e-7, 1.5e-7, 2.0e-4), 16_384, 512),
}
