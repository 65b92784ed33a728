"""What /metrics shows."""

from prometheus_client.parser import text_string_to_metric_families

from penstock.proto import shard_pb2
from penstock.router.metrics import SECONDS, Intervals, Metrics
from penstock.router.request import Finish, Request
from penstock.router.scheduler import Decode, Filter, Prefill


def samples(metrics: Metrics) -> dict[str, float]:
    """name, or name{labels} -> value."""
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_every_line_is_understood_by_prometheus() -> None:
    assert len(list(text_string_to_metric_families(Metrics().render().decode()))) > 20


def test_names_of_tgi_are_kept_to_the_letter() -> None:
    text = Metrics().render().decode()
    assert "\ntgi_request_count 0.0\n" in text
    assert "\n# TYPE tgi_request_count counter\n" in text
    assert "tgi_request_count_total" not in text
    assert "_created" not in text
    assert "\npenstock_client_disconnects_total 0.0\n" in text


def test_a_request_is_counted_from_arrival_to_its_end() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.arrived()
    metrics.first_token(0.1)
    finish = Finish("length", "text", "", 5, queue_seconds=0.5, inference_seconds=1.0)
    metrics.done(Request(prompt=(1, 2, 3), max_new_tokens=9, choices=2), finish, 8)
    metrics.failed("dropped")
    metrics.failed("overloaded")
    metrics.failed("validation")
    values = samples(metrics)
    assert values["tgi_request_count"] == 4
    assert values["tgi_request_success"] == 1
    assert values['tgi_request_failure{err="dropped"}'] == 1
    assert values['tgi_request_failure{err="overloaded"}'] == 1
    assert values['tgi_request_failure{err="validation"}'] == 1
    assert values["penstock_client_disconnects_total"] == 1
    assert values["tgi_request_duration_sum"] == 1.5
    assert values["tgi_request_queue_duration_sum"] == 0.5
    assert values["tgi_request_inference_duration_sum"] == 1.0
    assert values["tgi_request_mean_time_per_token_duration_sum"] == 0.2
    assert values["tgi_request_generated_tokens_sum"] == 8
    assert values["tgi_request_input_length_sum"] == 3
    assert values["tgi_request_max_new_tokens_sum"] == 9
    assert values["penstock_time_to_first_token_seconds_count"] == 1


def test_steps_are_counted_by_method() -> None:
    metrics = Metrics()
    mixed = shard_pb2.StepReply(seconds=0.25, prompt_tokens=10, restored_tokens=4, cached_tokens=90, decode_tokens=2)
    metrics.step(Prefill(1, (1,), ((1, 7), (2, 3)), 16, decode=True), 0.5, mixed)
    metrics.step(Prefill(1, (1,), ((1, 7),), 16, decode=False), 0.5, shard_pb2.StepReply(seconds=0.125, prompt_tokens=7))
    metrics.step(Decode(1), 0.5, shard_pb2.StepReply(seconds=0.25))
    metrics.step(Decode(1), 0.5, shard_pb2.StepReply(seconds=0.25, failed_uids=[1], failed_messages=["no"]))
    metrics.step(Filter((1,)), 0.5, None)
    values = samples(metrics)
    assert values['tgi_batch_inference_count{method="prefill"}'] == 2
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


def test_pauses_are_counted() -> None:
    metrics = Metrics()
    metrics.paused(2)
    metrics.paused(0)
    assert samples(metrics)["penstock_pauses_total"] == 2


def test_gauges_show_what_is_the_case_when_somebody_looks() -> None:
    metrics = Metrics()
    free = [3]
    metrics.watch("penstock_pages_free", lambda: free[0])
    free[0] = 5
    assert samples(metrics)["penstock_pages_free"] == 5


def test_intervals_fall_into_buckets_with_their_upper_bound_included() -> None:
    intervals = Intervals("name", "text", (1.0, 2.0))
    intervals.observe([0.5, 1.0, 1.5, 2.0, 9.0])
    (family,) = intervals.collect()
    assert [sample.value for sample in family.samples] == [2, 4, 5, 5, 14.0]


def test_tokens_and_their_intervals() -> None:
    metrics = Metrics()
    metrics.tokens(3, [SECONDS[3], 1000.0])
    values = samples(metrics)
    assert values["penstock_generated_tokens_total"] == 3
    assert values["penstock_inter_token_latency_seconds_count"] == 2
    assert values['penstock_inter_token_latency_seconds_bucket{le="+Inf"}'] == 2
