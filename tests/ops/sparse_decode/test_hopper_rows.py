"""The rows that Hopper's producers store in a tile, compiled and emulated, compared with the reference."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import pytest
import torch
from support.marks import mostly_full

from flashlatte import kv_cache
from flashlatte.runtime import machine

triton = pytest.importorskip("triton")

from support.emulator.global_memory import GlobalMemory  # noqa: E402
from support.emulator.machine import Machine  # noqa: E402
from support.emulator.program import parse  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from flashlatte.kernels.hopper import clusters  # noqa: E402
from flashlatte.kernels.hopper.mla_tiles import allocate_half  # noqa: E402
from flashlatte.kernels.hopper.ptx.clusters import shared_address  # noqa: E402
from flashlatte.kernels.hopper.word_layouts import words_of  # noqa: E402
from flashlatte.ops.sparse_decode.hopper import cluster_producer, launch, producer, rows  # noqa: E402
from flashlatte.ops.sparse_decode.hopper.schedule import SparseDecodeConfig  # noqa: E402
from flashlatte.runtime.gluon_compat import cta_barrier  # noqa: E402

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _fill_half(rows, tile, SIDE: gl.constexpr, CONFIG: gl.constexpr):
    """Half of a block by the producer of a single CTA, or rows 0 to 31 of it by that of a CTA in a cluster."""
    if CONFIG.cluster:
        block = cluster_producer._wait_block(cluster_producer._load_block(rows, CONFIG))
        scale = cluster_producer._first_scale(block, rows, CONFIG)
        block = cluster_producer._with_first_scale(block, scale)
        start = shared_address(0, False)
        addresses = clusters.addresses(
            clusters.ClusterAddresses(start, start, start, start), cluster_producer._BF16_PIECE
        )
        for piece in gl.static_range(cluster_producer._pieces(SIDE, CONFIG.format)):
            words = block.pieces[4 * SIDE + piece]
            pairs = cluster_producer._dequantize(words, block.scales, 4 * SIDE + piece, CONFIG)
            clusters.store(pairs, addresses, 0, piece)
    else:
        side = gl.to_tensor(SIDE)
        half = producer.wait_half(producer.load_half(rows, side, CONFIG), CONFIG)
        producer.fill(tile, producer.propagate_nan(half, rows, side, CONFIG), side, CONFIG)


@gluon.jit
def fill_kernel(
    k_cache,
    indices,
    out,
    page_stride,
    num_slots,
    page_size,
    page_magic,
    page_shift,
    SIDE: gl.constexpr,
    CONFIG: gl.constexpr,
):
    token = gl.arange(0, 64, rows.tokens_layout(False))
    selection = rows.CacheSelection(
        k_cache, page_stride, page_stride, num_slots, page_size, page_magic, page_shift, indices, 0, 0
    )
    selected = rows._locate(gl.load(indices + token), rows.in_bytes(selection), CONFIG)
    tile = allocate_half(gl.bfloat16)
    _fill_half(selected, tile, SIDE, CONFIG)
    cta_barrier()
    row = gl.arange(0, 64, gl.SliceLayout(1, _WORDS))[:, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, _WORDS))[None, :]
    gl.store(out + row * 128 + column, words_of(tile).load(_WORDS))


def half_of_rows(cache: torch.Tensor, layout: kv_cache.CacheFormat, indices: torch.Tensor, side: int, cluster: bool):
    """bf16 [64, 256]: half of the selected rows, in the tile of the compiled producer."""
    pages, page_size = cache.shape[:2]
    page_stride = cache.stride(0) * cache.element_size()
    address, alignment, flat = launch._address_of(
        0, pages, page_size, page_stride, cache.stride(1), "k_cache", layout.tiling
    )
    config = SparseDecodeConfig(
        launch._kind(layout), 128, layout.head_dim == 576, alignment, flat, 8, False, False, 0, 2, cluster
    )
    types = ("*u8", "*i32", "*i32", "i32", "i32", "i32", "i64", "i32", "constexpr", "constexpr")
    source = GluonASTSource(
        fill_kernel,
        dict(zip(fill_kernel.arg_names, types, strict=True)),
        {(8,): side, (9,): config},
        {(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    out = torch.full((64, 256), torch.nan, dtype=torch.bfloat16)
    storage = cache.as_strided((pages * page_stride,), (1,)).view(torch.uint8)
    memory = GlobalMemory()
    for tensor in (storage, indices, out):
        memory.add(tensor.data_ptr(), tensor.nbytes)
    begin = memory.address(storage.data_ptr())
    _, _, slots, _, magic, shift = address
    passed = (
        begin,
        *(memory.address(x.data_ptr()) for x in (indices, out)),
        page_stride,
        slots,
        page_size,
        magic,
        shift,
    )
    emulated = Machine(
        parse(compiled.asm["ptx"]), memory, compiled.metadata.shared, seed=0, late=True, finds_races=True
    )
    sizes = [size for _, size in emulated.program.parameters]
    # Triton's scratch memory comes last.
    values = (*passed, *[0] * (len(sizes) - len(passed)))
    emulated.parameters = {
        i: value.to_bytes(size, "little") for i, (value, size) in enumerate(zip(values, sizes, strict=True))
    }
    emulated.run((1, 1, 1))
    memory.copy_back()
    return out


@pytest.mark.parametrize("gap", mostly_full((0, 80), 80))
@pytest.mark.parametrize("side", mostly_full((0, 1), 1))
@pytest.mark.parametrize("cluster", [False, True])
@pytest.mark.parametrize("form", mostly_full(("v32", "v32_no_rope", "model1", "v41", "v41_fp4"), "v41_fp4"))
def test_rows_are_dequantized_exactly(form: str, cluster: bool, side: int, gap: int) -> None:
    """Bitwise the reference's rows, rounded to bf16, in pages of 61 tokens with and without a gap; NaN included."""
    generator = torch.Generator().manual_seed(side)
    layout = kv_cache.get_format(form)
    pages, page_size, width = 7, 61, layout.record_width
    stride = layout.page_bytes(page_size) + gap
    storage = torch.zeros(pages * stride, dtype=torch.uint8)
    cache = storage.as_strided((pages, page_size, 1, width), (stride, width, width, 1))
    if form == "v41_fp4":
        # All codes, under scales of all bytes, two of 256 being NaN.
        cache.copy_(torch.randint(0, 256, cache.shape, generator=generator, dtype=torch.uint8))
    else:
        values = torch.randn(pages, page_size, 1, layout.head_dim, generator=generator)
        values *= 2.0 ** torch.randint(-8, 9, (pages, page_size, 1, 1), generator=generator)
        values[:, ::5, :, 3], values[:, 1::5, :, 400] = torch.nan, torch.nan
        for view, plane in zip(layout.page_views(cache), layout.page_views(kv_cache.pack(values, form)), strict=True):
            view.copy_(plane)
    slots = pages * page_size
    indices = torch.randint(0, slots, (64,), generator=generator, dtype=torch.int32)
    indices[3], indices[17], indices[40], indices[5] = -1, slots, slots + 9, slots - 1

    tile = half_of_rows(cache, layout, indices, side, cluster)
    selected = (indices >= 0) & (indices < slots)
    tokens = 32 if cluster else 64
    columns = slice(0, 192 if form == "model1" and side == 1 else 256)
    whole = layout.decode(layout.page_views(cache), 1.0).flatten(0, 1)[indices.long().clamp(0, slots - 1)].bfloat16()
    assert tile[:tokens, columns][~selected[:tokens]].isfinite().all()
    result, whole = (x[:tokens][selected[:tokens]] for x in (tile, whole))
    result, expected = result[:, columns], whole[:, 256 * side : 256 * side + 256][:, columns]
    has_nan = whole.isnan().any(dim=1)
    assert has_nan.any()
    if form == "v41_fp4":
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    elif not cluster:
        assert torch.equal(result.isnan().any(dim=1), expected.isnan().any(dim=1))
    elif side == 0:
        # A NaN in any column of a token makes its first columns NaN.
        assert torch.equal(result.isnan().any(dim=1), has_nan)
    differs = result.view(torch.int16) != expected.view(torch.int16)
    assert not differs[~has_nan].any()
