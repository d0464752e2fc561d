"""Calls of the Hopper kernel of sparse decode, as its launcher launches them, without the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import attention_calls
from support.attention_calls import Recorded
from support.compile import Launch, Recorder

from flashlatte.ops.sparse_decode.hopper import launch
from flashlatte.ops.sparse_decode.reference import SparseDecodeParams
from flashlatte.runtime import machine
from flashlatte.split_kv import combine, fp24_combine

KERNEL = launch.kernel
CLUSTER_KERNEL = launch.cluster_kernel
COMBINE = combine.combine_kernel
COMBINE_FP24 = fp24_combine.combine_fp24_kernel

LENGTHS: dict[str, Any] = {"extra_topk": 512, "lengths": True}
CALLS: dict[str, dict[str, Any]] = {
    "v32, whole items": {"batch": 128},
    "v32, ranges": LENGTHS,
    "v32, equal splits": {},
    "v32, ranges of one length": {"batch": 74, "s_q": 1},
    "v32, alone": {"batch": 128, "heads": 64},
    "v32, equal splits, alone": {"heads": 16},
    "v32, blocks": {"batch": 2, "s_q": 1, "heads": 16},
    "v32_no_rope, ranges": {"form": "v32_no_rope", **LENGTHS},
    "v32_no_rope, ranges, alone": {"form": "v32_no_rope", "heads": 192, **LENGTHS},
    "v32_no_rope, blocks": {"form": "v32_no_rope", "batch": 2, "s_q": 1, "heads": 16},
    "model1, ranges": {"form": "model1", **LENGTHS},
    "model1, ranges, alone": {"form": "model1", "heads": 192, **LENGTHS},
    "model1, odd pages": {"form": "model1", "page_size": 61, "index_dtype": torch.int64, "out_pad": 1, **LENGTHS},
    "model1, blocks": {"form": "model1", "batch": 2, "heads": 64, "topk": 128, "extra_topk": 512},
    "v41, ranges": {"form": "v41", **LENGTHS},
    "v41, ranges, alone": {"form": "v41", "heads": 192, **LENGTHS},
    "v41, blocks": {"form": "v41", "batch": 2, "heads": 64, "topk": 128, "extra_topk": 512},
    "v41_fp4, ranges": {"form": "v41_fp4", **LENGTHS},
    "v41_fp4, ranges, alone": {"form": "v41_fp4", "heads": 192, **LENGTHS},
    "v41_fp4, blocks": {"form": "v41_fp4", "batch": 2, "heads": 64, "topk": 128, "extra_topk": 512},
    "bf16 576, whole items": {"form": "bf16", "batch": 128},
    "v32, whole items, query parts": {"batch": 128, "split_q": True},
    "v32, ranges, query parts": {"split_q": True, **LENGTHS},
    "v32, equal splits, alone, query parts": {"heads": 16, "split_q": True},
    "v32, blocks, query parts": {"batch": 2, "s_q": 1, "heads": 16, "split_q": True},
    "bf16 576, whole items, query parts": {"form": "bf16", "batch": 128, "split_q": True},
    "bf16 512, ranges": {"form": "bf16 512", **LENGTHS},
}


def decode(form: str = "v32", **call: Any) -> None:
    """A call of the implementation with tensors of arbitrary contents: ``attention_calls.sparse_decode``.

    ``form``: a format's name, and the width of its rows if that varies: "bf16 512".
    """

    def run(operation: str, backend: str, params: SparseDecodeParams, *, arch: int | None) -> list[Recorded]:
        launch.sparse_decode(params)
        return []

    name, _, width = form.partition(" ")
    attention_calls.sparse_decode(run, "hopper", form=name, head_dim=int(width or 576), **call)


class Recording:
    """Calls the launcher and returns its launches; ``combines`` are those of the combine kernel for equal splits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kernels, self._combine = [Recorder(KERNEL), Recorder(CLUSTER_KERNEL)], Recorder(COMBINE_FP24)
        monkeypatch.setattr(launch, "kernel", self._kernels[False])
        monkeypatch.setattr(launch, "cluster_kernel", self._kernels[True])
        monkeypatch.setattr(launch, "clusters_fill", lambda *_: True)
        monkeypatch.setattr(fp24_combine, "combine_fp24_kernel", self._combine)
        monkeypatch.setattr(combine, "combine_kernel", Recorder(COMBINE))
        monkeypatch.setattr(machine, "num_sms", lambda _: 132)

    def __call__(self, **call: Any) -> Launch:
        for recorder in (*self._kernels, self._combine):
            recorder.launches.clear()
        decode(**call)
        (only,) = (launched for recorder in self._kernels for launched in recorder.launches)
        assert bool(self._kernels[True].launches) == only.arguments["CONFIG"].cluster
        return only

    def combines(self) -> list[Launch]:
        return list(self._combine.launches)


def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    return Recording(monkeypatch)
