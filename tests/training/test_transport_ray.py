"""The whole way of a failed proof: Ray Train's workers find logs without EFA, and the entrypoint fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASE = ROOT / "tests/cases/nccl/plugin-missing"


def unreadable_model(folder: Path) -> Path:
    """A model that passes every check before the workers start, and that no worker could load."""
    folder.mkdir()
    config = {"model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


def test_logs_without_efa_fail_the_job_before_a_model_is_loaded(tmp_path):
    arguments = {
        "--model-id": str(unreadable_model(tmp_path / "model")),
        "--device": "cpu",
        "--num-workers": "2",
        "--require-transport": "efa",
        "--nccl-log-dir": str(CASE),
        "--storage-path": str(tmp_path),
        "--run-name": "without-efa",
    }
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "training.run", *(word for pair in arguments.items() for word in pair)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 1, done.stderr
    summary = json.loads((tmp_path / "without-efa/summary.json").read_text())
    assert summary["status"] == "failed"
    for text in (done.stderr, summary["error"]):
        assert "NCCL transport: socket - efa was required: FAILED" in text
        assert f"FAILED rank 1 on ip-10-0-1-10 ({CASE}/rank1.log:" in text
        assert "likely cause: NCCL found no network plugin" in text
        assert "remedy: use the training image" in text
    transport = summary["transport"]
    assert (transport["verdict"], transport["require"], transport["passed"]) == ("socket", "efa", False)
    assert [rank["rank"] for rank in transport["ranks"]] == [0, 1]
    assert (tmp_path / "without-efa/steps.jsonl").read_text() == ""
