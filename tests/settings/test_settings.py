"""Settings: defaults load, overrides arrive as typed values, and everything wrong is said at once."""

import json
from pathlib import Path

import pytest

import settings
from training.config import TrainingConfig

ROOT = Path(__file__).parents[2]
CONTEXT = json.loads((ROOT / "cdk.json").read_text())["context"]


def load(**overrides):
    return settings.load(CONTEXT | overrides)


def problems(**overrides) -> list[str]:
    with pytest.raises(settings.SettingsError) as caught:
        load(**overrides)
    return caught.value.problems


def test_the_defaults_are_the_sample_s_system():
    loaded = load()
    assert (loaded.network.region, loaded.nodes.gpu_instance_type) == ("us-east-2", "g6.12xlarge")
    assert (loaded.cluster.kubernetes_version, loaded.cluster.system_instance_type) == ("1.36", "m7i.xlarge")
    assert loaded.job.num_workers == loaded.nodes.num_gpus == 8
    assert load(num_workers=4).job.num_workers == 4
    assert loaded.job.model_id == "Qwen/Qwen2.5-1.5B"
    assert loaded.job.require_transport == "efa"
    assert loaded.job.instance_type == "g6.12xlarge"


def test_cdk_json_holds_every_setting_and_nothing_else():
    own = {key for key in CONTEXT if "/" not in key and ":" not in key}
    assert own == settings.setting_types().keys()


def test_job_settings_have_the_module_s_defaults_except_the_proof_of_efa():
    """A bare `python -m training.run` and the deployed job differ only where they must."""
    module = TrainingConfig()
    differing = {
        name
        for name in TrainingConfig.__dataclass_fields__
        if name in CONTEXT and getattr(module, name) != CONTEXT[name]
    }
    assert differing == {"require_transport"}


def test_command_line_overrides_are_strings_and_become_typed_values():
    loaded = load(
        num_gpu_nodes="3",
        train="false",
        learning_rate="1e-4",
        azs="us-east-2a, us-east-2c",
        gpu_az="us-east-2c",
    )
    assert loaded.nodes.num_gpu_nodes == 3
    assert loaded.ray.train is False
    assert loaded.job.learning_rate == 1e-4
    assert loaded.network.azs == ("us-east-2a", "us-east-2c")


def test_the_cdk_s_own_context_keys_are_not_settings():
    load(**{"@aws-cdk/core:x": True, "aws:cdk:toolkit": 1, "availability-zones:account=1:region=x": ["a"]})


def test_all_problems_are_reported_at_once():
    found = problems(kubernetes_verison="1.36", steps="many", seq_len=0, num_gpu_nodes=0, gpu_az="us-west-2a")
    assert len(found) == 5


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            {"kubernetes_verison": "1.36"},
            "kubernetes_verison = 1.36: no such setting; did you mean kubernetes_version?",
        ),
        ({"gpu_az": "us-east-2d"}, "gpu_az = us-east-2d: not among azs (us-east-2a, us-east-2b, us-east-2c)"),
        ({"gpu_az": "us-west-2a"}, "gpu_az = us-west-2a: not in the Region us-east-2"),
        ({"azs": ["us-east-2a"]}, "azs = us-east-2a: EKS needs at least two"),
        ({"azs": "us-east-2a,us-east-2a"}, "azs = us-east-2a,us-east-2a: EKS needs at least two different"),
        ({"azs": "us-east-2a,us-west-2a"}, "us-west-2a not in the Region us-east-2"),
        ({"azs": "us-east-2a,us-east-2-chi-1a"}, "us-east-2-chi-1a not in the Region us-east-2"),
        ({"region": "ohio"}, "region = ohio: use a Region such as us-east-2"),
        ({"vpc_cidr": "10.0.0.0"}, "vpc_cidr = 10.0.0.0: use a private range from /16 to /24"),
        ({"vpc_cidr": "10.0.0.0/8"}, "vpc_cidr = 10.0.0.0/8: use a private range from /16 to /24"),
        ({"gpu_instance_type": "m7i.xlarge"}, "gpu_instance_type = m7i.xlarge: has no GPUs and no EFA"),
        ({"gpu_instance_type": "g6.12xlage"}, "did you mean g6.12xlarge"),
        ({"num_gpu_nodes": 0}, "num_gpu_nodes = 0: should be greater than or equal to 1"),
        ({"num_system_nodes": "0"}, "num_system_nodes = 0: should be greater than or equal to 1"),
        ({"system_disk_gib": 20}, "system_disk_gib = 20: should be greater than or equal to 100"),
        ({"head_cpu": 4}, "head_cpu = 4: does not fit on m7i.xlarge"),
        ({"head_memory_gib": 16}, "head_memory_gib = 16: does not fit on m7i.xlarge"),
        ({"ray_cluster_name": "LLM"}, "ray_cluster_name = LLM: use lower-case"),
        ({"ray_cluster_name": "a" * 37}, "37 characters; at most 36"),
        ({"ray_cluster_name": "a" * 54}, "ray_cluster_name"),
        ({"namespace": "Ray_1"}, "namespace = Ray_1: use lower-case"),
        ({"namespace": "n" * 64}, "namespace"),
        ({"namespace": "kube-system"}, "namespace = kube-system: belongs to"),
        ({"kubernetes_version": "1.35"}, "add aws-cdk.lambda-layer-kubectl-v35 to requirements-cdk.txt"),
        ({"kubernetes_version": "latest"}, "kubernetes_version = latest: use a minor version such as 1.36"),
        ({"capacity": "spot"}, "capacity = spot: should be 'on-demand', 'reservation' or 'capacity-block'"),
        ({"capacity_reservation_id": "cr-0123456789abcdef0"}, "but capacity_reservation_id is given"),
        ({"capacity": "reservation"}, "capacity_reservation_id = (empty): capacity reservation needs the id"),
        (
            {"capacity": "capacity-block"},
            "capacity_reservation_id = (empty): capacity capacity-block needs the id",
        ),
        ({"capacity_reservation_id": "res-1"}, "use the id of a capacity reservation, cr-..."),
        ({"capacity_block_started": True}, "only means something with capacity capacity-block"),
        ({"admin_role_arns": "arn:aws:iam::1:user/x"}, "'arn:aws:iam::1:user/x': use the ARN of an IAM role"),
        ({"api_public_cidrs": "1.2.3.4/99"}, "api_public_cidrs"),
        ({"prefix": "my_team"}, "prefix = my_team: use up to 40 letters"),
        ({"ray_version": "2.58"}, "ray_version = 2.58: use the image's Ray version"),
        ({"ray_version": "2.51.0"}, "ray_version = 2.51.0: token authentication needs 2.52 or newer"),
        ({"image": ""}, "image = (empty)"),
        ({"job_deadline_s": 5}, "job_deadline_s = 5: should be greater than or equal to 60"),
        ({"train": "maybe"}, "train = maybe: should be a valid boolean"),
        (
            {"data": "corpus.txt"},
            "data = corpus.txt: pods see no files of this machine; use s3://<bucket>/<key>",
        ),
        ({"data": "s3://bucket"}, "data = s3://bucket: pods see"),
        ({"data": "s3://bucket/*"}, "data = s3://bucket/*: pods see"),
        ({"compare": "efa"}, "compare = efa: should be '', 'efa-tcp' or 'shm-memcpy'"),
        ({"compare": "efa-tcp", "train": False}, "compare = efa-tcp: is what the RayJob does"),
        ({"compare": "efa-tcp", "steps": 3}, "steps = 3: must exceed untimed_steps (3) to compare"),
        ({"steps": "many"}, "steps = many: should be a valid integer"),
        ({"steps": 0}, "steps = 0: must be at least 1"),
        ({"learning_rate": "nan"}, "learning_rate = nan: must be a number above 0"),
        ({"sharding": "zero3"}, "sharding = zero3: use one of hybrid, full"),
        (
            {"activation_memory": "1.5"},
            "activation_memory = 1.5: use none, full, or a number between 0 and 1",
        ),
        ({"num_workers": 9}, "num_workers = 9: 2 x g6.12xlarge have 8 GPUs"),
        ({"num_workers": 5}, "num_workers = 5: hybrid sharding needs the same number of workers on each"),
        (
            {"global_batch_size": 33},
            "global_batch_size = 33: must be a multiple of workers x batch_size = 32",
        ),
        ({"collective_timeout_s": 601}, "collective_timeout_s = 601: must be from 1 to 600"),
        ({"require_gpudirect": True}, "require_gpudirect = True: g6.12xlarge has no GPUDirect RDMA"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_a_remedy(overrides, line):
    assert any(line in problem for problem in problems(**overrides)), problems(**overrides)


def test_a_missing_setting_is_named():
    context = {key: value for key, value in CONTEXT.items() if key != "prefix"}
    with pytest.raises(settings.SettingsError, match="prefix: missing"):
        settings.load(context)


def test_a_value_that_is_wrong_alone_does_not_hide_the_others():
    found = problems(azs="us-east-2a", num_system_nodes="x", capacity="reservation")
    assert [line.split(" = ")[0] for line in found] == ["num_system_nodes", "azs", "capacity_reservation_id"]


@pytest.mark.parametrize("version", ["1.30", "1.36"])
def test_both_contracted_kubectl_layers_can_be_chosen(version):
    assert load(kubernetes_version=version).cluster.kubernetes_version == version


def warnings(**overrides) -> str:
    return "\n".join(settings.warnings(load(**overrides)))


@pytest.mark.parametrize(
    "image", ["repo/ray:train-ml-cuda-v1.1", "repo/ray:v1.1", "repo/ray", "host:5000/ray", "repo/ray:latest"]
)
def test_an_image_that_can_move_is_warned_about_with_how_to_pin_it(image):
    assert "vX.Y.Z" in warnings(image=image)
    assert "sha256" in warnings(image=image)


@pytest.mark.parametrize("image", ["repo/ray:train-ml-cuda-v1.1.3", "repo/ray:v1.1@sha256:" + "0" * 64])
def test_a_pinned_image_is_not_warned_about(image):
    assert "image" not in warnings(image=image)


def test_an_api_open_to_the_internet_is_never_silent():
    assert "whole internet" in warnings(api_public_cidrs="0.0.0.0/0")
    assert "whole internet" in warnings(api_public_cidrs="::/0")
    assert "whole internet" not in warnings(api_public_cidrs="192.0.2.0/24")


def test_a_version_that_eks_no_longer_creates_is_warned_about():
    assert "no longer creates" in warnings(kubernetes_version="1.30")


def test_a_capacity_block_that_has_not_started_is_pointed_out():
    block = {
        "gpu_instance_type": "p5.48xlarge",
        "capacity": "capacity-block",
        "capacity_reservation_id": "cr-0123456789abcdef0",
    }
    assert "0 nodes" in warnings(**block)
    assert "0 nodes" not in warnings(**block, capacity_block_started=True)
    assert "train=false" in warnings(**block)
    assert "train=false" not in warnings(**block, train=False)
