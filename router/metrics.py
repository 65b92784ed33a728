"""Every number the router counts, in one table, and the only place that counts. Knows no request's content.

Names with `tgi_` are text-generation-inference's, with its meaning, so that its dashboards work. Who counts what:
  batcher   each submitted request (`arrived`, then `done` or `failed`), each step, the standing (`watch`)
  api       requests it refuses before they reach the batcher: `failed("validation")`
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

import prometheus_client
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..proto import shard_pb2
from .request import Finish, Request
from .scheduler import Action, Filter, Prefill

SECONDS = tuple(1e-4 * 1.5**power for power in range(1, 36))  # to 146 s, as in TGI
TOKENS = tuple(2.0**power for power in range(21))

COUNTERS = {
    "tgi_request_count": ("Requests that arrived", ()),
    "tgi_request_success": ("Requests that were answered to their end", ()),
    "tgi_request_failure": ("Requests that were not", ("err",)),
    "tgi_batch_inference_count": ("Steps asked of the shards", ("method",)),
    "tgi_batch_inference_success": ("Steps that the shards answered", ("method",)),
    "tgi_batch_inference_failure": ("Steps in which a group failed", ("method",)),
    "penstock_client_disconnects": ("Requests whose client left before their end", ()),
    "penstock_prompt_tokens": ("Tokens of prompts that were computed, restored ones included", ()),
    "penstock_cached_prompt_tokens": ("Tokens of prompts that were found in the cache instead", ()),
    "penstock_restored_tokens": ("Tokens computed a second time, for paused requests", ()),
    "penstock_pauses": ("Times that a running request gave its pages back for a while", ()),
    "penstock_generated_tokens": ("Tokens that the shards generated", ()),
}
GAUGES = {
    "tgi_queue_size": "Requests that wait",
    "tgi_batch_current_size": "Requests that run",
    "penstock_waiting": "Requests that wait",
    "penstock_running": "Requests that run",
    "penstock_paused": "Requests that were paused and wait to go on",
    "penstock_pages_total": "Pages in the shards' pool",
    "penstock_pages_free": "Pages that can be taken, cached ones included",
    "penstock_pages_cached": "Pages that can be taken and hold prefixes for later requests",
    "penstock_pages_held": "Pages of running requests",
    "penstock_prompt_budget": "Tokens that the last step with prompts had for them",
    "penstock_prompt_budget_used": "Tokens of prompts that it computed",
}
HISTOGRAMS = {
    "tgi_request_duration": ("Seconds from arrival to the end", (), SECONDS),
    "tgi_request_queue_duration": ("Seconds from arrival to the first step that computed something", (), SECONDS),
    "tgi_request_inference_duration": ("Seconds from that step to the end", (), SECONDS),
    "tgi_request_mean_time_per_token_duration": ("Seconds of inference per generated token", (), SECONDS),
    "tgi_request_generated_tokens": ("Generated tokens of a request", (), TOKENS),
    "tgi_request_input_length": ("Prompt tokens of a request", (), TOKENS),
    "tgi_request_max_new_tokens": ("Generated tokens that a request allowed", (), TOKENS),
    "tgi_batch_inference_duration": ("Seconds of a step, as the router sees it", ("method",), SECONDS),
    "tgi_batch_forward_duration": ("Seconds of a step, as the shard sees it", ("method",), SECONDS),
    "penstock_step_seconds": ("Seconds of a step, as the shard sees it", ("kind",), SECONDS),
    "penstock_time_to_first_token_seconds": ("Seconds from arrival to the first token", (), SECONDS),
}
# TGI's names carry no unit, prometheus_client insists on one.
UNIT = re.compile(rb"^((?:# (?:HELP|TYPE) )?tgi_\w+)_total\b", re.MULTILINE)


class Metrics:
    """The registry of one router."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = prometheus_client.CollectorRegistry()
        self._counters = {
            name: prometheus_client.Counter(name, text, labels, registry=registry) for name, (text, labels) in COUNTERS.items()
        }
        self._gauges = {name: prometheus_client.Gauge(name, text, registry=registry) for name, text in GAUGES.items()}
        self._histograms = {
            name: prometheus_client.Histogram(name, text, labels, registry=registry, buckets=buckets)
            for name, (text, labels, buckets) in HISTOGRAMS.items()
        }
        self._intervals = Intervals("penstock_inter_token_latency_seconds", "Seconds between tokens of a request", SECONDS)
        registry.register(self._intervals)
        # Looked up once: these are needed in every step.
        self._methods = {method: _Method(self._counters, self._histograms, method) for method in ("prefill", "decode")}
        self._kinds = {kind: self._histograms["penstock_step_seconds"].labels(kind=kind) for kind in ("prefill", "decode", "mixed")}
        self._prompt_tokens = self._counters["penstock_prompt_tokens"]
        self._generated_tokens = self._counters["penstock_generated_tokens"]

    def watch(self, name: str, read: Callable[[], float]) -> None:
        """The gauge shows what `read` returns when somebody looks."""
        self._gauges[name].set_function(read)

    def arrived(self) -> None:
        """A request was submitted."""
        self._counters["tgi_request_count"].inc()

    def failed(self, kind: str) -> None:
        """A request is not answered to its end. `kind`: "validation", "template", "overloaded", "generation", "dropped"..."""
        self._counters["tgi_request_failure"].labels(err=kind).inc()
        if kind in ("validation", "template"):  # refused before it could arrive
            self.arrived()
        if kind == "dropped":
            self._counters["penstock_client_disconnects"].inc()

    def step(self, action: Action, seconds: float, reply: shard_pb2.StepReply | None) -> None:
        """The shards have answered; `reply` is None for a filter."""
        if reply is None or isinstance(action, Filter):
            return
        method = self._methods["prefill" if isinstance(action, Prefill) else "decode"]
        method.count.inc()
        method.seconds.observe(seconds)
        method.forward.observe(reply.seconds)
        (method.failure if reply.failed_uids else method.success).inc()
        mixed = "mixed" if reply.decode_tokens else "prefill"
        self._kinds[mixed if reply.prompt_tokens else "decode"].observe(reply.seconds)
        if isinstance(action, Prefill):
            self._prompt_tokens.inc(reply.prompt_tokens)
            self._gauges["penstock_prompt_budget_used"].set(reply.prompt_tokens)
            self._counters["penstock_cached_prompt_tokens"].inc(reply.cached_tokens)
            self._counters["penstock_restored_tokens"].inc(reply.restored_tokens)

    def paused(self, count: int) -> None:
        """So many requests gave their pages back."""
        self._counters["penstock_pauses"].inc(count)

    def tokens(self, count: int, intervals: Sequence[float]) -> None:
        """So many tokens were generated; such intervals lay between them and those before (none for the first of a request)."""
        self._generated_tokens.inc(count)
        self._intervals.observe(intervals)

    def first_token(self, seconds: float) -> None:
        """Of a request, after its arrival."""
        self._histograms["penstock_time_to_first_token_seconds"].observe(seconds)

    def done(self, request: Request, finish: Finish, generated: int) -> None:
        """A request was answered to its end: `finish` is its last choice's, `generated` are the tokens of all."""
        self._counters["tgi_request_success"].inc()
        observe = {
            "tgi_request_duration": finish.queue_seconds + finish.inference_seconds,
            "tgi_request_queue_duration": finish.queue_seconds,
            "tgi_request_inference_duration": finish.inference_seconds,
            "tgi_request_mean_time_per_token_duration": finish.inference_seconds / finish.generated_tokens,
            "tgi_request_generated_tokens": generated,
            "tgi_request_input_length": len(request.prompt),
            "tgi_request_max_new_tokens": request.max_new_tokens,
        }
        for name, value in observe.items():
            self._histograms[name].observe(value)

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return UNIT.sub(rb"\1", prometheus_client.generate_latest(self._registry))


class Intervals(Collector):
    """A histogram that takes many values at once: 0.3 us each, 2.3 us with prometheus_client's, which locks (x86, 2 cores)."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        bounds, counts = self._bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self._sum += value

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), total))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, self._sum)
        yield family


class _Method:
    """The metrics of a kind of step."""

    def __init__(
        self,
        counters: dict[str, prometheus_client.Counter],
        histograms: dict[str, prometheus_client.Histogram],
        method: str,
    ) -> None:
        self.count = counters["tgi_batch_inference_count"].labels(method=method)
        self.success = counters["tgi_batch_inference_success"].labels(method=method)
        self.failure = counters["tgi_batch_inference_failure"].labels(method=method)
        self.seconds = histograms["tgi_batch_inference_duration"].labels(method=method)
        self.forward = histograms["tgi_batch_forward_duration"].labels(method=method)
