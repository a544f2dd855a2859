"""Each node downloads a model once, and a download that fails ends every rank."""

import os
from unittest import mock

import huggingface_hub
import pytest

from tests.training.engine import configured
from tests.training.ranks import run_ranks
from training.agreement import Agreement
from training.download import model_folder
from training.errors import JobError

MODEL = "some-org/some-model"
REVISION = "0123456789abcdef0123456789abcdef01234567"


class _Hub:
    """Stands in for the hub: a download fills this node's cache, a local look-up reads it."""

    def __init__(self, cache, files, broken_node=None, node=None):
        self.cache, self.files, self.is_broken = cache, files, node == broken_node
        self.downloads = []

    def snapshot_download(self, model_id, revision, allow_patterns, local_files_only):
        assert (model_id, revision) == (MODEL, REVISION)
        if local_files_only:
            if not os.path.isdir(self.cache):
                raise FileNotFoundError("not in the cache of this node")
            return self.cache
        self.downloads.append(allow_patterns)
        if self.is_broken:
            raise ConnectionError("[Errno 110] Connection timed out\nmore of it")
        os.makedirs(self.cache, exist_ok=True)
        for name in self.files:
            if any(name.endswith(pattern.removeprefix("*")) for pattern in allow_patterns):
                open(os.path.join(self.cache, name), "w").close()
        return self.cache


def _fetch(worker, root, files, broken_node=None):
    hub = _Hub(f"{root}/{worker.node}", files, broken_node, worker.node)
    config = configured(model_id=MODEL, model_revision=REVISION)
    with mock.patch.object(huggingface_hub, "snapshot_download", hub.snapshot_download):
        try:
            found = model_folder(config, Agreement(60), is_first_of_node=worker.local_rank == 0)
        except JobError as error:
            found = error.args[0]
    return found, hub.downloads


NODES = ["a", "b", "a", "b"]


def test_one_rank_of_each_node_downloads_and_all_find_their_node_s_copy(tmp_path):
    outcomes = run_ranks(
        _fetch, 4, str(tmp_path), ["config.json", "model.safetensors", "pytorch_model.bin"], nodes=NODES
    )
    assert [folder for folder, _ in outcomes] == [f"{tmp_path}/{node}" for node in NODES]
    assert [len(downloads) for _, downloads in outcomes] == [1, 1, 0, 0]
    # PyTorch's files of the same weights are left on the hub.
    assert sorted(os.listdir(tmp_path / "a")) == ["config.json", "model.safetensors"]


def test_pytorch_files_are_fetched_where_there_are_no_others(tmp_path):
    ((folder, downloads),) = run_ranks(_fetch, 1, str(tmp_path), ["config.json", "pytorch_model.bin"])
    assert sorted(os.listdir(folder)) == ["config.json", "pytorch_model.bin"]
    assert len(downloads) == 2


def test_a_download_that_fails_on_one_node_ends_every_rank_with_its_reason(tmp_path):
    outcomes = run_ranks(_fetch, 4, str(tmp_path), ["config.json", "model.safetensors"], "b", nodes=NODES)
    for rank, (message, _) in enumerate(outcomes):
        assert message.startswith(
            ("rank 1: " if rank != 1 else "") + f"--model-id {MODEL} at revision {REVISION}: "
        )
        assert "[Errno 110] Connection timed out. Check" in message
        assert "HF_TOKEN" in message and "--model-revision" in message


def test_a_repository_without_weights_is_named(tmp_path):
    ((message, _),) = run_ranks(_fetch, 1, str(tmp_path), ["config.json"])
    assert message == f"--model-id {MODEL}: the model has no weights (*.safetensors or *.bin) at {REVISION}"


def test_a_local_folder_needs_no_hub(tmp_path):
    with mock.patch.object(huggingface_hub, "snapshot_download", side_effect=AssertionError):
        assert model_folder(configured(model_id=str(tmp_path)), None, True) == str(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_patterns_match_the_usual_names_of_weights(name):
    from fnmatch import fnmatch

    from training.download import _WEIGHT_FILES

    assert any(fnmatch(name, pattern) for pattern in _WEIGHT_FILES)
