"""The backend that is selected for MLA shapes on this GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu.harness import DEVICE, UNBUILT

from flashlatte import ops
from flashlatte.runtime import dispatch

pytestmark = pytest.mark.gpu

CALLS = (
    dispatch.CallSpec("dense_decode", DEVICE, torch.bfloat16, "bf16", 64, 576, 512, h_q=128, h_kv=1),
    dispatch.CallSpec("sparse_decode", DEVICE, torch.bfloat16, "v32", 64, 576, 512, h_q=128, h_kv=1),
    dispatch.CallSpec("sparse_decode", DEVICE, torch.bfloat16, "model1", 256, 512, 512, h_q=64, h_kv=1),
    dispatch.CallSpec("sparse_prefill", DEVICE, torch.bfloat16, head_dim=576, head_dim_v=512, h_q=128, h_kv=1),
    dispatch.CallSpec("sparse_prefill", DEVICE, torch.bfloat16, head_dim=512, head_dim_v=512, h_q=64, h_kv=1),
    dispatch.CallSpec("merge_states", DEVICE, torch.bfloat16, head_dim_v=512),
    dispatch.CallSpec("cache_write", DEVICE, torch.bfloat16, "v32", 64, 576),
    dispatch.CallSpec("cache_gather", DEVICE, torch.bfloat16, "v32", 64, 576),
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.operation}-{call.cache_format}-{call.head_dim}")
def test_implemented_backends_support_their_calls(call: dispatch.CallSpec) -> None:
    ops.load()
    call = replace(call, device=torch.device(DEVICE.type, torch.cuda.current_device()))
    refusals = {choice.backend: choice.refusal for choice in dispatch.explain(call)}
    built = [name for name, refusal in refusals.items() if refusal is None or UNBUILT not in refusal]
    if torch.cuda.get_device_capability() != (9, 0):
        built = [name for name in built if name != "hopper"]
    assert {name: refusals[name] for name in built} == dict.fromkeys(built)
    assert dispatch.select(call) == next(name for name in dispatch.BACKENDS if name in built)
