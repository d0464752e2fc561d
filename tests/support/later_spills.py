"""Known additional spill instructions with Triton 3.8 and 3.9; also copies between registers in one loop, and bytes of
code of two alternating kernels.

Their main cause in portable dense decode: from the PTX of the later LLVM, ptxas (also the earlier one) computes
descriptors in every thread that were in uniform registers before. The cost of the spills has not been measured.
"""

from __future__ import annotations

import triton

# By kernel, or by operation and property: limit with 3.8, and with 3.9; None: the limit of earlier versions.
_SPILLS: dict[str, tuple[int | None, int | None]] = {
    "compress portable 90, form bf16, ratio 4": (None, 20),
    "compress portable 90, form index_fp8, ratio 4": (None, 8),
    "compress portable 90, form index_mxfp4, ratio 4": (None, 8),
    "compress portable 90, form model1, ratio 4": (None, 8),
    "dense_decode casts e4m3": (None, 2),
    "dense_decode casts e4m3, many requests": (None, 2),
    "dense_decode casts e4m3, many requests, pages of 16": (4, 10),
    "dense_decode few rows 512, pages of 16": (None, 27),
    "dense_decode few rows 576": (None, 18),
    "dense_decode few rows batch invariant, float16": (None, 15),
    "dense_decode hopper 90": (None, 1),
    "dense_decode hopper 90, batch 128": (None, 1),
    "dense_decode hopper 90, batch 128, page_size 16": (None, 1),
    "dense_decode hopper 90, batch_invariant True, out_pad 1": (None, 1),
    "dense_decode hopper 90, cache_dtype float8_e4m3fn": (None, 1),
    "dense_decode hopper 90, cache_dtype float8_e4m3fn, head_dim 512, heads 126": (None, 8),
    "dense_decode hopper 90, dtype float16, batch 70, heads 8192": (None, 1),
    "dense_decode hopper 90, heads 126": (None, 1),
    "dense_decode hopper 90, page_size 48": (None, 1),
    "dense_decode portable 90, heads 128": (44, 52),
    "dense_decode portable 90, heads 128, cache_dtype float8_e4m3fn": (21, 19),
    "dense_decode portable 90, heads 32, cache_dtype float8_e4m3fn": (21, 19),
    "dense_prefill copies, bf16 72": (None, 34),
    "dense_prefill hopper 90": (None, 1),
    "dense_prefill hopper 90, dtype float16, out_pad 1": (None, 1),
    "dense_prefill hopper 90, head_dim 128": (None, 1),
    "dense_prefill portable 90": (None, 1),
    "dense_prefill_backward hopper 90": (None, 23),
    "dense_prefill_backward hopper 90, dtype float16, deterministic True, dlse True": (None, 21),
    "dense_prefill_backward hopper 90, head_dim 128": (None, 1),
    "dense_prefill_backward hopper 90, head_dim 128, deterministic True": (None, 1),
    "dense_prefill_backward hopper 90, pad 8": (None, 23),
    "dense_prefill_backward portable 90": (73, 99),
    "dense_prefill_backward portable 90, head_dim 128": (12, 18),
    "index_logits loop, 8 heads of 64, bf16 logits": (6, None),
    "index_logits, 8 heads of 64, bf16 logits": (38, None),
    "indexer_loss hopper 90, head_dim 512, weights_dtype bfloat16, index_dtype int64": (None, 1),
    "indexer_loss hopper 90, lengths True": (None, 1),
    "indexer_loss hopper 90, topk None": (None, 1),
    "paged_attention portable 90, tokens 2048, in_pieces True": (2, None),
    "sparse_attention_backward hopper 90, heads 64, deterministic True, sinks False": (None, 2),
    "sparse_attention_backward hopper 90, lengths True": (None, 1),
    "sparse_attention_backward portable 90, head_dim 512, deterministic True": (None, 236),
    "sparse_attention_backward portable 90, lengths True": (None, 254),
    "sparse_decode bytes v32, equal splits, alone": (None, 113_152),
    "sparse_decode portable 90, form bf16, extra_topk 0": (42, 9),
    "sparse_decode portable 90, form bf16, extra_topk 1024": (42, 61),
    "sparse_decode portable 90, form model1, heads 32": (None, 11),
    "sparse_decode producer model1, ranges": (5, 15),
    "sparse_decode producer model1, ranges, alone": (2, 19),
    "sparse_decode producer v32, alone": (None, 1),
    "sparse_decode producer v32, ranges": (10, 13),
    "sparse_decode producer v32, ranges of one length": (None, 3),
    "sparse_decode producer v41, ranges": (None, 4),
    "sparse_decode producer v41_fp4, ranges": (2, 5),
    "sparse_prefill hopper 90, head_dim 512": (4, None),
    "sparse path 80, dense_decode, bf16, 128 heads": (28, None),
    "sparse path 80, sparse_decode, model1, 64 heads": (22, None),
    "sparse path 80, sparse_decode, v32, 128 heads": (26, 87),
    "sparse path 86, topk": (None, 1),
    "sparse path 89, topk": (None, 1),
    "sparse path 90, dense_decode, bf16, 128 heads": (44, 52),
    "sparse path 90, sparse_decode, bf16, 128 heads": (41, 9),
    "sparse path 90, sparse_decode, model1, 64 heads": (None, 101),
    "sparse path 90, sparse_decode, v32, 128 heads": (24, 36),
    "sparse path 90, sparse_prefill, 128 heads": (None, 1),
    "sparse path 100, sparse_decode, model1, 64 heads": (11, 5),
    "sparse path 100, sparse_decode, v32, 128 heads": (5, 1),
}
_VERSION = ".".join(triton.__version__.split(".")[:2])


def allowed(name: str, spills: int) -> int:
    """The limit with this version of Triton, given the limit ``spills`` with 3.6 and 3.7."""
    with_3_8, with_3_9 = _SPILLS.get(name, (None, None))
    known = {"3.8": with_3_8, "3.9": with_3_9}.get(_VERSION)
    return spills if known is None else known
