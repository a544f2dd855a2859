"""VPC: private by default, in the settings' zones, recorded."""


def _subnets(assembly, kind):
    found = assembly.resources("Network", "AWS::EC2::Subnet").values()
    tag = {"Key": "aws-cdk:subnet-type", "Value": kind}
    return [subnet["Properties"] for subnet in found if tag in subnet["Properties"]["Tags"]]


def test_every_zone_of_the_settings_has_a_public_and_a_private_subnet(default):
    for kind in ("Public", "Private"):
        zones = [subnet["AvailabilityZone"] for subnet in _subnets(default, kind)]
        assert zones == ["us-east-2a", "us-east-2b", "us-east-2c"]


def test_no_subnet_hands_out_public_addresses(default):
    for subnet in _subnets(default, "Public") + _subnets(default, "Private"):
        assert subnet["MapPublicIpOnLaunch"] is False


def test_every_private_subnet_reaches_the_internet_through_nat(default):
    routes = default.resources("Network", "AWS::EC2::Route")
    private = [route["Properties"] for name, route in routes.items() if "PrivateSubnet" in name]
    assert len(private) == 3
    assert all("NatGatewayId" in route and "GatewayId" not in route for route in private)


def test_the_first_nat_gateway_stands_in_the_zone_of_the_gpu_nodes(default, reserved):
    (only,) = default.resources("Network", "AWS::EC2::NatGateway")
    assert "PublicSubnet1" in only
    first, second = reserved.resources("Network", "AWS::EC2::NatGateway")  # gpu_az is the second zone
    assert {"PublicSubnet1", "PublicSubnet2"} == {first[3:16], second[3:16]}


def test_traffic_is_recorded_and_the_record_expires(default):
    flow_log = default.only("Network", "AWS::EC2::FlowLog")
    assert (flow_log["TrafficType"], flow_log["ResourceType"]) == ("ALL", "VPC")
    groups = default.resources("Network", "AWS::Logs::LogGroup")
    assert flow_log["LogGroupName"]["Ref"] in groups


def test_s3_is_reached_without_nat_from_every_private_subnet(default):
    endpoint = default.only("Network", "AWS::EC2::VPCEndpoint")
    assert endpoint["VpcEndpointType"] == "Gateway"
    assert len(endpoint["RouteTableIds"]) == 3
    assert all("PrivateSubnet" in table["Ref"] for table in endpoint["RouteTableIds"])


def test_the_vpc_s_default_security_group_lets_nothing_through(default):
    assert default.resources("Network", "Custom::VpcRestrictDefaultSG")


def test_the_image_is_cached_only_when_the_settings_say_so(default, reserved):
    assert not default.resources("Network", "AWS::ECR::PullThroughCacheRule")
    rule = reserved.only("Network", "AWS::ECR::PullThroughCacheRule")
    assert rule == {"EcrRepositoryPrefix": "ray-train-cache", "UpstreamRegistryUrl": "public.ecr.aws"}
    repository = reserved.only("Network", "AWS::ECR::Repository")
    assert repository["RepositoryName"] == "ray-train-cache/deep-learning-containers/ray"
    assert repository["EmptyOnDelete"] is True


def test_pods_and_nodes_use_the_cache_when_there_is_one(reserved):
    cluster = reserved.object("RayCluster")["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"] for group in groups]
    pods.append(reserved.object("RayJob")["spec"]["submitterPodTemplate"])
    images = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    registry = "<AWS::AccountId>.dkr.ecr.us-east-2.<AWS::URLSuffix>"
    assert images == {f"{registry}/ray-train-cache/deep-learning-containers/ray:train-ml-cuda-v1.1"}
    for stack in ("Cluster", "Nodes"):
        policies = reserved.resources(stack, "AWS::IAM::Policy").values()
        statements = [s for policy in policies for s in policy["Properties"]["PolicyDocument"]["Statement"]]
        (pull,) = [each for each in statements if each["Action"] == "ecr:BatchImportUpstreamImage"]
        assert "ImportValue" in str(pull["Resource"]) and "*" not in str(pull["Resource"])
