"""`Metrics`: the names, types and labels of /metrics, TGI's and vLLM's included, and what each of them counts."""

import re
import time

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.proto import shard_pb2
from penstock.router.drafting import Allowance
from penstock.router.metrics import COUNTERS, GAUGES, HISTOGRAMS, REPLICA_GAUGES, SECONDS, TOKENS, VLLM, Histogram, Metrics
from penstock.router.request import Finish, Request
from penstock.router.scheduler import Decode, Filter, Prefill


def samples(metrics: Metrics) -> dict[str, float]:
    """The values of all metrics, by name or name{labels}."""
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_can_be_parsed_by_prometheus() -> None:
    assert len(list(text_string_to_metric_families(Metrics().render().decode()))) > 20


def test_tgi_metric_names_get_no_total_or_created_suffix() -> None:
    text = Metrics().render().decode()
    assert "\ntgi_request_count 0.0\n" in text
    assert "\n# TYPE tgi_request_count counter\n" in text
    assert "tgi_request_count_total" not in text
    assert "_created" not in text
    assert "\npenstock_client_disconnects_total 0.0\n" in text


def test_request_metrics_count_arrival_success_failures_and_durations() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.arrived()
    metrics.first_token(0.1)
    finish = Finish("length", "text", "", 5, queue_seconds=0.5, inference_seconds=1.0)
    metrics.done(Request(prompt=(1, 2, 3), max_new_tokens=9, choices=2), finish, 8, 0.125, 0.25)
    metrics.failed("dropped")
    metrics.failed("overloaded")
    metrics.turned_away("validation")
    values = samples(metrics)
    assert values["tgi_request_count"] == 4
    assert values["tgi_request_success"] == 1
    assert values['tgi_request_failure{err="dropped"}'] == 1
    assert values['tgi_request_failure{err="overloaded"}'] == 1
    assert values['tgi_request_failure{err="validation"}'] == 1
    assert values["penstock_client_disconnects_total"] == 1
    assert values["tgi_request_duration_sum"] == 1.625
    assert values["tgi_request_validation_duration_sum"] == 0.125
    assert values["tgi_request_queue_duration_sum"] == 0.5
    assert values["tgi_request_inference_duration_sum"] == 1.0
    assert values["tgi_request_mean_time_per_token_duration_sum"] == 0.2
    assert values["tgi_request_generated_tokens_sum"] == 8
    assert values["penstock_request_prompt_tokens_sum"] == 3
    assert values["penstock_request_max_new_tokens_sum"] == 9
    assert values["tgi_request_input_length_count"] == values["tgi_request_max_new_tokens_count"] == 0
    assert values["penstock_time_to_first_token_seconds_count"] == 1
    assert values["penstock_prefill_seconds_sum"] == 0.25
    assert values["penstock_decode_seconds_sum"] == 0.75
    assert values["penstock_time_per_output_token_seconds_sum"] == 0.75 / 4
    metrics.done(Request(prompt=(1,), max_new_tokens=1), Finish("length", "", "", 1, 0.0, 1.0), 1, 0.0, 1.0)
    assert samples(metrics)["penstock_time_per_output_token_seconds_count"] == 2, "an answer of a single token counts as 0"
    assert values['penstock_finished_requests_total{reason="length"}'] == 1


def test_step_metrics_are_counted_by_method_and_kind() -> None:
    metrics = Metrics()
    mixed = shard_pb2.StepReply(seconds=0.25, prompt_tokens=10, restored_tokens=4, cached_tokens=90, decode_tokens=2)
    metrics.step(Prefill((1,), ((1, 7), (2, 3)), 16, decode=True), 0.5, mixed)
    metrics.step(Prefill((1,), ((1, 7),), 16, decode=False), 0.5, shard_pb2.StepReply(seconds=0.125, prompt_tokens=7))
    metrics.step(Decode(), 0.5, shard_pb2.StepReply(seconds=0.25))
    metrics.step(Decode(), 0.5, shard_pb2.StepReply(seconds=0.25, failed_uids=[1], failed_messages=["no"]))
    metrics.step(Filter((1,)), 0.5, None)
    for action in (Prefill((1,), ((1, 7),), 16, decode=False), Decode(), Decode()):
        metrics.requested(action)
    values = samples(metrics)
    assert values['tgi_batch_inference_count{method="prefill"}'] == 1
    assert values['tgi_batch_inference_count{method="decode"}'] == 2
    assert values['tgi_batch_inference_success{method="decode"}'] == 1
    assert values['tgi_batch_inference_failure{method="decode"}'] == 1
    assert values['tgi_batch_inference_duration_sum{method="decode"}'] == 1.0
    assert values['tgi_batch_forward_duration_sum{method="decode"}'] == 0.5
    assert values['penstock_step_seconds_sum{kind="mixed"}'] == 0.25
    assert values['penstock_step_seconds_sum{kind="prefill"}'] == 0.125
    assert values['penstock_step_seconds_count{kind="decode"}'] == 2
    assert values["penstock_prompt_tokens_total"] == 17
    assert values["penstock_cached_prompt_tokens_total"] == 90
    assert values["penstock_restored_tokens_total"] == 4
    assert values["penstock_prompt_budget_used"] == 7


def test_draft_tokens_acceptance_and_draft_times_are_counted() -> None:
    metrics = Metrics()
    allowed = Allowance(0.25, 0.0, 0.0, 0.0, 8, 0.5)
    some = shard_pb2.StepReply(
        seconds=0.75,
        draft_seconds=0.25,
        rounds=4,
        uids=[1, 1, 1, 2, 2, 3, 3],
        choices=[0, 0, 0, 0, 0, 0, 1],
        tokens=[5] * 7,
        drafted_tokens=9,
        accepted_tokens=3,
        tried_by_depth=[2, 2, 1, 1, 1, 1, 1, 1, 1, 1],
        kept_by_depth=[2, 1],
    )
    metrics.step(Decode(allowed), 1.0, some)
    metrics.step(Decode(allowed), 1.0, shard_pb2.StepReply(seconds=0.5, uids=[1], choices=[0], tokens=[5], draft_seconds=0.125))
    metrics.step(Decode(), 1.0, shard_pb2.StepReply(seconds=0.5))
    values = samples(metrics)
    assert (values["penstock_drafted_tokens_total"], values["penstock_accepted_tokens_total"]) == (9, 3)
    drafted = [values[f'penstock_drafted_positions_total{{position="{position}"}}'] for position in range(1, 9)]
    assert drafted == [2, 2, 1, 1, 1, 1, 1, 3], "the last counts for all beyond"
    assert values['penstock_accepted_positions_total{position="1"}'] == 2
    assert values['penstock_accepted_positions_total{position="2"}'] == 1
    assert values['penstock_speculation_steps_total{drafts="some"}'] == 1
    assert values['penstock_speculation_steps_total{drafts="none"}'] == 1
    assert (values["penstock_draft_seconds_total"], values["penstock_draft_rounds_total"]) == (0.375, 4)
    assert values["penstock_verify_seconds_total"] == 0.5
    # As in TGI: for each choice and step, the tokens beyond the first.
    assert (values["tgi_request_skipped_tokens_sum"], values["tgi_request_skipped_tokens_count"]) == (3, 5)
    assert values['tgi_request_skipped_tokens_bucket{le="1.0"}'] == 4


def test_out_of_memory_events_are_counted() -> None:
    metrics = Metrics()
    for count in (0, 3, 1):
        metrics.step(Decode(), 1.0, shard_pb2.StepReply(exhausted=count))
    assert samples(metrics)["penstock_out_of_memory_total"] == 4


def test_pages_saved_to_and_loaded_from_the_host_are_counted() -> None:
    metrics = Metrics()
    for saved, loaded in ((3, 0), (0, 0), (1, 2)):
        metrics.step(Decode(), 1.0, shard_pb2.StepReply(saved_pages=saved, loaded_pages=loaded))
    found = samples(metrics)
    assert (found["penstock_saved_pages_total"], found["penstock_loaded_pages_total"]) == (4, 2)


def test_overlapped_steps_are_counted() -> None:
    metrics = Metrics()
    for ahead in (True, False, True):
        metrics.step(Decode(), 1.0, shard_pb2.StepReply(ahead=ahead))
    assert samples(metrics)["penstock_overlapped_steps_total"] == 2


def test_preemptions_are_counted() -> None:
    metrics = Metrics()
    metrics.paused(2)
    metrics.paused(0)
    assert samples(metrics)["penstock_pauses_total"] == 2


def test_help_texts_do_not_refer_to_other_metrics() -> None:
    """Dashboards show single metrics, and vLLM's names have the same help texts in another order."""
    texts = [text for text, *_ in (*COUNTERS.values(), *HISTOGRAMS.values())]
    texts += [*GAUGES.values(), *(text for _, text in REPLICA_GAUGES.values())]
    reference = re.compile(r"\b(those|that step)\b|^\w+ (of|from) (them|their|its)\b|\b(it computed|were not)$", re.IGNORECASE)
    assert not [text for text in texts if reference.search(text)]


def test_gauges_are_evaluated_when_rendered() -> None:
    metrics = Metrics()
    free = [3]
    metrics.watch("penstock_pages_free", lambda: free[0])
    free[0] = 5
    assert samples(metrics)["penstock_pages_free"] == 5


def test_histogram_buckets_include_their_upper_bound() -> None:
    intervals = Histogram("name", "text", (1.0, 2.0))
    intervals.labels().observe_all({0.5: 1, 1.0: 1, 1.5: 1, 2.0: 1, 9.0: 1})
    (family,) = intervals.collect()
    assert [sample.value for sample in family.samples] == [2, 4, 5, 5, 14.0]


def test_histogram_equals_that_of_prometheus_client() -> None:
    for labels in ((), ("method",)):
        theirs = prometheus_client.Histogram("name", "text", labels, registry=None, buckets=TOKENS)
        ours = Histogram("name", "text", TOKENS, labels)
        for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 2.0**20, 2.0**20 + 1):
            for row in (theirs.labels("decode"), ours.labels("decode")) if labels else (theirs, ours.labels()):
                row.observe(value)
        (expected,), (found,) = theirs.collect(), ours.collect()
        assert (found.name, found.documentation, found.type) == (expected.name, expected.documentation, expected.type)
        assert {(one.name, *one.labels.items()): one.value for one in found.samples} == {
            (one.name, *one.labels.items()): one.value for one in expected.samples if not one.name.endswith("_created")
        }


def test_generated_tokens_and_inter_token_latencies_are_counted() -> None:
    metrics = Metrics()
    metrics.tokens(3, {SECONDS[3]: 1, 1000.0: 1})
    values = samples(metrics)
    assert values["penstock_generated_tokens_total"] == 3
    assert values["penstock_inter_token_latency_seconds_count"] == 2
    assert values['penstock_inter_token_latency_seconds_bucket{le="+Inf"}'] == 2


# TGI 3.3's metrics, as its router describes and records them
TGI_METRICS = {
    "counter": "tgi_request_count tgi_request_success tgi_request_failure tgi_batch_inference_count tgi_batch_inference_success "
    "tgi_batch_inference_failure tgi_batch_concat",
    "gauge": "tgi_queue_size tgi_batch_current_size tgi_batch_current_max_tokens tgi_batch_max_total_tokens",
    "histogram": "tgi_request_duration tgi_request_validation_duration tgi_request_queue_duration tgi_request_inference_duration "
    "tgi_request_mean_time_per_token_duration tgi_request_generated_tokens tgi_request_input_length tgi_request_max_new_tokens "
    "tgi_request_skipped_tokens tgi_batch_next_size tgi_batch_inference_duration tgi_batch_forward_duration "
    "tgi_batch_decode_duration tgi_batch_filter_duration tgi_batch_concat_duration",
}


def test_all_tgi_metrics_exist_with_their_types() -> None:
    lines = Metrics().render().decode().splitlines()
    types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE tgi_"))
    assert types == {name: kind for kind, names in TGI_METRICS.items() for name in names.split()}
    assert all(name.endswith("duration") == (HISTOGRAMS[name][2] == SECONDS) for name in TGI_METRICS["histogram"].split())
    assert (len(SECONDS), SECONDS[0], round(SECONDS[-1])) == (35, pytest.approx(1.5e-4), 146)  # seconds


def test_batch_size_concat_filter_and_validation_metrics_of_tgi_are_counted() -> None:
    metrics = Metrics()
    metrics.step(Prefill((1, 2), ((1, 7),), 16, decode=True), 0.5, shard_pb2.StepReply(seconds=0.125, decode_tokens=3))
    metrics.step(Prefill((3,), ((3, 7),), 16, decode=False), 0.5, shard_pb2.StepReply(seconds=0.125))
    metrics.step(Prefill((), ((3, 7),), 16, decode=True), 0.5, shard_pb2.StepReply(seconds=0.125, decode_tokens=3))
    metrics.step(Filter((1,)), 0.25, None)
    for tokens in (3, 4):
        metrics.validated(tokens, 9)
    values = samples(metrics)
    assert (values["tgi_batch_next_size_count"], values["tgi_batch_next_size_sum"]) == (2, 3)
    assert values['tgi_batch_concat{reason="chunking"}'] == values['tgi_batch_concat_duration_count{method="decode"}'] == 1
    assert values['tgi_batch_decode_duration_sum{method="prefill"}'] == 3 * 0.375
    assert values['tgi_batch_filter_duration_sum{method="decode"}'] == 0.25
    assert (values["tgi_request_input_length_count"], values["tgi_request_input_length_sum"]) == (2, 7)
    assert values["tgi_request_max_new_tokens_sum"] == 18


def test_requested_adapters_are_exported_as_vllms_lora_requests_info() -> None:
    metrics = Metrics("m")
    assert "lora_requests_info" not in metrics.render().decode()
    metrics.watch_adapters(4, lambda: (["b", "a", "b"], []))
    labels = 'engine="0",max_lora="4",model_name="m",running_lora_adapters="a,b",waiting_lora_adapters=""'
    assert samples(metrics)[f"vllm:lora_requests_info{{{labels}}}"] == pytest.approx(time.time(), abs=60)


# The metrics of vLLM that the Gateway API's endpoint picker, autoscalers and vLLM's own dashboards read.
VLLM_METRICS = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info",
    "counter": "num_preemptions prompt_tokens generation_tokens prefix_cache_hits prefix_cache_queries request_success "
    "spec_decode_num_draft_tokens spec_decode_num_accepted_tokens",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds request_prompt_tokens request_generation_tokens request_params_max_tokens request_params_n",
}


def test_all_vllm_metrics_exist_with_their_types_and_labels() -> None:
    text = Metrics("some/model").render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text) if family.name.startswith("vllm:")}
    assert {name: family.type for name, family in families.items()} == {
        f"vllm:{name}": kind for kind, names in VLLM_METRICS.items() for name in names.split()
    }
    assert VLLM.keys() <= families.keys()
    assert {sample.labels["model_name"] for family in families.values() for sample in family.samples} == {"some/model"}


def test_vllm_metrics_have_the_values_of_penstocks() -> None:
    metrics = Metrics("m")
    gauges = {"running": 3, "waiting": 4, "paused": 2, "pages_total": 8, "pages_held": 2}
    for name, value in gauges.items():
        metrics.watch(f"penstock_{name}", lambda value=value: value)
    metrics.watch("tgi_batch_max_total_tokens", lambda: 128)
    metrics.done(Request(prompt=(1, 2, 3), max_new_tokens=9), Finish("stop_sequence", "", "", 5, 0.5, 1.0), 5, 0.5, 0.25)
    for kind in ("dropped", "timeout", "generation", "validation", "overloaded"):
        metrics.failed(kind)
    metrics.tokens(3, {0.5: 1})
    metrics.step(Prefill((1,), ((1, 7),), 16, decode=False), 0.5, shard_pb2.StepReply(prompt_tokens=10, cached_tokens=90))
    values = samples(metrics)
    labels = 'engine="0",model_name="m"'
    assert values[f"vllm:num_requests_running{{{labels}}}"] == 3
    assert values[f"vllm:num_requests_waiting{{{labels}}}"] == 6, "in vLLM preempted requests wait like others"
    assert values[f"vllm:kv_cache_usage_perc{{{labels}}}"] == values["penstock_kv_cache_usage_ratio"] == 0.25
    assert values[f"vllm:generation_tokens_total{{{labels}}}"] == 3
    assert values[f"vllm:prompt_tokens_total{{{labels}}}"] == 100, "vLLM counts those that were found, too"
    assert values[f"vllm:prefix_cache_queries_total{{{labels}}}"] == 100
    assert values[f"vllm:prefix_cache_hits_total{{{labels}}}"] == 90
    assert values[f"vllm:inter_token_latency_seconds_count{{{labels}}}"] == 1
    assert values[f"vllm:e2e_request_latency_seconds_sum{{{labels}}}"] == 2.0, "with its validation"
    assert values[f"vllm:request_prompt_tokens_sum{{{labels}}}"] == 3, "of those that have ended"
    assert values[f"vllm:request_params_max_tokens_sum{{{labels}}}"] == 9
    assert values[f"vllm:request_decode_time_seconds_sum{{{labels}}}"] == 0.75
    assert values[f"vllm:request_time_per_output_token_seconds_sum{{{labels}}}"] == 0.75 / 4, "without the first token and its time"
    assert values['vllm:cache_config_info{block_size="16",engine="0",model_name="m",num_gpu_blocks="8"}'] == 1
    for reason, count in (("stop", 1), ("length", 0), ("abort", 2), ("error", 1)):
        assert values[f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}}'] == count
