"""Pictures of result files: `python -m benchmarks.figures FILE...` writes each next to its file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_COLORS = {"ours": "#1b6ca8", "aws-sample": "#e07b39", "accelerate-fsdp2": "#7a7a7a"}


def throughput(path: Path) -> Path:
    """Tokens/s/GPU of each loop and setting, one panel for each condition."""
    content = _read(path)
    rows = [row for row in content["rows"] if row["tokens_per_s_per_gpu"]]
    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    height = 1.2 + 0.32 * len(rows) + 0.5 * len(conditions)
    figure, axes = plt.subplots(
        max(len(conditions), 1),
        1,
        figsize=(9, height),
        squeeze=False,
        height_ratios=[sum(row["condition"] == name for row in rows) for name in conditions] or None,
    )
    for axis, condition in zip(axes[:, 0], conditions, strict=False):
        _throughput_panel(axis, condition, [row for row in rows if row["condition"] == condition])
    return _save(figure, path, content)


def _throughput_panel(axis: plt.Axes, condition: str, rows: Sequence[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: (row["batch_size"] * row["seq_len"], row["name"]))
    labels = [f"{row['name']}  {row['batch_size']}x{row['seq_len']} {row['settings']}" for row in rows]
    rates = [row["tokens_per_s_per_gpu"] for row in rows]
    bars = axis.barh(range(len(rows)), rates, color=[_COLORS[row["name"]] for row in rows])
    axis.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=3, fontsize=8)
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.set_title(condition, loc="left", fontsize=10)
    axis.set_xlabel("tokens/s/GPU, median", fontsize=8)
    axis.margins(x=0.15)


def grouped(path: Path, content: dict[str, Any], value: str, label: str, group: str, series: str) -> Path:
    """Bars of one field, grouped by a second and colored by a third."""
    rows = [row for row in content["rows"] if row.get(value) is not None]
    figure, axis = plt.subplots(figsize=(9, 4.5))
    groups = list(dict.fromkeys(str(row[group]) for row in rows))
    names = list(dict.fromkeys(str(row[series]) for row in rows))
    width = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        own = [row for row in rows if str(row[series]) == name]
        places = [groups.index(str(row[group])) + index * width for row in own]
        bars = axis.bar(places, [row[value] for row in own], width, label=name)
        axis.bar_label(bars, fmt="{:,.3g}", fontsize=7)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], groups)
    axis.set_xlabel(group)
    axis.set_ylabel(label)
    if rows:
        axis.legend(fontsize=8)
    return _save(figure, path, content)


def boundary_bytes(path: Path) -> Path:
    """GB out of a node per step, by scheme and accumulation."""
    label = "GB out of one node per step"
    return grouped(path, _read(path), "measured_gb", label, "gradient_accumulation", "scheme")


def quality(path: Path) -> Path:
    """Training loss of each arm over the steps, with its loss on held-out text."""
    content = _read(path)
    figure, axis = plt.subplots(figsize=(9, 4.5))
    for row in content["rows"]:
        steps, losses = zip(*row["curve"], strict=True)
        moved = f"{row['moved_share_at_bf16']:.1%} of weights moved"
        label = f"{row['name']}: eval loss {row['eval_loss']:.3f}, {moved}"
        axis.plot(steps, losses, marker=".", label=label)
    axis.axhline(content["entropy"], color="#999999", linestyle=":", label="lowest possible loss")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss")
    axis.legend(fontsize=8)
    return _save(figure, path, content)


def load(path: Path) -> Path:
    """Host memory and time of each way to load."""
    content = _read(path)
    figure, (memory, seconds) = plt.subplots(1, 2, figsize=(9, 3.5))
    names = [row["name"] for row in content["rows"]]
    for axis, field, label in (
        (memory, "beyond_shards_gib", "peak host memory beyond shards, GiB"),
        (seconds, "seconds", "seconds"),
    ):
        bars = axis.bar(
            names, [row[field] for row in content["rows"]], color=list(_COLORS.values())[: len(names)]
        )
        axis.bar_label(bars, fmt="{:,.2f}", fontsize=8)
        axis.set_ylabel(label)
    return _save(figure, path, content)


def two_nodes(path: Path) -> Path:
    """Tokens/s/GPU of each scheme, with and without the emulated network, at each setting."""
    content = _read(path)
    for row in content["rows"]:
        row["group"] = f"{row['network']} {row['batch_size']}x{row['seq_len']}"
    return grouped(path, content, "tokens_per_s_per_gpu", "tokens/s/GPU", "group", "scheme")


def l4_memory(path: Path) -> Path:
    """What each setting reserves of an L4's memory, with each allocator; nothing where it did not fit."""
    content = _read(path)
    for row in content["rows"]:
        row["group"] = f"{row['batch_size']}x{row['seq_len']}, activation memory {row['activation_memory']}"
        row["peak_reserved_gib"] = row["peak_reserved_gib"] or 0.0
    return grouped(path, content, "peak_reserved_gib", "peak of reserved memory, GiB", "group", "allocator")


def activation_memory(path: Path) -> Path:
    """What a layer keeps and what it computes again, by setting, from everything kept to nothing."""
    content = _read(path)
    names = [row["activation_memory"] for row in content["rows"]]
    figure, axis = plt.subplots(figsize=(9, 4.5))
    for field, label in (
        ("kept_share", "kept, of all activations"),
        ("recomputed_share", "computed again, of a layer's FLOPs"),
    ):
        axis.step(names, [row[field] for row in content["rows"]], where="mid", marker="o", label=label)
    axis.set_xlabel("activation_memory")
    axis.set_ylabel("share")
    axis.legend(fontsize=8)
    return _save(figure, path, content)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _save(figure: plt.Figure, path: Path, content: dict[str, Any]) -> Path:
    machine = content["machine"]
    where = f"{len(machine['gpus'])} x {machine['gpus'][0]}" if machine["gpus"] else machine["cpu"]
    figure.suptitle(
        f"{content['benchmark']}: {where}, torch {content['versions']['torch']}, {content['date'][:10]}"
    )
    figure.tight_layout()
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=130)
    plt.close(figure)
    return picture


BY_BENCHMARK = {
    "throughput": throughput,
    "boundary_bytes": boundary_bytes,
    "quality": quality,
    "load": load,
    "two_nodes_of_four": two_nodes,
    "l4_memory": l4_memory,
    "activation_memory": activation_memory,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the pictures of the given result files."""
    paths = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    problems = [problem for path in paths if (problem := _problem(path))]
    if problems or not paths:
        print("\n".join(problems) or "usage: python -m benchmarks.figures FILE...", file=sys.stderr)
        return 2
    for path in paths:
        print(BY_BENCHMARK[_read(path)["benchmark"]](path))
    return 0


def _problem(path: Path) -> str | None:
    try:
        benchmark = _read(path).get("benchmark")
    except (OSError, ValueError) as error:
        return f"{path}: {error}"
    known = ", ".join(BY_BENCHMARK)
    return (
        None if benchmark in BY_BENCHMARK else f"{path}: benchmark {benchmark} has no picture; known: {known}"
    )


if __name__ == "__main__":
    sys.exit(main())
