"""Medians, spreads and ratios of compared runs, and their table. Standard library only."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

METRICS = {
    "steps_per_s": "steps/s",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "bus_gb_per_s": "GB/s between nodes",
}
"""Fields of a run's record that are compared, and their names for people."""

_NUM_RESAMPLES = 10_000
_CONFIDENCE = 0.95
_SEED = 0  # the same runs give the same interval


def compare(runs: Sequence[Mapping[str, Any]], workload: str, arms: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each metric that both arms have.

    Args:
        runs: records with `workload`, `arm` and the metrics; a metric may be None.
        workload: whose runs count.
        arms: names of the first and the second arm.

    Returns:
        Rows: `workload`, `metric`, `arms`: name -> `num_runs`, `median`, `lowest`, `highest`; `ratio` of the
        medians, first over second, and `ratio_interval`, 95% by bootstrap.
    """
    rows = []
    for metric in METRICS:
        first, second = (_values(runs, workload, arm, metric) for arm in arms)
        if not first or not second:
            continue
        rows.append(
            {
                "workload": workload,
                "metric": metric,
                "arms": {arm: _described(values) for arm, values in zip(arms, (first, second), strict=True)},
                "ratio": statistics.median(first) / statistics.median(second),
                "ratio_interval": ratio_interval(first, second),
            }
        )
    return rows


def _values(runs: Sequence[Mapping[str, Any]], workload: str, arm: str, metric: str) -> list[float]:
    mine = (run for run in runs if (run["workload"], run["arm"]) == (workload, arm))
    return [run[metric] for run in mine if run.get(metric)]


def _described(values: Sequence[float]) -> dict[str, Any]:
    return {
        "num_runs": len(values),
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
    }


def ratio_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """95% bootstrap interval of the ratio of medians: runs are drawn anew, with replacement, for each arm.

    None with a single run of an arm: there is no spread to draw from.
    """
    if min(len(first), len(second)) < 2:
        return None
    draw = random.Random(_SEED)
    ratios = sorted(
        statistics.median(draw.choices(first, k=len(first)))
        / statistics.median(draw.choices(second, k=len(second)))
        for _ in range(_NUM_RESAMPLES)
    )
    tail = round(_NUM_RESAMPLES * (1 - _CONFIDENCE) / 2)
    return ratios[tail], ratios[-tail - 1]


def table(rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> str:
    """The rows as aligned text: median, lowest and highest of each arm, and the ratio with its interval."""
    head = ("workload", "", *(f"{arm} (lowest-highest)" for arm in arms), f"{arms[0]} / {arms[1]}")
    lines = [head, *(_cells(row, arms) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return text if rows else f"{text}\n(no result: an arm has no finished run)"


def _cells(row: Mapping[str, Any], arms: Sequence[str]) -> tuple[str, ...]:
    sides = (row["arms"][arm] for arm in arms)
    interval = row["ratio_interval"]
    ratio = f"{row['ratio']:.2f}x" + (
        f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else " (one run: no interval)"
    )
    values = (
        f"{side['median']:.4g} ({side['lowest']:.4g}-{side['highest']:.4g}, n={side['num_runs']})"
        for side in sides
    )
    return row["workload"], METRICS[row["metric"]], *values, ratio
