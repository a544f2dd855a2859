"""What the log says of the attention kernel is what runs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from tests.training.engine import TINY
from training.attention import attention_backend
from training.model import build
from training.shape import ModelShape

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_the_kernel_that_is_named_is_the_one_that_runs(num_kv_heads):
    hf_config = type(TINY)(**TINY.to_dict() | {"num_key_value_heads": num_kv_heads})
    model = build(hf_config).to_empty(device=CPU).bfloat16()
    model.loss_scale = torch.ones(())
    ids = torch.zeros(1, 64, dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(ids, ids).backward()
    kernels = {event.key for event in profiled.key_averages() if "scaled_dot_product" in event.key}
    named = attention_backend(ModelShape.from_hf_config(hf_config), 64, CPU)
    assert any(named in kernel for kernel in kernels), (named, kernels)


def test_where_only_the_plain_kernel_is_allowed_that_one_is_named():
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_backend(ModelShape.from_hf_config(TINY), 64, CPU) == "math"
