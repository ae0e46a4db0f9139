import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from sagebwd.megatron import cpu_compat

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing where CUDA is present")


def test_cuda_means_the_cpu_inside() -> None:
    with cpu_compat.active():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.zeros(2).to("cuda:0").cuda().device.type == "cpu"
        assert not torch.tensor([0], device="cpu", pin_memory=True).cuda(non_blocking=True).is_pinned()
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).type(torch.bfloat16).dtype is torch.bfloat16
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        torch.manual_seed(0)  # calls CUDA's, which must not call it back


def test_nothing_is_left_of_it_outside() -> None:
    before = (torch.cuda.current_device, torch.cuda.manual_seed, megatron_random._set_cuda_rng_state)
    with pytest.raises(KeyError), cpu_compat.active():
        raise KeyError
    assert before == (torch.cuda.current_device, torch.cuda.manual_seed, megatron_random._set_cuda_rng_state)
    assert torch.zeros(2).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
