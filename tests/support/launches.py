"""Recorded launches of operations."""

from __future__ import annotations

import importlib
from typing import Any

from support.calls import CALLS
from support.recording import Recorded, Recording

MODULES = {
    "dense_prefill_backward": "dense_prefill",
    "latent_rows": "norm_rope",
    "mhc_post": "mhc",
    "mhc_pre": "mhc",
    "rotate_heads": "norm_rope",
    "sparse_attention_backward": "sparse_attention",
    "unpack_seq": "pack_seq",
}
# Kernels other than the attention kernel: they merge, clear and convert rows.
OTHERS = (
    *("combine", "find_tiles", "clear", "merge_even", "prepare", "finish"),
    *("row_sums", "rotate_queries", "sum_by_key", "loss_kernel"),
)


def launches(record: Recording, operation: str, backend: str, **call: Any) -> list[Recorded]:
    importlib.import_module(f"flashlatte.ops.{MODULES.get(operation, operation)}")
    return CALLS[operation](record, backend, **call)


def main_kernels(found: list[Recorded]) -> list[Recorded]:
    return [one for one in found if not any(other in one.name for other in OTHERS)]
