"""Where there is no GPU, kernels run in Triton's interpreter: Triton reads the switch when it is first imported."""

import os

import pytest
import torch

os.environ["SAGEBWD_HOPPER"] = "1"  # Hopper's kernels wherever they can, also where they are the slower ones
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401

    import sagebwd.attention.triton_backend
    import sagebwd.kernels.hopper.backward  # noqa: F401

    del os.environ["TRITON_INTERPRET"]  # CPU tensors go to the reference again, unless a test asks otherwise


def pytest_collection_modifyitems(items):
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
