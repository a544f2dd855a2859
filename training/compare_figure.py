"""Draws a comparison. Imported only where a picture is wanted: the training image has no matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from training.compare_stats import METRICS

_COLOURS = ("#1f77b4", "#ff7f0e")


def draw(comparison: Mapping[str, Any]) -> bytes:
    """A panel for each workload and metric: bars are medians, dots are runs.

    Args:
        comparison: as `training.compare` writes it to JSON.

    Returns:
        A PNG; empty where there is nothing to draw.
    """
    rows = comparison["results"]
    if not rows:
        return b""
    figure, panels = plt.subplots(1, len(rows), figsize=(2.6 * len(rows) + 0.6, 3.6), squeeze=False)
    for axes, row in zip(panels[0], rows, strict=True):
        _draw_row(axes, row, comparison["runs"])
    state = "" if comparison["complete"] else " (incomplete)"
    figure.suptitle(f"{' against '.join(comparison['arms'])}{state}, {comparison['started_at']}", fontsize=9)
    figure.tight_layout()
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    plt.close(figure)
    return picture.getvalue()


def _draw_row(axes: Any, row: Mapping[str, Any], runs: list[Mapping[str, Any]]) -> None:
    metric = row["metric"]
    for position, (arm, side) in enumerate(row["arms"].items()):
        axes.bar(position, side["median"], color=_COLOURS[position], width=0.6)
        mine = [run[metric] for run in runs if (run["workload"], run["arm"]) == (row["workload"], arm)]
        values = [value for value in mine if value]
        axes.plot([position] * len(values), values, "k.", markersize=5)
    axes.set_xticks(range(len(row["arms"])), list(row["arms"]))
    interval = row["ratio_interval"]
    between = f"\n[{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    axes.set_title(f"{row['workload']}: {METRICS[metric]}\n{row['ratio']:.2f}x{between}", fontsize=8)
    axes.set_ylim(bottom=0)
