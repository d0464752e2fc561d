"""Compile tests of the Hopper forward, without a GPU: recorded launches are compiled to cubins."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from support.compile import Launch, Recorder
from support.loops import loops
from support.marks import mostly_full

from flashlatte.runtime import machine

triton = pytest.importorskip("triton")

from support import compile as support  # noqa: E402
from support.later_spills import allowed  # noqa: E402

from flashlatte.ops.dense_prefill.hopper.forward import launch, tiles  # noqa: E402
from flashlatte.ops.dense_prefill.reference import DensePrefillParams  # noqa: E402

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

KERNEL = launch.dense_prefill_forward_kernel
UNLIMITED = 2**31 - 1
NUMBERS: dict[str, Any] = {
    "max_seqlen_k": 64,
    "softmax_scale": 0.1,
    "window_left": 9,
    "window_right": 0,
    "empty_lse": math.inf,
}

CALLS: dict[str, dict[str, Any]] = {
    "bf16 192": {},
    "bf16 128": {"head_dim": 128},
    "bf16 64": {"head_dim": 64, "head_dim_v": 64},
    "bf16 72": {"head_dim": 72, "head_dim_v": 72},
    "bf16 256": {"head_dim": 256, "head_dim_v": 256},
    "fp16 192, misaligned out": {"dtype": torch.float16, "out_pad": 1, "index_dtype": torch.int64},
}


def prefill(
    tokens: int = 512,
    heads: int = 8,
    heads_kv: int = 8,
    head_dim: int = 192,
    head_dim_v: int = 128,
    requests: int = 2,
    max_seqlen: int = 512,
    window: tuple[int, int] = (UNLIMITED, 0),
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int32,
    q_pad: int = 0,
    out_pad: int = 0,
) -> None:
    """A call of the implementation with tensors of arbitrary contents."""
    cu_seqlens = torch.zeros(requests + 1, dtype=index_dtype)
    launch.forward(
        DensePrefillParams(
            torch.empty(tokens, heads, head_dim + q_pad, dtype=dtype)[..., :head_dim],
            torch.empty(tokens, heads_kv, head_dim, dtype=dtype),
            torch.empty(tokens, heads_kv, head_dim_v, dtype=dtype),
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            head_dim**-0.5,
            *window,
            empty_lse=-math.inf,
        ),
        torch.empty(tokens, heads, head_dim_v + out_pad, dtype=dtype)[..., :head_dim_v],
        torch.empty(heads, tokens).t(),
    )


@pytest.fixture
def record(monkeypatch):
    """Calls the launcher and returns its launches."""
    recorder = Recorder(KERNEL)
    monkeypatch.setattr(launch, "dense_prefill_forward_kernel", recorder)
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)

    def record(**call: Any) -> Launch:
        recorder.launches.clear()
        prefill(**call)
        return recorder.launches[0]

    return record


@pytest.fixture
def compiled(record):
    """The machine code of a call."""
    return lambda name: support.compile_gluon(KERNEL, record(**CALLS[name]))


def _main_loops(sass: str) -> list[list[str]]:
    """The instructions of the main loop of each consumer: the two shortest loops with products and a softmax."""
    expected = ("HGMMA", "MUFU.EX2")
    return sorted((loop for loop in loops(sass) if all(any(op in one for one in loop) for op in expected)), key=len)[:2]


# Of each call, keys of a block, and products of the loop: 16 columns of keys and 16 values at a time, the values in two
# tiles where 72 columns are 64 and 16.
LOOPS = {
    "bf16 192": (128, 12 + 8),
    "bf16 128": (128, 8 + 8),
    "bf16 64": (128, 4 + 8),
    "bf16 72": (128, 5 + 2 * 8),
    "bf16 256": (64, 16 + 4),
}


@pytest.mark.parametrize("name", mostly_full(LOOPS, "bf16 192"))
def test_main_loop(compiled, name):
    keys, products = LOOPS[name]
    for loop in _main_loops(compiled(name).sass):
        count = Counter(re.sub(r"^@!?U?P\w+\s+", "", one).split()[0].split(".")[0] for one in loop)
        assert count["STL"] == count["LDL"] == 0
        assert 0 < count["HGMMA"] <= products
        # Output and P stay in registers.
        copies = count["MOV"] + sum("IMAD.MOV" in one for one in loop)
        assert copies <= allowed(f"dense_prefill copies, {name}", 4)
        # P, and alpha of two rows.
        assert count["MUFU"] <= keys // 2 + 2
        # The softmax overlaps with the second product: the wait for it comes after nearly all exponentials.
        awaited = next(index for index, one in enumerate(loop) if "WARPGROUP.DEPBAR.LE gsb0, 0x0" in one)
        assert sum("MUFU.EX2" in one for one in loop[:awaited]) >= keys // 2
        # P is rounded before the scores that reuse its registers.
        rounded = [index for index, one in enumerate(loop) if "F2FP" in one]
        started = next(index for index, one in enumerate(loop) if "HGMMA" in one)
        assert rounded
        assert max(rounded) < started


def test_tile_widths_of_every_head_dim():
    for head_dim in range(64, 256 + 1, 8):
        keys = tiles.num_chunks(head_dim) * 64 + tiles.rest_of(head_dim)
        values = tiles.first_columns(head_dim) + tiles.second_columns(head_dim)
        assert 0 <= keys - head_dim < 32
        assert 0 <= values - head_dim < 64
    assert [tiles.rest_of(head_dim) for head_dim in (64, 72, 80, 96, 104, 128, 192)] == [0, 16, 16, 32, 0, 0, 0]


@pytest.mark.parametrize(
    ("head_dim", "boxes", "rests"),
    [
        (128, [[64, 1, 64], [128, 1, 64], [128, 1, 128]], [None, None, None]),
        (72, [[64, 1, 64], [128, 1, 64], [128, 1, 64]], [[64, 1, 16], [128, 1, 16], [128, 1, 16]]),
        (192, [[64, 1, 64], [64, 1, 64], [64, 1, 128]], [None, None, [64, 1, 64]]),
    ],
)
def test_boxes_of_rows(record, head_dim, boxes, rests):
    arguments = record(head_dim=head_dim, head_dim_v=head_dim).arguments
    assert [list(arguments[f"inputs_{name}"].block_shape) for name in "qkv"] == boxes
    found = [arguments[f"inputs_{name}_rest"] for name in "qkv"]
    assert [one if one is None else list(one.block_shape) for one in found] == rests


def test_stores_are_16_bytes_wide(compiled):
    widths = Counter(re.findall(r"\bSTG\.E(\.\w+)?", compiled("bf16 192").sass))
    # 64 x 128 elements in 128 threads per consumer, and two rows of lse.
    assert widths[".128"] >= 2 * 64 * 128 // (8 * 128)
    assert set(widths) <= {".128", ""}
    assert widths[""] <= 4


@pytest.mark.parametrize(("tokens", "heads", "requests", "grid"), [(1, 1, 1, 4), (128, 2, 3, 12), (4096, 128, 1, 132)])
def test_grid_is_no_larger_than_the_work(record, tokens, heads, requests, grid):
    # A block per 128 queries, one per request, and for the tokens before and after all requests.
    assert record(tokens=tokens, heads=heads, heads_kv=1, requests=requests).grid == (grid,)


@pytest.mark.parametrize(
    ("heads", "group_kv", "max_seqlen_k", "together"),
    [
        (128, 1, 8192, 4),  # 5 MB of keys and values a head
        (128, 1, 512, 64),
        (128, 1, 128, 128),
        (128, 1, 1 << 20, 1),
        (32, 8, 8192, 32),
        (32, 8, 1 << 20, 8),  # query heads of a key head are never separated
        (7, 1, 8192, 1),
        (16, 16, 0, 16),
    ],
)
def test_concurrent_heads(heads, group_kv, max_seqlen_k, together):
    assert launch.concurrent_heads(heads, group_kv, max_seqlen_k, 192 + 128) == together
    assert heads % together == 0


def test_without_keys_nothing_is_launched(monkeypatch):
    recorder = Recorder(KERNEL)
    monkeypatch.setattr(launch, "dense_prefill_forward_kernel", recorder)
    q = torch.randn(5, 2, 128, dtype=torch.bfloat16)
    empty = q[:0]
    out, lse = torch.full_like(q, math.nan), torch.full((2, 5), math.nan).t()
    cu_seqlens = torch.zeros(2, dtype=torch.int32)
    params = DensePrefillParams(q, empty, empty, cu_seqlens, cu_seqlens, 0, 0.1, UNLIMITED, 0, math.inf)
    launch.forward(params, out, lse)
    assert not recorder.launches
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((5, 2), math.inf))


@pytest.mark.parametrize("misaligned", ["q", "k", "v"])
def test_a_misaligned_tensor_is_an_error(monkeypatch, misaligned):
    monkeypatch.setattr(launch, "dense_prefill_forward_kernel", Recorder(KERNEL))
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)
    aligned = torch.empty(64, 2, 128, dtype=torch.bfloat16)
    tensors = dict.fromkeys("qkv", aligned) | {misaligned: torch.empty(64, 2, 132, dtype=torch.bfloat16)[..., :128]}
    cu_seqlens = torch.zeros(2, dtype=torch.int32)
    params = DensePrefillParams(**tensors, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **NUMBERS)
    with pytest.raises(ValueError, match=rf"^{misaligned} must have rows that begin at multiples of 16 bytes"):
        launch.forward(params, aligned, torch.empty(2, 64).t())
