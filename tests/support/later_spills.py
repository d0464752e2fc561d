"""Registers that Triton 3.8 and 3.9 want of what 3.6 and 3.7 fit in: spill instructions that are known, and no more.

What comes first in portable dense decode: of the PTX that the later LLVM writes, ptxas, also the earlier one, computes
descriptors in every thread that it took from uniform registers before. What the spills cost has not been timed.
"""

from __future__ import annotations

import triton

# By kernel, or by operation and what is looked at: with 3.8, with 3.9; None where as many as before are enough.
_SPILLS: dict[str, tuple[int | None, int | None]] = {
    "dense_decode hopper 90, batch 128": (None, 1),
    "dense_decode casts e4m3, many requests": (None, 2),
    "dense_decode casts e4m3, many requests, pages of 16": (4, None),
    "dense_prefill_backward hopper 90": (None, 23),
    "index_logits loop, 8 heads of 64, bf16 logits": (6, None),
    "index_logits, 8 heads of 64, bf16 logits": (38, None),
    "sparse_decode producer v32, ranges": (9, 12),
    "sparse_decode producer model1, ranges": (2, 13),
    "sparse_decode producer model1, ranges, alone": (2, None),
    "sparse_prefill hopper 90, head_dim 512": (4, None),
    "dense_decode portable 90, heads 128": (46, 62),
    "dense_decode portable 90, heads 32, cache_dtype float8_e4m3fn": (21, None),
    "dense_decode portable 90, heads 128, cache_dtype float8_e4m3fn": (21, None),
    "sparse_decode portable 90, form model1, extra_topk 0": (154, None),
    "sparse_decode portable 90, form model1, extra_topk 1024": (154, None),
    "sparse_decode portable 90, form bf16, extra_topk 0": (43, None),
    "sparse_decode portable 90, form bf16, extra_topk 1024": (44, None),
    "dense_prefill portable 90": (None, 1),
    "dense_prefill_backward portable 90": (73, None),
    "dense_prefill_backward portable 90, head_dim 128": (12, None),
    "paged_attention portable 90, tokens 2048": (28, 27),
}
_VERSION = tuple(int(number) for number in triton.__version__.split(".")[:2])


def allowed(name: str, spills: int) -> int:
    """How many spill instructions may be there, with this Triton, where earlier ones have ``spills`` at most."""
    with_3_8, with_3_9 = _SPILLS.get(name, (None, None))
    known = {(3, 8): with_3_8, (3, 9): with_3_9}.get(_VERSION)
    return spills if known is None else known
