"""FlashMLA's decode in a CUDA graph captured as SGLang does: lengths of 1, and a block table sliced to one column."""

from __future__ import annotations

import math

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE

from flashlatte import flash_mla
from flashlatte.testing import oracles
from flashlatte.testing.cases import DenseDecodeCase
from flashlatte.testing.compare import DECODE_LSE, DENSE_DECODE_OUT, assert_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("batch", "s_q", "h_q"), [(1, 1, 128), (9, 1, 16), (9, 3, 16), (128, 1, 128)])
def test_replays_read_further_columns(batch: int, s_q: int, h_q: int, cache_dtype: torch.dtype | None) -> None:
    inputs = DenseDecodeCase(batch, s_q, 2000, h_q, varlen=True, causal=True, cache_dtype=cache_dtype).inputs(DEVICE)
    table, lengths = inputs["block_table"], inputs["cache_seqlens"].clamp(min=s_q)
    pages = table.shape[1]
    buffer, seq_lens = table.new_ones(batch + 3, pages + 5), torch.full_like(lengths, s_q, dtype=torch.int64)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return flash_mla.flash_mla_with_kvcache(
            inputs["q"],
            inputs["k_cache"],
            buffer[:batch, :1],
            seq_lens.to(torch.int32),
            512,
            flash_mla.FlashMLASchedMeta(),
            softmax_scale=inputs["softmax_scale"],
            causal=True,
            descale_k=inputs.get("k_scale"),
        )

    replay, (out, lse) = harness.captured(call)
    order = torch.arange(batch - 1, -1, -1, device=DEVICE)
    for new_table, new_lengths in (
        (table, lengths),
        (table, (lengths // 3).clamp(min=s_q)),
        (table[order], lengths[order]),
    ):
        buffer[:batch, :pages] = new_table
        seq_lens.copy_(new_lengths)
        replay()
        changed = inputs | {"block_table": new_table, "cache_seqlens": new_lengths}
        expected_out, expected_lse = oracles.dense_decode(**changed, empty_lse=math.inf)
        assert_close(out, expected_out, DENSE_DECODE_OUT)
        assert_close(lse, expected_lse, DECODE_LSE)
