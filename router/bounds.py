"""Derives limits of requests, and the scheduler with its bounds and policies, from settings, model and memory. Pure."""

from ..proto import images, shard_pb2
from .config import Misconfigured, RouterConfig
from .cost import Cost
from .drafting import DraftBudget
from .policies import ChunkedPrefill, Policy, WholePrefill
from .request import Limits
from .scheduler import Bounds, Scheduler

STEP_TOKENS, CPU_STEP_TOKENS = 4096, 512  # default tokens of a step: see `step_tokens`


def bounds_of(config: RouterConfig, info: shard_pb2.InfoReply, warm: shard_pb2.WarmupReply) -> tuple[Limits, Bounds]:
    """Limits of a request and bounds on what runs at once, from settings, model and memory. Raises Misconfigured."""
    lacking = ", ".join(name for name in config.adapters if name not in info.adapters)
    if lacking:
        raise Misconfigured(f"the shards have no adapter {lacking}: give them and the router the same --lora-adapters")
    if config.max_loras > info.max_loras:
        raise Misconfigured(
            f"the shards have room for {info.max_loras} adapters that come later: give them and the router the same --max-loras "
            f"({config.max_loras})"
        )
    if config.batch_invariant and not info.batch_invariant:
        raise Misconfigured("the shards don't keep what --batch-invariant promises: start them with it, or leave it out")
    if config.images_asked and not warm.images:
        raise Misconfigured(f"the shards see no images: start them with --max-images {config.max_images}, or leave it out")
    capacity = warm.pages * warm.page_size
    pool = f"the pool's capacity of {capacity} ({warm.pages} pages of {warm.page_size})"
    more = "or give the pool more memory (--kv-pages, --cuda-memory-fraction, more shards)"
    total = config.max_total_tokens or min(capacity, info.max_positions)
    if total > info.max_positions:
        raise Misconfigured(f"--max-total-tokens {total} is more than the model's {info.max_positions} positions: lower it")
    if total > capacity:
        raise Misconfigured(f"--max-total-tokens {total} is more than {pool}: lower it, {more}")
    if total < 2:
        raise Misconfigured(f"no request fits: a prompt and an answer have {total} tokens at most; raise --max-total-tokens {more}")
    prompt = config.max_input_tokens or total - 1
    if prompt >= total:
        raise Misconfigured(
            f"--max-input-tokens {prompt} leaves no room for an answer within {total} tokens in total: lower it to at most "
            f"{total - 1}, or raise --max-total-tokens"
        )
    sequences = min(config.sequences, warm.sequences or config.sequences)
    limits = Limits(
        max_input_tokens=prompt,
        max_total_tokens=total,
        vocabulary=info.vocabulary,
        pages=warm.pages,
        page_size=warm.page_size,
        sequences=sequences,
        images=warm.images,
    )
    bounds = Bounds(
        pages=warm.pages,
        page_size=warm.page_size,
        step_tokens=step_tokens(config, info),
        sequences=sequences,
        attached=images.MOST,
    )
    return limits, bounds


def scheduler_of(config: RouterConfig, bounds: Bounds, warm: shard_pb2.WarmupReply) -> Scheduler:
    """A scheduler with the prefill policy that the operator chose and, for speculative decoding, a budget of drafts."""
    cost = Cost(warm.sample_tokens, warm.sample_seconds)
    drafts = DraftBudget(cost, bounds.step_tokens, config.speculate, config.itl_target) if config.speculate else None
    policy: Policy = ChunkedPrefill(bounds.step_tokens, cost, config.itl_target)
    if config.prefill_policy == "pause":
        known = cost if config.speculate else None
        policy = WholePrefill(bounds.step_tokens, config.waiting_served_ratio, config.max_waiting_tokens, known)
    return Scheduler(bounds, policy, drafts)


def step_tokens(config: RouterConfig, info: shard_pb2.InfoReply) -> int:
    """Most query tokens in a step. A CPU computes a few hundred a second, and streams wait while a step runs."""
    return config.max_batch_prefill_tokens or (CPU_STEP_TOKENS if info.device == "cpu" else STEP_TOKENS)
