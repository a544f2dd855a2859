"""`make demo` as a newcomer runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import demo

ROOT = Path(__file__).parents[1]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "demo.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": "another-cluster:6379"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def scratch_folder(output: str) -> Path:
    return Path(re.search(r"--storage-path (/tmp/demo-\w+)/", output)[1])


def test_the_demo_synthesizes_trains_and_says_what_it_does_not_prove() -> None:
    process = start("--steps", "10")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    for stack in ("Network", "Cluster", "Nodes", "Platform", "Training"):
        assert re.search(rf"^ray-train-{stack} +\d+ resources: ", output, re.MULTILINE)
    assert "Node group: 2 x g6.12xlarge = 8 GPUs (NVIDIA L4), 2 EFA interfaces" in output
    assert "step 10/10  loss " in output
    assert re.search(r"^Ranks +4 on 2 nodes \(2, 2\)$", output, re.MULTILINE)
    assert re.search(r"^Transport +not applicable: ", output, re.MULTILINE)
    assert "A local run proves nothing about EFA" in output
    assert not scratch_folder(output).exists()


def test_an_interrupted_demo_leaves_neither_processes_nor_files() -> None:
    process = start()
    output = ""
    for line in iter(process.stdout.readline, ""):
        output += line
        if line.startswith("python -m training.run"):  # the cluster is up, the job is being submitted
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 6
    group = os.getpgid(process.pid)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=100) == 130, output + rest
    assert rest.endswith("interrupted; everything is stopped\n")
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert not scratch_folder(output).exists()
    assert group == os.getpgrp(), "Ctrl-C in a terminal would not have reached it"


def test_a_synthesis_that_fails_fails_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = tmp_path / "cdk"
    cli.write_text("#!/bin/sh\necho 'error: gpu_az = mars-1a'\nexit 1\n")
    cli.chmod(0o755)
    monkeypatch.setattr(demo, "_prepare_environment", lambda scratch: None)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == "error: `cdk synth` failed:\nerror: gpu_az = mars-1a\n"


def test_a_missing_cli_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(demo.DemoError, match="run `make demo`, which installs it"):
        demo.synthesize(tmp_path / "cdk.out")


def summary(folder: Path, **changes: object) -> Path:
    content = {
        "first_loss": 5.5,
        "last_loss": 3.0,
        "num_steps": 60,
        "tokens_per_s": 9000.0,
        "world_size": 4,
        "num_ranks_per_node": {"a": 2, "b": 2},
        "transport": {"verdict": "not applicable", "why": "gloo"},
    }
    (folder / "summary.json").write_text(json.dumps(content | changes))
    return folder


def test_a_loss_that_did_not_fall_fails_the_demo(tmp_path: Path) -> None:
    assert "Loss          5.5000 -> 3.0000 in 60 steps" in demo.describe_result(summary(tmp_path))
    with pytest.raises(demo.DemoError, match=r"the loss did not fall: 5\.5000 at first, 5\.5000 at the end"):
        demo.describe_result(summary(tmp_path, last_loss=5.5))


def test_a_run_too_short_for_a_throughput_says_so(tmp_path: Path) -> None:
    assert any("not measured" in line for line in demo.describe_result(summary(tmp_path, tokens_per_s=None)))


@pytest.mark.parametrize("steps", ["1", "0", "many"])
def test_steps_that_cannot_show_a_falling_loss_are_refused(
    steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        demo.main(["--steps", steps])
    assert raised.value.code == 2
    assert "--steps" in capsys.readouterr().err
