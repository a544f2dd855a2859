"""Writes the tables of benchmarks/README.md from the result files: no number there is typed by hand.

python -m benchmarks.summary            rewrite the tables
python -m benchmarks.summary --check    exit code 1 if a table is not that of its result file
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    activation_memory,
    boundary_bytes,
    checkpoint_stall,
    l4_memory,
    load,
    quality,
    throughput,
    two_nodes_of_four,
)

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"
_COLUMNS = {
    "throughput": throughput.COLUMNS,
    "boundary_bytes": boundary_bytes.COLUMNS,
    "quality": quality.COLUMNS,
    "load": load.COLUMNS,
    "two_nodes_of_four": two_nodes_of_four.COLUMNS,
    "l4_memory": l4_memory.COLUMNS,
    "activation_memory": activation_memory.COLUMNS,
    "checkpoint_stall": checkpoint_stall.COLUMNS,
    "transport_proof": {"condition": "", "require": "", "expected": "", "as_expected": "", "seconds": ".1f"},
}
_SECTION = re.compile(r"(<!-- results/(\S+\.json) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(text: str, folder: Path = FOLDER) -> str:
    """The document with each `<!-- results/FILE -->` ... `<!-- end -->` filled from that file."""
    return _SECTION.sub(lambda found: found[1] + section(folder / "results" / found[2]) + found[3], text)


def section(path: Path) -> str:
    """What was run, on what, and its rows as a Markdown table."""
    content = json.loads(path.read_text(encoding="utf-8"))
    columns = _COLUMNS[content["benchmark"]]
    rows = [[_cell(row.get(name), spec) for name, spec in columns.items()] for row in content["rows"]]
    used = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    lines = [[name.replace("_", " ") for name in columns], ["---"] * len(columns), *rows]
    table = "\n".join("| " + " | ".join(line[index] for index in used) + " |" for line in lines)
    return f"`{content['command']}`, {_where(content)}\n\n{table}\n"


def _where(content: dict[str, Any]) -> str:
    machine, versions = content["machine"], content["versions"]
    gpus = machine["gpus"]
    hardware = f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine['num_cpus']} cores of {machine['cpu']}"
    software = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if versions[name])
    unfinished = "" if content["complete"] else ", **cut off before its end**"
    return f"on {hardware}, {software}, {content['date'][:10]}{unfinished}"


def _cell(value: Any, spec: str) -> str:
    return "" if value is None else format(value, spec)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites or checks the tables; returns 0, or 1 when a checked table is out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.summary", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(argv)
    old = README.read_text(encoding="utf-8")
    new = rendered(old)
    if args.check:
        if old != new:
            print(
                f"{README.name}: tables differ from results; run python -m benchmarks.summary",
                file=sys.stderr,
            )
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
