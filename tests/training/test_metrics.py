import pytest

from training import metrics
from training.metrics import Throughput


def _throughput(untimed_steps=2, peak_flops=1e6):
    return Throughput(
        tokens_per_step=100,
        num_gpus=4,
        flops_per_token=1000.0,
        peak_flops=peak_flops,
        untimed_steps=untimed_steps,
    )


def _after(step_seconds, **settings):
    throughput = _throughput(**settings)
    for step_s in step_seconds:
        throughput.add(step_s, data_wait_s=step_s / 10)
    return throughput.summary()


def test_the_first_steps_are_left_out():
    summary = _after([60.0, 30.0, 2.0, 2.0])
    assert summary["num_timed_steps"] == 2
    assert summary["tokens_per_s"] == 50.0
    assert summary["tokens_per_s_per_gpu"] == 12.5
    assert summary["steps_per_s"] == 0.5
    assert summary["data_wait_s_mean"] == pytest.approx(0.2)


def test_throughput_is_tokens_over_time_and_not_a_mean_of_rates():
    assert _after([1.0, 3.0], untimed_steps=0)["tokens_per_s"] == 50.0


def test_mfu_is_the_share_of_the_peak():
    assert _after([2.0], untimed_steps=0)["mfu"] == 12.5 * 1000 / 1e6


def test_an_unknown_gpu_has_no_mfu():
    assert _after([2.0], untimed_steps=0, peak_flops=None)["mfu"] is None


def test_a_run_of_only_untimed_steps_has_no_figures():
    summary = _after([60.0, 30.0])
    assert summary["num_timed_steps"] == 0
    figures = ("tokens_per_s", "tokens_per_s_per_gpu", "steps_per_s", "mfu", "step_s_p50", "step_s_p95")
    assert all(summary[name] is None for name in figures)


def test_percentiles_show_the_slow_steps():
    summary = _after([1.0] * 18 + [10.0] * 2, untimed_steps=0)
    assert summary["step_s_p50"] == 1.0
    assert summary["step_s_p95"] == 10.0


def test_the_rank_with_the_highest_peak_counts():
    ranks = [{"peak": 1.5, "retries": 0}, {"peak": 2.5, "retries": 3}]
    assert metrics.highest(ranks) == {"peak": 2.5, "retries": 3}
    assert metrics.highest([{"peak": None}, {"peak": None}]) == {"peak": None}
