"""Kubernetes objects, their order, and exactly what the job may do in AWS."""

import itertools

import pytest

MANIFEST = "Custom::AWSCDK-EKS-KubernetesResource"


def _manifests(assembly):
    return assembly.resources("Training", MANIFEST)


def _containers(assembly):
    cluster = assembly.object("RayCluster")["spec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    templates.append(assembly.object("RayJob")["spec"]["submitterPodTemplate"])
    return [container for template in templates for container in template["spec"]["containers"]]


def _statements(assembly):
    policy = assembly.only("Training", "AWS::IAM::Policy")
    return policy["PolicyDocument"]["Statement"]


def test_each_kind_of_object_waits_for_the_one_before_it(default):
    """CloudFormation deletes in the reverse order: the RayJob first, the namespace last."""
    resources = default.templates["Training"]["Resources"]
    identity = list(default.resources("Training", "AWS::EKS::PodIdentityAssociation"))
    by_kind: dict[str, list[str]] = {}
    for name, (each,) in default.manifests().items():
        by_kind.setdefault(each["kind"], []).append(name)
    kinds = ["Namespace", "ServiceAccount", "NetworkPolicy", "identity", "RayCluster", "RayJob"]
    steps = [identity if kind == "identity" else by_kind[kind] for kind in kinds]
    for earlier, later in itertools.pairwise(steps):
        for name in later:
            assert set(earlier) <= set(resources[name]["DependsOn"])


def test_a_new_name_is_a_new_resource_so_that_the_old_object_goes(default, synthesize):
    """With the same id, `kubectl apply` would add the new object and leave the old one running."""
    moved = synthesize(namespace="ml", ray_cluster_name="other")
    assert not _manifests(default).keys() & _manifests(moved).keys()


def test_each_object_has_a_resource_of_its_own(default):
    """Dropped from a list in one resource, a network policy would stay in force."""
    assert all(len(objects) == 1 for objects in default.manifests().values())


def test_the_first_pod_finds_its_role_s_policy_in_place(default):
    (identity,) = default.resources("Training", "AWS::EKS::PodIdentityAssociation").values()
    (policy,) = default.resources("Training", "AWS::IAM::Policy")
    assert policy in identity["DependsOn"]


def test_objects_are_applied_without_labels_of_cdk_and_cannot_hang_for_ever(default):
    for manifest in _manifests(default).values():
        properties = manifest["Properties"]
        assert properties["Overwrite"] is True
        assert "PruneLabel" not in properties
        assert properties["ServiceTimeout"] == 960
    assert "aws.cdk.eks/prune" not in str(default.objects())


def test_the_job_s_digest_is_in_its_name_and_in_its_id(default):
    """In the id alone it would delete the live object, in the name alone it would update a finished job."""
    name = default.object("RayJob")["metadata"]["name"]
    digest = name.removeprefix("llm-")
    assert len(digest) == 10
    assert [id_ for id_ in _manifests(default) if id_.startswith(f"RayJobrayllm{digest}")]
    assert default.templates["Training"]["Outputs"]["RayJobName"]["Value"] == name


def test_other_arguments_are_another_job_and_the_same_ray_cluster(default, synthesize):
    other = synthesize(steps=21)
    assert other.object("RayJob")["metadata"]["name"] != default.object("RayJob")["metadata"]["name"]
    assert other.object("RayCluster") == default.object("RayCluster")
    same = {id_ for id_ in _manifests(default)} & {id_ for id_ in _manifests(other)}
    assert len(same) == len(_manifests(default)) - 1


def test_without_train_there_is_a_ray_cluster_and_no_job(block):
    assert [each["kind"] for each in block.objects()].count("RayJob") == 0
    assert block.object("RayCluster")
    assert "RayJobName" not in block.templates["Training"]["Outputs"]


def test_requests_equal_limits_in_every_container(default):
    for container in _containers(default):
        assert container["resources"]["requests"] == container["resources"]["limits"], container["name"]


def test_the_job_server_is_published_nowhere(default, reserved):
    for assembly in (default, reserved):
        assert not [each for each in assembly.objects() if each["kind"] in ("Ingress", "Service", "Gateway")]
        head = assembly.object("RayCluster")["spec"]["headGroupSpec"]
        assert head.get("serviceType", "ClusterIP") == "ClusterIP"
        assert not head.get("enableIngress")
        assert not [container for container in _containers(assembly) if "hostPort" in str(container)]


def test_the_job_reads_exactly_its_package_and_writes_only_below_its_prefixes(default):
    read, list_, objects = _statements(default)
    assert (read["Effect"], read["Action"]) == ("Allow", "s3:GetObject")
    assert read["Resource"]["Fn::Join"][1][-1].startswith("/")
    assert read["Resource"]["Fn::Join"][1][-1].endswith(".zip")
    ((bucket, _),) = default.resources("Training", "AWS::S3::Bucket").items()
    arn = {"Fn::GetAtt": [bucket, "Arn"]}
    assert (list_["Action"], list_["Resource"]) == ("s3:ListBucket", arn)
    assert objects["Resource"] == [{"Fn::Join": ["", [arn, f"/{p}/*"]]} for p in ("runs", "checkpoints")]
    assert not [action for action in objects["Action"] if "*" in action]


def test_a_comparison_is_new_work_and_so_a_new_job(synthesize, default):
    compared = synthesize(compare="shm-memcpy").object("RayJob")
    assert "training.compare --ab shm-memcpy --repeats 3 --json" in compared["spec"]["entrypoint"]
    assert compared["metadata"]["name"] != default.object("RayJob")["metadata"]["name"]


def test_text_in_s3_may_be_read_by_its_exact_key(synthesize, default):
    data = "s3://my-corpus/texts/english.txt"
    (added,) = [each for each in _statements(synthesize(data=data)) if "my-corpus" in str(each)]
    assert added["Action"] == "s3:GetObject"
    arn = {"Fn::Join": ["", ["arn:", {"Ref": "AWS::Partition"}, ":s3:::my-corpus/texts/english.txt"]]}
    assert added["Resource"] == arn
    assert "my-corpus" not in str(_statements(default))


def test_the_zip_that_may_be_read_is_the_one_that_the_job_names(default):
    key = _statements(default)[0]["Resource"]["Fn::Join"][1][-1]
    assert default.object("RayJob")["spec"]["runtimeEnvYAML"].strip().endswith(f"{key}>")


def test_only_the_job_s_service_account_gets_the_role(default):
    identity = default.only("Training", "AWS::EKS::PodIdentityAssociation")
    account = default.object("ServiceAccount")["metadata"]
    assert (identity["Namespace"], identity["ServiceAccount"]) == (account["namespace"], account["name"])
    ((role_name, role),) = default.resources("Training", "AWS::IAM::Role").items()
    assert identity["RoleArn"] == {"Fn::GetAtt": [role_name, "Arn"]}
    (trust,) = role["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert "ManagedPolicyArns" not in role["Properties"]


@pytest.fixture(scope="module")
def bucket(default):
    return default.only("Training", "AWS::S3::Bucket")


def test_results_are_encrypted_and_closed_to_the_public(default, bucket):
    (rule,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    statements = default.only("Training", "AWS::S3::BucketPolicy")["PolicyDocument"]["Statement"]
    conditions = [each["Condition"] for each in statements if each["Effect"] == "Deny"]
    assert {"Bool": {"aws:SecureTransport": "false"}} in conditions


def test_old_checkpoints_expire_and_results_do_not(bucket):
    rules = {rule["Id"]: rule for rule in bucket["LifecycleConfiguration"]["Rules"]}
    expiring = [rule for rule in rules.values() if "ExpirationInDays" in rule]
    assert [(rule["Prefix"], rule["ExpirationInDays"]) for rule in expiring] == [("checkpoints/", 30)]
    assert rules["drop-abandoned-uploads"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}


def test_the_bucket_survives_destroy_unless_the_settings_say_otherwise(default, reserved):
    ((_, kept),) = default.resources("Training", "AWS::S3::Bucket").items()
    assert kept["DeletionPolicy"] == kept["UpdateReplacePolicy"] == "Retain"
    ((_, dropped),) = reserved.resources("Training", "AWS::S3::Bucket").items()
    assert dropped["DeletionPolicy"] == "Delete"
    assert reserved.resources("Training", "Custom::S3AutoDeleteObjects")  # a full bucket cannot be deleted


def test_the_job_stores_its_results_in_the_bucket(default):
    (bucket_name,) = default.resources("Training", "AWS::S3::Bucket")
    assert f"--storage-path s3://<{bucket_name}>/runs" in default.object("RayJob")["spec"]["entrypoint"]
