"""What the scheduler itself costs per step, in microseconds of one core: beside vLLM's where `vllm` can be imported,
as in the environment that `benchmarks/cpu.py` uses for it, after `pip install --no-deps --no-build-isolation -e .` there.

    python benchmarks/scheduler.py                      32, 256 and 1024 running sequences
    python benchmarks/scheduler.py --running 256 --steps 5000

Only `next` and `report` are timed; what they are told comes from shards that count (`penstock.simulator`), with pages of 16 tokens,
and the next step is asked for before the last one is reported, as in the server.

    decode    nothing but decoding: with 16 tokens a page, 1/8 of the sequences have something new to say in each step
    waiting   the same with 512 jobs in the queue, for which there is no room
    churn     jobs of 200 tokens end and others take their place, prompts of 300 tokens in steps of 512
"""

import argparse
import importlib.util
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.bench.flags import at_least, checked, count, numbers
from penstock.router.cost import Cost
from penstock.router.policies import ChunkedPrefill
from penstock.router.scheduler import Action, Bounds, Job, Prefill, Report, Scheduler
from penstock.simulator.replay import report
from penstock.simulator.shard import Asked, IntegerShard

GOALS = {256: 150.0, 1024: 300.0}  # microseconds per step of plain decoding
PAGE = 16
LONG = 10_000  # generated tokens of a job that does not end here


class World:
    """A scheduler with so many running jobs, and the times of its calls."""

    def __init__(self, running: int, waiting: int, output: int) -> None:
        self.bounds = Bounds(pages=running * 1000, page_size=PAGE, step_tokens=512, sequences=running)  # nothing is preempted
        self.scheduler = Scheduler(self.bounds, ChunkedPrefill(512, Cost(512, 0.05), 0.1))
        self.shard = IntegerShard(self.bounds.pages, PAGE, prefix_caching=False)
        self.seconds: list[float] = []
        self._output = output
        self._uids = 0
        for _ in range(running + waiting):
            self._arrive()

    def _arrive(self) -> None:
        self._uids += 1
        self.scheduler.arrive(Job(self._uids, 300 + self._uids * 7 % PAGE, self._output, rank=self._uids))

    def run(self, steps: int) -> None:
        """Times `steps` steps, after as many as it takes to fill the batch."""
        told = self._execute(self._next())
        for _ in range(4 * self.bounds.sequences if self._output == LONG else 1000):
            told = self._turn(told)
        self.seconds.clear()
        for _ in range(steps):
            told = self._turn(told)
        assert self._output < LONG or told.decode_tokens == self.bounds.sequences

    def _turn(self, told: Report) -> Report:
        """Requests a step while another is in flight, and reports that one."""
        began = time.thread_time()
        action = self.scheduler.next()
        asked = time.thread_time() - began
        assert action is not None
        later = self._execute(action)
        began = time.thread_time()
        self.scheduler.report(told)
        self.seconds.append(asked + time.thread_time() - began)
        for _ in told.finished:
            self._arrive()
        return later

    def _next(self) -> Action:
        action = self.scheduler.next()
        assert action is not None
        return action

    def _execute(self, action: Action) -> Report:
        """Executes an action, with a GPU's step times, so that the policy has realistic input."""
        if isinstance(action, Prefill):
            new = [Asked(uid=uid, prompt=300 + uid * 7 % PAGE, most=self._output) for uid in action.new]
            done = self.shard.prefill(new, action.chunks, action.tokens, action.decode)
        else:
            done = self.shard.decode()
        return report(done, 4e-3 + 2e-5 * (done.prompt_tokens + done.decode_tokens))


def ours(running: int, waiting: int, output: int, steps: int) -> list[float]:
    """Microseconds of each step."""
    world = World(running, waiting, output)
    world.run(steps)
    return [seconds * 1e6 for seconds in world.seconds]


def vllm(running: int, steps: int) -> list[float]:
    """The same for vLLM: `schedule` and `update_from_output`, in microseconds. Follows vLLM's own tests; arguments that a version
    does not have are left out. vLLM's also checks for the end of each sequence and makes its output, which our shards and streams
    do."""
    import torch
    from vllm import config  # type: ignore[import-not-found]
    from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
    from vllm.v1 import kv_cache_interface as cache  # type: ignore[import-not-found]
    from vllm.v1.core.sched.scheduler import Scheduler as Theirs  # type: ignore[import-not-found]
    from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found]
    from vllm.v1.request import Request  # type: ignore[import-not-found]
    from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]

    pages, length = running * 200, 4096
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 1000}
        described = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": length, **shape}
        (Path(folder) / "config.json").write_text(json.dumps(described))
        settings = config.VllmConfig(
            model_config=_call(config.ModelConfig, model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=length),
            scheduler_config=_call(
                config.SchedulerConfig,
                max_num_seqs=running,
                max_num_batched_tokens=8192,
                max_model_len=length,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=_call(config.CacheConfig, block_size=PAGE, enable_prefix_caching=False),
        )
    settings.cache_config.num_gpu_blocks = pages
    spec = _call(cache.FullAttentionSpec, block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32, use_mla=False)
    groups = [cache.KVCacheGroupSpec(["layer"], spec)]
    scheduler = _call(
        Theirs,
        vllm_config=settings,
        kv_cache_config=cache.KVCacheConfig(num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(settings),
        block_size=PAGE,
        log_stats=True,
    )
    for uid in range(running):
        asked = {"request_id": str(uid), "prompt_token_ids": [uid % 900] * (300 + uid * 7 % PAGE), "pooling_params": None}
        sampling = SamplingParams(max_tokens=3000, ignore_eos=True)
        scheduler.add_request(_call(Request, **asked, sampling_params=sampling, eos_token_id=2, client_index=0))
    taken: list[float] = []
    while len(taken) < steps:
        began = time.thread_time()
        plan = scheduler.schedule()
        asked_for = time.thread_time() - began
        names = list(plan.num_scheduled_tokens)
        answer = _call(
            ModelRunnerOutput,
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        began = time.thread_time()
        scheduler.update_from_output(plan, answer)
        if len(names) == running and set(plan.num_scheduled_tokens.values()) == {1}:
            taken.append((asked_for + time.thread_time() - began) * 1e6)
    return taken


def _call(make: Callable[..., Any], **arguments: object) -> Any:
    """Calls with those arguments that this version knows."""
    known = inspect.signature(make).parameters
    return make(**{name: value for name, value in arguments.items() if name in known})


def main() -> int:
    """See the module. Exit code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=checked(numbers(count)), default="32,256,1024", help="sequences, with commas")
    parser.add_argument("--steps", type=checked(at_least(2)), default=1000, help="timed")
    options = parser.parse_args()
    print(f"{'microseconds per step':28}{'running':>8}{'p50':>9}{'mean':>9}{'p99':>9}")
    missed = False
    for running in options.running:
        rows = {
            "decode": ours(running, 0, LONG, options.steps),
            "waiting": ours(running, 512, LONG, options.steps),
            "churn": ours(running, 512, 200, options.steps),
        }
        if importlib.util.find_spec("vllm") is not None:
            try:
                rows["vllm decode"] = vllm(running, max(20, options.steps // 5))
            except Exception as error:
                print(f"vllm is left out: {type(error).__name__}: {error}")
        for name, taken in rows.items():
            ranks = statistics.quantiles(taken, n=100)
            print(f"{name:28}{running:8}{statistics.median(taken):9.1f}{statistics.mean(taken):9.1f}{ranks[98]:9.1f}")
        goal, found = GOALS.get(running), statistics.mean(rows["decode"])
        if goal is not None:
            print(f"goal {goal:.0f} at {running}: {'met' if found <= goal else 'MISSED'}")
            missed |= found > goal
        if "vllm decode" in rows:
            print(f"vllm takes {statistics.mean(rows['vllm decode']) / found:.0f}x as long")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
