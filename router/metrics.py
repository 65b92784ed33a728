"""Prometheus metrics: every number the router counts, in one table, and the only place that counts. Knows no request's content.

Names with `tgi_` are text-generation-inference's, with its meaning, so that its dashboards work. Who counts what:
  batcher   each submitted request (`arrived`, then `done` or `failed`), each step, the gauges of its state (`watch`)
  api       requests that it refuses before they reach the batcher (`turned_away`), and those that it finds valid (`validated`)

Names with `vllm:` are vLLM's, which gateways, autoscalers and dashboards read. Nothing is counted for them: they are derived from
ours when they are scraped.
"""

import itertools
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import prometheus_client
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..proto import shard_pb2
from .request import Failure, Finish, Request
from .scheduler import Action, Decode, Filter, Prefill

SECONDS = tuple(1e-4 * 1.5**power for power in range(1, 36))  # to 146 s, as in TGI
RECOVERY = tuple(0.5 * 1.5**power for power in range(19))  # to 12 minutes: large models take long to load
TOKENS = tuple(2.0**power for power in range(21))

COUNTERS = {
    "tgi_request_count": ("Requests received", ()),
    "tgi_request_success": ("Requests answered completely", ()),
    "tgi_request_failure": ("Requests that failed", ("err",)),
    "tgi_batch_inference_count": ("Steps requested from the shards", ("method",)),
    "tgi_batch_inference_success": ("Steps completed by the shards", ("method",)),
    "tgi_batch_inference_failure": ("Steps in which a group failed, or whose shards were lost", ("method",)),
    "tgi_batch_concat": ("Steps in which requests joined a running batch", ("reason",)),
    "penstock_client_disconnects": ("Requests whose client disconnected before their end", ()),
    "penstock_prompt_tokens": ("Prompt tokens computed, recomputed ones included", ()),
    "penstock_cached_prompt_tokens": ("Prompt tokens found in the prefix cache", ()),
    "penstock_restored_tokens": ("Tokens recomputed for preempted requests", ()),
    "penstock_pauses": ("Preemptions: running requests whose pages were taken back for a while", ()),
    "penstock_drafted_tokens": ("Draft tokens proposed by speculative decoding", ()),
    "penstock_accepted_tokens": ("Draft tokens accepted", ()),
    "penstock_drafted_positions": ("Draft positions that verification reached, by distance from the last token", ("position",)),
    "penstock_accepted_positions": (
        "Draft positions where one of the drafts was accepted, by distance from the last token",
        ("position",),
    ),
    "penstock_speculation_steps": ("Steps with answers that may speculate, by whether any had drafts", ("drafts",)),
    "penstock_draft_seconds": ("Seconds spent on proposing drafts", ()),
    "penstock_draft_rounds": ("Runs of the draft model", ()),
    "penstock_verify_seconds": ("Seconds of steps with drafts, as the shard sees it, less the time for proposing them", ()),
    "penstock_mask_seconds": ("Seconds spent on grammar masks on the shards, mostly while the model computed", ()),
    "penstock_mask_wait_seconds": ("Seconds that steps waited for grammar masks", ()),
    "penstock_generated_tokens": ("Tokens generated", ()),
    "penstock_out_of_memory": ("Times that a step ran out of memory and was computed in smaller parts", ()),
    "penstock_overlapped_steps": (
        "Steps launched before the tokens of the previous step had reached the host (overlap scheduling)",
        (),
    ),
    "penstock_saved_pages": ("Pages copied to host memory when they were evicted from the KV cache", ()),
    "penstock_loaded_pages": ("Pages copied back from host memory instead of being recomputed", ()),
    "penstock_restarts": ("Times that shards were lost and replaced", ()),
    "penstock_replayed_requests": ("Requests that resumed after their shards were lost", ()),
    "penstock_moved_requests": ("Requests moved to another replica because theirs was lost or left", ()),
    "penstock_placements": ("Requests placed on a replica, by the reason for choosing it", ("replica", "reason")),
    "penstock_placement_hit_tokens": (
        "Prompt tokens expected in the prefix cache of the chosen replica",
        ("replica",),
    ),
    "penstock_finished_requests": ("Requests answered completely, by the finish reason of their last answer", ("reason",)),
}
GAUGES = {
    "tgi_queue_size": "Waiting requests",
    "tgi_batch_current_size": "Running requests",
    "tgi_batch_current_max_tokens": "Tokens that fit into the pages of running requests",
    "tgi_batch_max_total_tokens": "Tokens that fit into the KV cache",
    "penstock_waiting": "Waiting requests",
    "penstock_running": "Running requests",
    "penstock_paused": "Preempted requests that wait to resume",
    "penstock_slow_clients": "Clients whose stream was closed because they did not read it",
    "penstock_pages_total": "Pages of the KV cache",
    "penstock_pages_free": "Free pages, including cached prefixes",
    "penstock_pages_cached": "Free pages that hold cached prefixes",
    "penstock_pages_held": "Pages of running requests",
    "penstock_kv_cache_usage_ratio": "Share of the pages held by running requests, from 0 to 1",
    "penstock_grammars_compiled": "Grammars compiled to check that they are satisfiable",
    "penstock_grammars_found": "Grammars found in the cache of checked ones",
    "penstock_prompt_budget": "Prompt token budget of the last step with prompts",
    "penstock_prompt_budget_used": "Prompt tokens computed in the last step with prompts",
    "penstock_replicas_ready": "Replicas that accept requests",
}
# Gauges per replica, with the gauge that shows the sum of all.
REPLICA_GAUGES = {
    "penstock_replica_up": ("penstock_replicas_ready", "Whether the replica accepts requests"),
    "penstock_replica_running": ("penstock_running", "Requests running on the replica"),
    "penstock_replica_waiting": ("penstock_waiting", "Requests waiting for the replica"),
    "penstock_replica_pages_total": ("penstock_pages_total", "Pages of the replica's KV cache"),
    "penstock_replica_pages_free": ("penstock_pages_free", "Free pages of the replica, including cached prefixes"),
}
HISTOGRAMS = {
    "tgi_request_duration": ("Seconds from arrival to the end: validation, queue and inference", (), SECONDS),
    "tgi_request_validation_duration": ("Seconds from arrival to the queue, tokenization included", (), SECONDS),
    "tgi_request_queue_duration": ("Seconds in the queue, until the first step that computed something", (), SECONDS),
    "tgi_request_inference_duration": ("Seconds from the first step that computed something of a request to its end", (), SECONDS),
    "tgi_request_mean_time_per_token_duration": ("Seconds of inference per generated token", (), SECONDS),
    "tgi_request_generated_tokens": ("Generated tokens of a request", (), TOKENS),
    "tgi_request_input_length": ("Prompt tokens of a valid request", (), TOKENS),
    "tgi_request_max_new_tokens": ("Most tokens that a valid request may generate", (), TOKENS),
    "tgi_request_skipped_tokens": ("Tokens per step beyond the first (speculative decoding)", (), TOKENS),
    "tgi_batch_next_size": ("Requests whose prefill began in a step", (), TOKENS[:11]),
    "tgi_batch_inference_duration": ("Seconds of a step, as the router sees it", ("method",), SECONDS),
    "tgi_batch_forward_duration": ("Seconds of a step, as the shard sees it", ("method",), SECONDS),
    "tgi_batch_decode_duration": ("Seconds of a step outside the shard's forward", ("method",), SECONDS),
    "tgi_batch_filter_duration": ("Seconds of removing requests from the batch", ("method",), SECONDS),
    "tgi_batch_concat_duration": ("Seconds of joining batches (they are lists of ids)", ("method",), SECONDS),
    "penstock_step_seconds": ("Seconds of a step, as the shard sees it", ("kind",), SECONDS),
    "penstock_recovery_seconds": ("Seconds from the loss of shards until they were replaced", (), RECOVERY),
    "penstock_time_to_first_token_seconds": ("Seconds from arrival to the first token", (), SECONDS),
    "penstock_inter_token_latency_seconds": ("Seconds between tokens of a request", (), SECONDS),
    "penstock_prefill_seconds": ("Seconds from the first step of a request to its first token", (), SECONDS),
    "penstock_decode_seconds": ("Seconds from the first token of a request to its end", (), SECONDS),
    "penstock_time_per_output_token_seconds": (
        "Seconds for each token of a request after its first; 0: there was no other",
        (),
        SECONDS,
    ),
    "penstock_request_prompt_tokens": ("Prompt tokens of an answered request", (), TOKENS),
    "penstock_request_max_new_tokens": ("Most tokens that an answered request might generate", (), TOKENS),
    "penstock_request_choices": ("Answers requested (n, best_of)", (), TOKENS[:8]),
}
POSITIONS = 8  # draft positions counted separately; the last one stands for all beyond
# TGI's names carry no unit, prometheus_client insists on one.
UNIT = re.compile(rb"^((?:# (?:HELP|TYPE) )?tgi_\w+)_total\b", re.MULTILINE)


class Metrics:
    """The metrics registry of one router."""

    def __init__(self, model: str = "") -> None:
        """model: its name for clients."""
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = prometheus_client.CollectorRegistry()
        self._counters = {
            name: prometheus_client.Counter(name, text, labels, registry=registry) for name, (text, labels) in COUNTERS.items()
        }
        self._gauges = {name: prometheus_client.Gauge(name, text, registry=registry) for name, text in GAUGES.items()}
        histograms = {name: Histogram(name, text, bounds, labels) for name, (text, labels, bounds) in HISTOGRAMS.items()}
        for histogram in histograms.values():
            registry.register(histogram)
        self._rows = {name: histograms[name].labels() for name, (_, labels, _) in HISTOGRAMS.items() if not labels}
        self._watched: dict[str, dict[str, Callable[[], float]]] = {}  # readers of a gauge's value, by replica
        registry.register(Shares(self._watched))
        self._gauges["penstock_kv_cache_usage_ratio"].set_function(self._usage)
        self._as_vllm = VllmMetrics(registry, model)
        # Looked up once: these are needed in every step.
        self._methods = {method: _Method(self._counters, histograms, method) for method in ("prefill", "decode")}
        self._kinds = {kind: histograms["penstock_step_seconds"].labels(kind) for kind in ("prefill", "decode", "mixed")}
        self._filter = histograms["tgi_batch_filter_duration"].labels("decode")
        self._concat = self._counters["tgi_batch_concat"].labels(reason="chunking")
        self._concat_seconds = histograms["tgi_batch_concat_duration"].labels("decode")
        self._prompt_tokens = self._counters["penstock_prompt_tokens"]
        self._generated_tokens = self._counters["penstock_generated_tokens"]

    def watch(self, name: str, read: Callable[[], float], replica: str = "") -> None:
        """The gauge shows what `read` returns at each scrape; the sum, where there are several replicas."""
        reads = self._watched.setdefault(name, {})
        reads[replica] = read
        self._gauges[name].set_function(lambda: sum(each() for each in reads.values()))

    def watch_adapters(self, most: int, read: Callable[[], tuple[Iterable[str], Iterable[str]]]) -> None:
        """`read` returns the names of LoRA adapters of running and of waiting requests; most: the most adapters at once."""
        self._as_vllm.adapters = most, read

    def left(self, replica: str) -> None:
        """Removes a replica from all gauges and from the counters' labels, which would accumulate otherwise."""
        for reads in self._watched.values():
            reads.pop(replica, None)
        for name, (_, labels) in COUNTERS.items():
            if "replica" in labels:
                samples = [sample.labels for family in self._counters[name].collect() for sample in family.samples]
                for values in {tuple(sample[label] for label in labels) for sample in samples if sample["replica"] == replica}:
                    self._counters[name].remove(*values)

    def placed(self, replica: str, reason: str, hit: int) -> None:
        """A request was placed on a replica, where `hit` tokens of its prompt are probably cached."""
        self._counters["penstock_placements"].labels(replica=replica, reason=reason).inc()
        self._counters["penstock_placement_hit_tokens"].labels(replica=replica).inc(hit)

    def moved(self, count: int) -> None:
        """`count` requests moved to other replicas."""
        self._counters["penstock_moved_requests"].inc(count)

    def arrived(self) -> None:
        """A request was submitted."""
        self._counters["tgi_request_count"].inc()

    def failed(self, kind: str) -> None:
        """A request is not answered to its end. `kind`: "overloaded", "generation", "dropped"..."""
        self._counters["tgi_request_failure"].labels(err=kind).inc()
        if kind == "dropped":
            self._counters["penstock_client_disconnects"].inc()

    def ended(self, failure: Failure) -> Failure:
        """Counts the failure of a request that has arrived, and returns it."""
        self.failed(failure.kind)
        failure.counted = True
        return failure

    def turned_away(self, kind: str) -> None:
        """A request was refused before it arrived. `kind`: "validation", "overloaded", "unavailable" or "timeout"."""
        self.arrived()
        self.failed(kind)

    def validated(self, prompt: int, max_new_tokens: int) -> None:
        """A request is valid. prompt: its tokens."""
        self._rows["tgi_request_input_length"].observe(prompt)
        self._rows["tgi_request_max_new_tokens"].observe(max_new_tokens)

    def requested(self, action: Prefill | Decode) -> None:
        """A step was requested from the shards."""
        self._method(action).count.inc()

    def lost(self, action: Prefill | Decode) -> None:
        """The shards were lost with a step that they had not answered."""
        self._method(action).failure.inc()

    def _method(self, action: Prefill | Decode) -> "_Method":
        return self._methods["prefill" if isinstance(action, Prefill) else "decode"]

    def step(self, action: Action, seconds: float, reply: shard_pb2.StepReply | None) -> None:
        """The shards have answered a command; `reply` is None for a filter."""
        if reply is None or isinstance(action, Filter):
            self._filter.observe(seconds)
            return
        method = self._method(action)
        method.seconds.observe(seconds)
        method.forward.observe(reply.seconds)
        method.decode.observe(max(0.0, seconds - reply.seconds))
        (method.failure if reply.failed_uids else method.success).inc()
        if reply.mask_seconds:
            self._counters["penstock_mask_seconds"].inc(reply.mask_seconds)
            self._counters["penstock_mask_wait_seconds"].inc(reply.mask_wait_seconds)
        if reply.exhausted:
            self._counters["penstock_out_of_memory"].inc(reply.exhausted)
        self._counters["penstock_overlapped_steps"].inc(reply.ahead)
        if reply.saved_pages or reply.loaded_pages:
            self._counters["penstock_saved_pages"].inc(reply.saved_pages)
            self._counters["penstock_loaded_pages"].inc(reply.loaded_pages)
        self._rows["tgi_request_skipped_tokens"].observe_all(_skipped(reply))
        if action.allowance is not None:
            self._count_drafts(reply)
        kind = "decode" if not reply.prompt_tokens else "mixed" if reply.decode_tokens else "prefill"
        self._kinds[kind].observe(reply.seconds)
        if isinstance(action, Prefill):
            if action.new:
                self._rows["tgi_batch_next_size"].observe(len(action.new))
                if reply.decode_tokens:
                    self._concat.inc()
                    self._concat_seconds.observe(0.0)
            self._prompt_tokens.inc(reply.prompt_tokens)
            self._gauges["penstock_prompt_budget_used"].set(reply.prompt_tokens)
            self._counters["penstock_cached_prompt_tokens"].inc(reply.cached_tokens)
            self._counters["penstock_restored_tokens"].inc(reply.restored_tokens)

    def _count_drafts(self, reply: shard_pb2.StepReply) -> None:
        counters = self._counters
        counters["penstock_speculation_steps"].labels(drafts="some" if reply.drafted_tokens else "none").inc()
        counters["penstock_draft_seconds"].inc(reply.draft_seconds)
        counters["penstock_draft_rounds"].inc(reply.rounds)
        if not reply.drafted_tokens:
            return
        counters["penstock_drafted_tokens"].inc(reply.drafted_tokens)
        counters["penstock_accepted_tokens"].inc(reply.accepted_tokens)
        counters["penstock_verify_seconds"].inc(max(0.0, reply.seconds - reply.draft_seconds))
        for name, column in (("drafted", reply.tried_by_depth), ("accepted", reply.kept_by_depth)):
            for depth, count in enumerate(column):
                counters[f"penstock_{name}_positions"].labels(position=min(depth + 1, POSITIONS)).inc(count)

    def paused(self, count: int) -> None:
        """`count` requests were preempted."""
        self._counters["penstock_pauses"].inc(count)

    def recovered(self, seconds: float, replayed: int) -> None:
        """New shards are ready after so many seconds, and `replayed` requests that had begun on the lost ones resume."""
        self._counters["penstock_restarts"].inc()
        self._counters["penstock_replayed_requests"].inc(replayed)
        self._rows["penstock_recovery_seconds"].observe(seconds)

    def tokens(self, count: int, intervals: Mapping[float, int]) -> None:
        """`count` tokens were generated; intervals: time since the previous token of the same request (its first token has none),
        with how often each occurred: tokens of one step mostly follow those of another."""
        self._generated_tokens.inc(count)
        self._rows["penstock_inter_token_latency_seconds"].observe_all(intervals)

    def first_token(self, seconds: float) -> None:
        """A request's first token, so many seconds after its arrival."""
        self._rows["penstock_time_to_first_token_seconds"].observe(seconds)

    def done(self, request: Request, finish: Finish, generated: int, validation: float, prefill: float) -> None:
        """A request was answered to its end: `finish` is its last choice's, `generated` are the tokens of all, `validation` are the
        seconds before it was queued, `prefill` those of its inference before its first token."""
        self._counters["tgi_request_success"].inc()
        self._counters["penstock_finished_requests"].labels(reason=finish.reason).inc()
        decode, later = finish.inference_seconds - prefill, finish.generated_tokens - 1
        observe = {
            "tgi_request_duration": validation + finish.queue_seconds + finish.inference_seconds,
            "tgi_request_validation_duration": validation,
            "tgi_request_queue_duration": finish.queue_seconds,
            "tgi_request_inference_duration": finish.inference_seconds,
            "tgi_request_mean_time_per_token_duration": finish.inference_seconds / finish.generated_tokens,
            "tgi_request_generated_tokens": generated,
            "penstock_request_prompt_tokens": len(request.prompt),
            "penstock_request_max_new_tokens": request.max_new_tokens,
            "penstock_prefill_seconds": prefill,
            "penstock_decode_seconds": decode,
            "penstock_time_per_output_token_seconds": decode / later if later else 0.0,
            "penstock_request_choices": request.choices,
        }
        for name, value in observe.items():
            self._rows[name].observe(value)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        own = UNIT.sub(rb"\1", prometheus_client.generate_latest(self._registry))
        return own + prometheus_client.generate_latest(self._as_vllm)

    def _usage(self) -> float:
        found = self.samples(("penstock_pages_held", "penstock_pages_total"))
        return found["penstock_pages_held"] / (found["penstock_pages_total"] or 1)

    def samples(self, names: Sequence[str]) -> dict[str, float]:
        """Current values by name in Prometheus' format; sums over the values of their labels."""
        found: dict[str, float] = {}
        for family in self._registry.restricted_registry(names).collect():
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


def _skipped(reply: shard_pb2.StepReply) -> Mapping[float, int]:
    """How many answers got how many tokens beyond the first."""
    if not reply.accepted_tokens:
        return {0: len(reply.tokens)} if reply.tokens else {}
    return Counter(count - 1 for count in Counter(zip(reply.uids, reply.choices, strict=True)).values())


class Row:
    """One row of a histogram: the values with one label value, or all. 0.3 us each; 2.3 us with prometheus_client's, which locks
    and compares one bound after the other (x86, 2 cores). All of them come from the event loop's thread."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a value `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def observe_all(self, values: Mapping[float, int]) -> None:
        """Adds each value as often as it says."""
        for value, count in values.items():
            self.observe(value, count)

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """In Prometheus' form: how many values are no more than each bound."""
        return [*zip((*map(floatToGoString, self.bounds), "+Inf"), itertools.accumulate(self.counts), strict=True)]


class Histogram(Collector):
    """A histogram with one row per value of its label, if it has one."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self._family = partial(HistogramMetricFamily, name, text, labels=labels)
        self._bounds = tuple(bounds)
        self._rows: dict[tuple[str, ...], Row] = {} if labels else {(): Row(self._bounds)}

    def labels(self, *values: str) -> Row:
        """The row of this value; the only row, where there is no label."""
        return self._rows.setdefault(values, Row(self._bounds))

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        family = self._family()
        for values, row in self._rows.items():
            family.add_metric(values, row.buckets, row.sum)
        yield family

    describe = collect  # so that it is found by its name, too


class Shares(Collector):
    """Gauges per replica."""

    def __init__(self, watched: Mapping[str, Mapping[str, Callable[[], float]]]) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for name, (whole, text) in REPLICA_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["replica"])
            for replica, read in self._watched.get(whole, {}).items():
                family.add_metric([replica], float(read()))
            yield family


class _Method:
    """The metrics of one kind of step."""

    def __init__(
        self,
        counters: dict[str, prometheus_client.Counter],
        histograms: dict[str, Histogram],
        method: str,
    ) -> None:
        self.count = counters["tgi_batch_inference_count"].labels(method=method)
        self.success = counters["tgi_batch_inference_success"].labels(method=method)
        self.failure = counters["tgi_batch_inference_failure"].labels(method=method)
        self.seconds = histograms["tgi_batch_inference_duration"].labels(method)
        self.forward = histograms["tgi_batch_forward_duration"].labels(method)
        self.decode = histograms["tgi_batch_decode_duration"].labels(method)


# vLLM's name -> ours. Help, kind and buckets are those of ours.
VLLM = {
    "vllm:num_requests_running": "penstock_running",
    "vllm:kv_cache_usage_perc": "penstock_kv_cache_usage_ratio",
    "vllm:num_preemptions": "penstock_pauses",
    "vllm:generation_tokens": "penstock_generated_tokens",
    "vllm:prefix_cache_hits": "penstock_cached_prompt_tokens",
    "vllm:spec_decode_num_draft_tokens": "penstock_drafted_tokens",
    "vllm:spec_decode_num_accepted_tokens": "penstock_accepted_tokens",
    "vllm:time_to_first_token_seconds": "penstock_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "penstock_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "penstock_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "tgi_request_duration",
    "vllm:request_queue_time_seconds": "tgi_request_queue_duration",
    "vllm:request_inference_time_seconds": "tgi_request_inference_duration",
    "vllm:request_prefill_time_seconds": "penstock_prefill_seconds",
    "vllm:request_decode_time_seconds": "penstock_decode_seconds",
    "vllm:request_prompt_tokens": "penstock_request_prompt_tokens",
    "vllm:request_generation_tokens": "tgi_request_generated_tokens",
    "vllm:request_params_max_tokens": "penstock_request_max_new_tokens",
    "vllm:request_params_n": "penstock_request_choices",
}
REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
UNBEGUN = ("validation", "overloaded")  # failures before vLLM counts a request: a client's mistake is not the server's error


class VllmMetrics:
    """A registry's metrics under vLLM's names and with its labels. Derived at each scrape; keeps nothing."""

    def __init__(self, registry: prometheus_client.CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model, "engine": "0"}
        self.adapters: tuple[int, Callable[[], tuple[Iterable[str], Iterable[str]]]] | None = None

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        families = {family.name: family for family in self._registry.collect()}
        for theirs, ours in VLLM.items():
            yield self._renamed(families[ours], theirs)
        queued = sum(_sum(families[name]) for name in ("penstock_waiting", "penstock_paused"))
        yield self._family("vllm:num_requests_waiting", "Waiting requests, preempted ones included", "gauge", [({}, queued)])
        hits, computed = (_sum(families[name]) for name in ("penstock_cached_prompt_tokens", "penstock_prompt_tokens"))
        looked: list[tuple[dict[str, str], float]] = [({}, hits + computed)]
        yield self._family("vllm:prompt_tokens", "Tokens of prompts, computed or found in the cache", "counter", looked)
        yield self._family("vllm:prefix_cache_queries", "Tokens of prompts that were looked for", "counter", looked)
        reasons = dict.fromkeys(("stop", "length", "abort", "error"), 0.0)
        for sample in families["penstock_finished_requests"].samples:
            reasons[REASONS[sample.labels["reason"]]] += sample.value
        for sample in families["tgi_request_failure"].samples:
            if (kind := sample.labels["err"]) not in UNBEGUN:
                reasons["abort" if kind in ("dropped", "timeout") else "error"] += sample.value
        rows = [({"finished_reason": reason}, value) for reason, value in reasons.items()]
        yield self._family("vllm:request_success", "Requests that have ended, by why", "counter", rows)
        pages = _sum(families["penstock_pages_total"])
        size = _sum(families["tgi_batch_max_total_tokens"]) / pages if pages else 0
        cache = {"block_size": f"{size:.0f}", "num_gpu_blocks": f"{pages:.0f}"}
        yield self._family("vllm:cache_config_info", "Pages: their size in tokens, and how many", "gauge", [(cache, 1.0)])
        if self.adapters is not None:
            most, read = self.adapters
            running, waiting = (",".join(sorted({*names})) for names in read())
            asked = {"max_lora": str(most), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
            row = [(asked, time.time())]  # of rows with different labels the newest counts
            yield self._family("vllm:lora_requests_info", "Adapters that requests go by, and when that was so", "gauge", row)

    def _renamed(self, family: Metric, name: str) -> Metric:
        found = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            found.add_sample(name + sample.name.removeprefix(family.name), {**self._labels, **sample.labels}, sample.value)
        return found

    def _family(self, name: str, text: str, kind: str, rows: Iterable[tuple[dict[str, str], float]]) -> Metric:
        found = Metric(name, text, kind)
        for labels, value in rows:
            found.add_sample(name + ("_total" if kind == "counter" else ""), {**self._labels, **labels}, value)
        return found


def _sum(family: Metric) -> float:
    return sum(sample.value for sample in family.samples)
