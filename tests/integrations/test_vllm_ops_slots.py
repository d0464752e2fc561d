"""vLLM's conversion of selected token positions to slots, compared with slots computed here."""

from typing import Any

import numpy as np
import pytest
import torch

from flashlatte.integrations.vllm import ops


def test_selected_tokens_become_slots():
    table = torch.tensor([[4, 2], [7, 0]], dtype=torch.int32)
    chosen = torch.tensor([[5, -1, 63, 200], [0, 64, 127, -1]], dtype=torch.int32)
    requests = torch.tensor([1, 0], dtype=torch.int32)
    expected = [[7 * 64 + 5, -1, 7 * 64 + 63, -1], [4 * 64, 2 * 64, 2 * 64 + 63, -1]]
    convert: Any = ops.triton_convert_req_index_to_global_index
    assert convert(requests, table, chosen, NUM_TOPK_TOKENS=4, BLOCK_N=4).tolist() == expected
    slots, counts = convert(requests, table, chosen, 64, 4, 4, return_valid_counts=True)
    assert slots.tolist() == [[7 * 64 + 5, 7 * 64 + 63, -1, -1], expected[1]]
    assert counts.tolist() == [2, 3]

    workspace = (torch.tensor([-1, 1], dtype=torch.int32), torch.tensor([0, 1000], dtype=torch.int32))
    assert convert(requests, table, chosen, 64, 4, 4, True, *workspace)[1].tolist() == [1000, 1064, 1127, -1]

    beyond = torch.tensor([[5, -1, 63, 200], [0, 64, 127, 128]], dtype=torch.int32)
    assert convert(requests, table, beyond, 64, 4, 4, True, *workspace)[1].tolist() == [1000, 1064, 1127, -1]

    filtered, counts = ops.triton_filter_and_convert_dcp_index(
        requests, table, chosen, 2, 1, NUM_TOPK_TOKENS=4, BLOCK_N=4, return_valid_counts=True
    )
    # Odd tokens are on rank 1, token t at position t // 2.
    assert filtered.tolist() == [[7 * 64 + 2, 7 * 64 + 31, -1, -1], [4 * 64 + 63, -1, -1, -1]]
    assert counts.tolist() == [2, 1]
    of_ranks: Any = ops.triton_filter_and_convert_dcp_index
    ranks = np.array([2, 1])
    assert of_ranks(requests, table, chosen, *ranks, NUM_TOPK_TOKENS=4).tolist() == filtered.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_selected_tokens_with_arguments_of_later_vllm_versions(dtype):
    """Gaps between pages, an index mapping, output buffers, and a workspace with the tokens of all ranks."""
    beyond = 2**31 // 80 + 1
    table = torch.tensor([[4, 2, 9], [7, 0, beyond]], dtype=torch.int32)
    chosen = torch.tensor([[5, -1, 70, 130], [0, 64, 190, -1]], dtype=dtype)
    requests, mapping = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    workspace, starts = torch.tensor([-1, 1], dtype=torch.int32), torch.tensor([0, 1000], dtype=torch.int32)
    convert: Any = ops.triton_convert_req_index_to_global_index

    def page(which, offset):
        return which * 80 + offset if which * 80 + offset <= torch.iinfo(dtype).max else -1

    # Pages of 64 every 80 rows. Slots of the last page of request 1 overflow int32.
    rows = [[page(7, 5), -1, page(0, 6), page(beyond, 2)], [page(4, 0), page(2, 0), page(9, 62), -1]]
    sizes: dict[str, Any] = {"BLOCK_SIZE": 64, "NUM_TOPK_TOKENS": 4, "BLOCK_N": 4}
    assert convert(requests, table, chosen, BLOCK_STRIDE_ROWS=80, **sizes).tolist() == rows
    assert convert(requests, table, chosen, BLOCK_STRIDE_ROWS=64, **sizes).equal(
        convert(requests, table, chosen, **sizes)
    )
    assert convert(1 - requests, table, chosen, BLOCK_STRIDE_ROWS=80, idx_mapping=mapping, **sizes).tolist() == rows

    out, counts_out = torch.empty_like(chosen), torch.empty(2, dtype=torch.int32)
    slots, counts = convert(
        requests,
        table,
        chosen,
        BLOCK_STRIDE_ROWS=80,
        return_valid_counts=True,
        out=out,
        valid_counts_out=counts_out,
        **sizes,
    )
    assert slots is out
    assert counts is counts_out
    valid = [[slot for slot in row if slot >= 0] for row in rows]
    assert slots.tolist() == [row + [-1] * (4 - len(row)) for row in valid]
    assert counts.tolist() == [len(row) for row in valid]

    # Interleave 3 on two ranks; the workspace begins with 500 rows of rank 0 and has no pages.
    over = {"dcp_size": 2, "dcp_rank": 1, "cp_kv_cache_interleave_size": 3}
    slots = convert(
        requests,
        table,
        chosen,
        64,
        4,
        4,
        True,
        workspace,
        starts,
        BLOCK_STRIDE_ROWS=80,
        prefill_workspace_rank_stride=500,
        **over,
    )
    # 5, 70 and 130 are rank 1's tokens 2, 34 and 64; 0 is rank 0's first, 64 and 190 rank 1's tokens 31 and 94.
    assert slots.tolist() == [[page(7, 2), -1, page(7, 34), page(0, 0)], [1000, 1531, 1594, -1]]

    filtered: Any = ops.triton_filter_and_convert_dcp_index(
        requests, table, chosen, 2, 1, 3, BLOCK_STRIDE_ROWS=80, compact_valid_to_front=False, **sizes
    )
    assert filtered.tolist() == [[page(7, 2), -1, page(7, 34), page(0, 0)], [-1, page(4, 31), page(2, 30), -1]]


def test_one_rank_compacts_where_it_counts():
    """As in vLLM, whose filter forwards the call to the conversion."""
    table, chosen = torch.tensor([[4]], dtype=torch.int32), torch.tensor([[-1, 5, 200, 7]], dtype=torch.int32)
    sizes: dict[str, Any] = {"NUM_TOPK_TOKENS": 4, "BLOCK_N": 4}
    requests = torch.tensor([0], dtype=torch.int32)
    kept: Any = ops.triton_filter_and_convert_dcp_index(requests, table, chosen, 1, 0, **sizes)
    assert kept.tolist() == [[-1, 261, -1, 263]]
    front, counts = ops.triton_filter_and_convert_dcp_index(
        requests, table, chosen, 1, 0, return_valid_counts=True, compact_valid_to_front=False, **sizes
    )
    assert front.tolist() == [[261, 263, -1, -1]]
    assert counts.tolist() == [2]
