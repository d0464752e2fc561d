"""Errors of vLLM's operations use vLLM's argument names."""

from typing import Any

import pytest
import torch

from flashlatte.integrations.vllm import ops

ONE = torch.tensor(1.0)
FP8_CACHE, LATENTS = torch.zeros(1, 2, 576, dtype=torch.uint8), torch.zeros(1, 512)
SLOT, ROPES = torch.tensor([0]), torch.zeros(1, 64)
KEYS = torch.zeros(1, 1, 1, 16)
# Used instead of a tensor argument.
MISSING: Any = None
LOGITS, INDICES = torch.zeros(1, 8), torch.zeros(1, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ops.concat_and_cache_mla(LATENTS, ROPES, FP8_CACHE, SLOT, "auto", ONE),
            TypeError,
            "^kv_cache must be bfloat16 or float16 or float32 for kv_cache_dtype 'auto', got uint8$",
        ),
        (
            lambda: ops.concat_and_cache_mla(LATENTS, ROPES, FP8_CACHE.half(), SLOT, "bfloat16", ONE),
            TypeError,
            "^kv_cache must be bfloat16 for kv_cache_dtype 'bfloat16', got float16$",
        ),
        (
            lambda: ops.concat_and_cache_mla(LATENTS, ROPES, FP8_CACHE, SLOT, "fp8_e5m2", ONE),
            ValueError,
            "^kv_cache_dtype must be one of .*fp8_ds_mla, got 'fp8_e5m2'$",
        ),
        (
            lambda: ops.concat_and_cache_mla(LATENTS, ROPES[:, :32], FP8_CACHE, SLOT, "fp8", ONE),
            ValueError,
            "^kv_c and k_pe must be 512 and 64 wide",
        ),
        (
            lambda: ops.cp_gather_cache(FP8_CACHE, ROPES, SLOT[None], torch.tensor([0, 1]), 1),
            TypeError,
            "^dst must be uint8 like src_cache, got float32$",
        ),
        (
            lambda: ops.cp_gather_cache(FP8_CACHE[:, 0], FP8_CACHE[0], SLOT[None], torch.tensor([0, 1]), 1),
            ValueError,
            "^src_cache must have more than 2 axes",
        ),
        (
            lambda: ops.cp_gather_cache(FP8_CACHE, FP8_CACHE[0], SLOT[None], torch.tensor([0, 1]), 2),
            ValueError,
            "^block_table must have the 2 rows of batch_size, got 1$",
        ),
        (
            lambda: ops.cp_gather_and_upconvert_fp8_kv_cache(
                FP8_CACHE, ROPES, SLOT[None], SLOT, 1, host_cache=FP8_CACHE
            ),
            ValueError,
            "^host_cache must be None: rows on the host are not supported$",
        ),
        (
            lambda: ops.reshape_and_cache(KEYS, KEYS, KEYS, KEYS, SLOT, "auto", ONE, ONE, interleaved_v=True),
            ValueError,
            "^interleaved_v must be False: the value layout of AMD's kernels is not supported$",
        ),
        (
            lambda: ops.triton_reshape_and_cache_flash(KEYS, KEYS, KEYS, KEYS, SLOT, "auto", ONE, ONE, 8),
            ValueError,
            "^interleaved_v_pack_factor must be 0: .*, got 8$",
        ),
        (
            lambda: ops.cp_gather_and_upconvert_fp8_kv_cache(FP8_CACHE, ROPES, SLOT[None], SLOT, -1),
            ValueError,
            "^batch_size must be at least 0, got -1$",
        ),
        (
            lambda: ops.gather_and_maybe_dequant_cache(
                FP8_CACHE, torch.zeros(2, 576), SLOT[None], torch.tensor([0, 1]), SLOT, -1, "fp8", ONE
            ),
            ValueError,
            "^num_tokens must be at least 0, got -1$",
        ),
        (
            lambda: ops.top_k_per_row_decode(LOGITS, 1, SLOT, INDICES, 2, 8, 1, 4),
            ValueError,
            "^logits must have the 2 rows of num_rows, got 1$",
        ),
        (
            lambda: ops.concat_mla_q(LATENTS[None], ROPES[None], MISSING),
            TypeError,
            "^q_out must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.persistent_topk(LOGITS, SLOT, MISSING, MISSING, 4, 8),
            TypeError,
            "^output must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.merge_attn_states(MISSING, ROPES[None], LOGITS[:, :1], ROPES[None], LOGITS[:, :1]),
            TypeError,
            "^output must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.unified_attention(
                *(KEYS[0], KEYS, KEYS, MISSING, torch.tensor([0, 1]), 1, SLOT, 1, 1.0, True, (-1, -1), SLOT[None]),
                *(0.0, None, None, None),
            ),
            TypeError,
            "^out must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.unified_attention(
                *(KEYS[0], KEYS, KEYS, KEYS[0], torch.tensor([0, 1]), 1, SLOT, 1, 1.0, True, MISSING, SLOT[None]),
                *(0.0, None, None, None),
            ),
            TypeError,
            "^window_size must be of type Sequence, got NoneType$",
        ),
        (
            lambda: ops.triton_reshape_and_cache_flash_per_token_head_quant(
                KEYS[0], KEYS[0], KEYS.char(), KEYS.char(), MISSING, MISSING, SLOT, None
            ),
            TypeError,
            "^k_scale_cache must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.triton_reshape_and_cache_flash_per_token_head_quant(
                KEYS[0], KEYS[0], KEYS.char(), KEYS.char(), torch.ones(1), torch.ones(1), SLOT, None
            ),
            ValueError,
            r"^k_scale_cache must have 3 axes, got shape \[1\]$",
        ),
        (
            lambda: ops.cp_gather_indexer_k_quant_cache(
                FP8_CACHE[..., :132].contiguous(),
                torch.zeros(2, 128, dtype=torch.uint8),
                torch.zeros(9, dtype=torch.uint8)[1:].view(2, 4),
                SLOT[None],
                torch.tensor([0, 2]),
            ),
            ValueError,
            "^dst_scale must begin at a multiple of 4 bytes, got offset 1$",
        ),
        (
            lambda: ops.cp_gather_indexer_k_quant_cache(
                FP8_CACHE[..., :132].contiguous(),
                torch.zeros((), dtype=torch.uint8),
                torch.zeros(2, 4, dtype=torch.uint8),
                SLOT[None],
                torch.tensor([0, 2]),
            ),
            ValueError,
            r"^dst_k must be contiguous with an axis of rows, got strides \(\)$",
        ),
        (
            lambda: ops.indexer_k_quant_and_cache(LATENTS, FP8_CACHE, SLOT, 128, "ue8m0"),
            ValueError,
            "^quant_block_size must be k's head dim 512, one scale a token, got 128$",
        ),
        (
            lambda: ops.indexer_k_quant_and_cache(LATENTS[:, :128], FP8_CACHE[..., :132], SLOT, 128, "mxfp8"),
            ValueError,
            "^kv_cache_dtype must be 'ue8m0' or an fp8 name with float32 scales, got 'mxfp8'$",
        ),
        (
            lambda: ops.cp_gather_indexer_k_quant_cache(
                FP8_CACHE[..., :132],
                FP8_CACHE[0, :, :128].contiguous(),
                torch.zeros(2),
                SLOT[None],
                torch.zeros(3).int(),
            ),
            ValueError,
            "^block_table must have the 2 rows of cu_seq_lens, got 1$",
        ),
        (
            lambda: ops.top_k_per_row_prefill(LOGITS, SLOT, SLOT, INDICES, 1, 9, 1, 4),
            ValueError,
            r"^stride0 and stride1 must be logits' \(8, 1\), got 9 and 1$",
        ),
        (
            lambda: ops.persistent_topk(LOGITS, torch.tensor([1, 2]), INDICES, None, 4, 8),
            ValueError,
            r"^lengths must have one element for each of the 1 rows of logits, got \[2\]$",
        ),
        (
            lambda: ops.triton_convert_req_index_to_global_index(SLOT, SLOT[None], INDICES),
            ValueError,
            r"^token_indices must have shape \[T, 2048\] \(NUM_TOPK_TOKENS\), got \[1, 4\]$",
        ),
        (
            lambda: ops.triton_convert_req_index_to_global_index(
                SLOT, SLOT[None], INDICES, NUM_TOPK_TOKENS=4, BLOCK_STRIDE_ROWS=63
            ),
            ValueError,
            "^BLOCK_STRIDE_ROWS must be BLOCK_SIZE 64 or more, got 63$",
        ),
        (
            lambda: ops.triton_convert_req_index_to_global_index(
                SLOT, SLOT[None], INDICES, NUM_TOPK_TOKENS=4, valid_counts_out=SLOT
            ),
            ValueError,
            "^valid_counts_out needs return_valid_counts=True, got False$",
        ),
        (
            lambda: ops.triton_convert_req_index_to_global_index(
                SLOT, SLOT[None], INDICES, NUM_TOPK_TOKENS=4, HAS_PREFILL_WORKSPACE=True
            ),
            TypeError,
            "^prefill_workspace_request_ids must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.triton_convert_req_index_to_global_index(
                *(SLOT, SLOT[None], INDICES, 64, 4, 128, True, SLOT, SLOT),
                dcp_size=2,
                cp_kv_cache_interleave_size=0,
            ),
            ValueError,
            "^cp_kv_cache_interleave_size must be at least 1, got 0$",
        ),
        (
            lambda: ops.triton_convert_req_index_to_global_index(
                SLOT, MISSING, INDICES, NUM_TOPK_TOKENS=4, BLOCK_STRIDE_ROWS=80
            ),
            TypeError,
            "^block_table must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.indexer_k_quant_and_cache(LATENTS[:, :128], FP8_CACHE, MISSING, 128, "ue8m0"),
            TypeError,
            "^slot_mapping must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.top_k_per_row_decode(LOGITS, 1, MISSING, INDICES, 1, 8, 1, 4),
            TypeError,
            "^seq_lens must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.vit_triton_attn_wrapper(MISSING, KEYS, KEYS, 1),
            TypeError,
            "^q must be a tensor, got NoneType$",
        ),
        (
            lambda: ops.vit_torch_sdpa_wrapper(KEYS, KEYS[0], KEYS),
            ValueError,
            r"^k must have shape \[b, s, h, d\], got \[1, 1, 16\]$",
        ),
        (
            lambda: ops.swap_blocks(LOGITS, LOGITS, 24, torch.tensor([[0, 0]])),
            ValueError,
            "^block_size_in_bytes must divide the 32 bytes of src, got 24$",
        ),
        (
            lambda: ops.swap_blocks(LATENTS[:, ::2], LOGITS, 32, torch.tensor([[0, 0]])),
            ValueError,
            "^src must be dense in memory",
        ),
        (
            lambda: ops.swap_blocks(LOGITS, torch.zeros(1, 8), 32, torch.tensor([[0, 1]])),
            ValueError,
            r"^block_mapping\[:, 1\] must be pages from 0 to 0, got 1$",
        ),
    ],
)
def test_errors_name_vllms_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


WANTED = {"NUM_TOPK_TOKENS": 4, "BLOCK_STRIDE_ROWS": 80, "dcp_size": 2, "idx_mapping": SLOT}
WORKSPACE = {
    "HAS_PREFILL_WORKSPACE": True,
    "prefill_workspace_request_ids": SLOT,
    "prefill_workspace_starts": SLOT,
    "prefill_workspace_rank_stride": 3,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"req_id": MISSING}, TypeError, "^req_id must be a tensor, got NoneType$"),
        ({"req_id": SLOT.float()}, TypeError, "^req_id must be int32 or int64, got float32$"),
        ({"block_table": MISSING}, TypeError, "^block_table must be a tensor, got NoneType$"),
        ({"token_indices": INDICES.float()}, TypeError, "^token_indices must be int32 or int64, got float32$"),
        ({"BLOCK_SIZE": "64"}, TypeError, "^BLOCK_SIZE must be an int, got str$"),
        ({"out": INDICES.tolist()}, TypeError, "^out must be a tensor, got list$"),
        ({"return_valid_counts": 1}, TypeError, "^return_valid_counts must be True or False, got 1$"),
        ({"dcp_size": 0}, ValueError, "^dcp_size must be at least 1, got 0$"),
        ({"dcp_rank": 2}, ValueError, "^dcp_rank must be below dcp_size 2, got 2$"),
        ({"cp_kv_cache_interleave_size": 0}, ValueError, "^cp_kv_cache_interleave_size must be at least 1, got 0$"),
        (
            {"prefill_workspace_request_ids": SLOT[None]},
            ValueError,
            r"^prefill_workspace_request_ids must have shape \[1\] with no empty axis, got \[1, 1\]$",
        ),
        (
            {"prefill_workspace_rank_stride": -1},
            ValueError,
            "^prefill_workspace_rank_stride must be at least 0, got -1$",
        ),
    ],
)
def test_errors_of_slots_name_vllms_arguments(change, error, message):
    arguments: dict[str, Any] = {"req_id": SLOT, "block_table": SLOT[None], "token_indices": INDICES}
    arguments |= WANTED | WORKSPACE
    ops.triton_convert_req_index_to_global_index(**arguments)
    with pytest.raises(error, match=message):
        ops.triton_convert_req_index_to_global_index(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_descale": torch.ones(0)}, r"^q_descale must have at least one element, got shape \[0\]$"),
        ({"k_descale": torch.ones(0, 1)}, r"^k_descale must have at least one element, got shape \[0, 1\]$"),
        ({"v_descale": torch.ones(1, 0)}, r"^v_descale must have at least one element, got shape \[1, 0\]$"),
    ],
)
def test_unified_attention_takes_one_scale(change, message):
    q, cache = KEYS[0].to(torch.float8_e4m3fn), KEYS.to(torch.float8_e4m3fn)
    starts, window = torch.tensor([0, 1]), (-1, -1)
    scales: dict[str, Any] = {"q_descale": torch.ones(1), "k_descale": torch.ones(1, 1), "v_descale": torch.ones(1, 1)}
    arguments = (q, cache, cache, KEYS[0].bfloat16(), starts, 1, SLOT, 1, 1.0, True, window, SLOT[None], 0.0)
    ops.unified_attention(*arguments, **scales)
    with pytest.raises(ValueError, match=message):
        ops.unified_attention(*arguments, **scales | change)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ops.indexer_k_quant_and_cache(LATENTS[:, :128], FP8_CACHE, ONE, 128, "ue8m0"),
            TypeError,
            "^slot_mapping must be int32 or int64, got float32$",
        ),
        (lambda: ops.indexer_k_quant_and_cache(MISSING, FP8_CACHE, SLOT, 128, "ue8m0"), TypeError, "^k must be a tens"),
        (lambda: ops.persistent_topk(ONE, SLOT, INDICES, None, 4, 8), ValueError, r"^logits must have shape \[rows, "),
        (
            lambda: ops.top_k_per_row_prefill(LOGITS, SLOT, SLOT, INDICES, 1, 8, 1, MISSING),
            TypeError,
            "^topk_tokens must be an int, got NoneType$",
        ),
    ],
)
def test_errors_of_the_indexer_name_vllms_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
