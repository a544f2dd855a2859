"""The hourly cost: the sample's figure, the split, and "unknown" where the table has no price."""

from __future__ import annotations

from typing import Any

import pytest
from ray_train_eks.cost import _INSTANCE_USD, HourlyCost, hourly_cost
from ray_train_eks.instance_types import INSTANCE_TYPES


def _cost(**changes: Any) -> HourlyCost:
    defaults = {
        "region": "us-east-2",
        "gpu_instance_type": "g6.12xlarge",
        "num_gpu_nodes": 2,
        "system_instance_type": "m7i.xlarge",
        "num_system_nodes": 1,
        "num_nat_gateways": 1,
    }
    return hourly_cost(**(defaults | changes))


def test_the_default_deployment_costs_what_the_sample_says() -> None:
    cost = _cost()
    assert cost.total_usd == pytest.approx(9.50, abs=0.06)  # its README: "about 9.50 USD an hour"
    assert (cost.gpu_usd, cost.rest_usd) == (pytest.approx(9.2032), pytest.approx(0.3466))
    assert str(cost).startswith(
        "9.55 USD an hour (GPU nodes 9.20 USD, the rest 0.35 USD; list prices of July 2026"
    )


def test_destroying_the_gpu_nodes_leaves_the_rest() -> None:
    cost = _cost(num_gpu_nodes=0)
    assert (cost.gpu_usd, cost.total_usd) == (0.0, cost.rest_usd)


@pytest.mark.parametrize(
    ("changes", "known", "named"),
    [
        ({"gpu_instance_type": "p5e.48xlarge"}, (False, True), "p5e.48xlarge in us-east-2"),
        ({"system_instance_type": "m9x.large"}, (True, False), "m9x.large in us-east-2"),
        (
            {"region": "eu-west-1"},
            (False, False),
            "g6.12xlarge and m7i.xlarge and a NAT gateway in eu-west-1",
        ),
    ],
)
def test_an_unknown_price_is_said_to_be_unknown(
    changes: dict[str, str], known: tuple[bool, bool], named: str
) -> None:
    cost = _cost(**changes)
    assert (cost.gpu_usd is not None, cost.rest_usd is not None) == known
    assert cost.total_usd is None
    assert str(cost).startswith("unknown (GPU nodes ")
    assert str(cost).endswith(f"No price in the table for {named}")


def test_a_region_without_prices_still_knows_that_no_gpu_nodes_cost_nothing() -> None:
    assert _cost(region="eu-west-1", num_gpu_nodes=0).gpu_usd == 0.0


def test_a_reservation_costs_the_same_used_or_not() -> None:
    cost = _cost(capacity="reservation")
    assert cost.gpu_usd == _cost().gpu_usd
    assert "billed from when it is made until it is cancelled" in str(cost)


def test_a_capacity_block_costs_nothing_more_by_the_hour() -> None:
    cost = _cost(capacity="capacity-block", gpu_instance_type="p5.48xlarge", region="us-east-1")
    assert cost.gpu_usd == 0.0
    assert "paid in advance" in str(cost)


def test_prices_are_of_types_in_the_table_of_instance_types() -> None:
    for region, prices in _INSTANCE_USD.items():
        assert prices.keys() <= INSTANCE_TYPES.keys(), region
        assert all(usd > 0 for usd in prices.values())


def test_with_the_same_gpus_a_larger_size_costs_more() -> None:
    """A digit lost while copying the list shows as a size out of order."""
    prices = _INSTANCE_USD["us-east-1"]
    alike: dict[tuple[str, int], list[str]] = {}
    for name in prices:
        alike.setdefault((name.split(".")[0], INSTANCE_TYPES[name].num_gpus), []).append(name)
    for names in alike.values():
        usd = [prices[name] for name in sorted(names, key=lambda name: INSTANCE_TYPES[name].vcpus)]
        assert usd == sorted(set(usd)), names
