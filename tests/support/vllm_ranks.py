"""Context parallelism in vLLM's workers on a CPU: PyTorch versions of vLLM's GPU kernels.

vLLM's CPU platform cannot compute slots of contexts sharded over ranks, and lacks the kernels that weight a rank's
output and that gather a rank's pages.
"""

from __future__ import annotations

import torch
from support.vllm_counts import CountsCalls
from vllm import _custom_ops
from vllm.v1.attention.ops import dcp
from vllm.v1.worker.block_table import BlockTable

from flashlatte.integrations.vllm import ops


class SharesContext(CountsCalls):
    def count_calls(self) -> None:
        super().count_calls()
        BlockTable.compute_slot_mapping = _compute_slot_mapping
        dcp.correct_attn_out = _correct_attn_out
        _custom_ops.cp_gather_cache = ops.cp_gather_cache


def _compute_slot_mapping(self, num_reqs, query_start_loc, positions):
    """Token p of a request is on rank (p // interleave) % ranks; other ranks skip it."""
    tokens = int(query_start_loc[num_reqs])
    request = torch.repeat_interleave(torch.arange(num_reqs), query_start_loc[: num_reqs + 1].diff())
    ranks, interleave, size = self.dcp_world_size, self.cp_kv_cache_interleave_size, self.block_size
    block, within = positions[:tokens] // (size * ranks), positions[:tokens] % (size * ranks)
    slot = within // (ranks * interleave) * interleave + within % interleave
    slot += self.block_table.gpu[request, block] * size
    mine = within // interleave % ranks == self.dcp_rank
    self.slot_mapping.gpu.fill_(-1)
    self.slot_mapping.gpu[:tokens] = torch.where(mine, slot, -1)


def _correct_attn_out(out, lses, cp_rank, ctx, is_lse_base_on_e=True):
    """A rank's contribution to the merged output: out [B, H, D] weighted by its lse among lses [N, B, H]."""
    assert is_lse_base_on_e
    total = lses.logsumexp(0)
    return out.mul_((lses[cp_rank] - total).exp()[..., None]), total
