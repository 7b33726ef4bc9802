from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from umbra.serving.metrics import EngineMetrics, HttpMetrics, exposition


def samples(metrics):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition(metrics.registry).decode())
        for sample in family.samples
    }


def test_a_request_from_start_to_end():
    metrics = EngineMetrics()
    metrics.step(
        seconds=0.01, running=2, waiting=3, prefill_tokens=128, decode_tokens=2, used_blocks=5, total_blocks=64
    )
    metrics.first_token(0.05)
    metrics.tokens(3, 0.01)
    metrics.finished("stop_token", 128, 4, 100)
    metrics.refused("queue_full")
    metrics.preempted()
    metrics.compiled()
    seen = samples(metrics)
    for name, value in {
        "umbra_requests_running": 2, "umbra_requests_waiting": 3, "umbra_kv_blocks_used": 5,
        "umbra_kv_blocks_total": 64,
        "umbra_prompt_tokens_total": 128, "umbra_generated_tokens_total": 4, "umbra_cached_prompt_tokens_total": 100,
        "umbra_preemptions_total": 1, "umbra_compilations_after_ready_total": 1, "umbra_step_seconds_count": 1,
        "umbra_time_to_first_token_seconds_count": 1, "umbra_time_per_output_token_seconds_count": 3,
    }.items():  # fmt: skip
        assert seen[(name,)] == value, name
    assert seen[("umbra_requests_finished_total", ("reason", "stop_token"))] == 1
    assert seen[("umbra_requests_refused_total", ("reason", "queue_full"))] == 1
    assert seen[("umbra_step_tokens_total", ("kind", "prefill"))] == 128


def test_quantiles_can_be_read():
    """Buckets are close enough that a quantile read from them is within 35 % of the value."""
    metrics = EngineMetrics()
    for value in (0.003, 0.02, 0.15, 1.1, 30.0):
        metrics.first_token(value)
        bounds = sorted(
            float(dict(key[1:])["le"])
            for key in samples(metrics)
            if key[0] == "umbra_time_to_first_token_seconds_bucket"
        )
        upper = min(bound for bound in bounds if bound >= value)
        assert upper <= value * 1.35


def test_instances_do_not_share():
    one, two = EngineMetrics(), EngineMetrics()
    one.preempted()
    assert samples(two)[("umbra_preemptions_total",)] == 0


def test_http():
    metrics = EngineMetrics()
    http = HttpMetrics(metrics.registry)
    http.started()
    assert samples(metrics)[("umbra_http_requests_inflight",)] == 1
    http.ended("/v1/models", "GET", 200, 0.1)
    seen = samples(metrics)
    assert seen[("umbra_http_requests_inflight",)] == 0
    key = ("umbra_http_requests_total", ("method", "GET"), ("route", "/v1/models"), ("status", "200"))
    assert seen[key] == 1


def test_an_idle_step_is_not_timed():
    metrics = EngineMetrics()
    metrics.step(seconds=0, running=0, waiting=0, prefill_tokens=0, decode_tokens=0, used_blocks=0, total_blocks=4)
    assert samples(metrics)[("umbra_step_seconds_count",)] == 0


@pytest.mark.parametrize("name", ["umbra_requests_running", "umbra_kv_blocks_total"])
def test_gauges_exist_before_the_first_step(name):
    assert samples(EngineMetrics())[(name,)] == 0
