from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def group():
    """Every rank runs these tests: ``torchrun --nproc-per-node 2 -m pytest -m gpu tests/gpu/distributed``."""
    if "LOCAL_RANK" not in os.environ:
        pytest.skip("needs several GPUs: torchrun --nproc-per-node 2 -m pytest -m gpu tests/gpu/distributed")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    yield dist.group.WORLD
    dist.destroy_process_group()
