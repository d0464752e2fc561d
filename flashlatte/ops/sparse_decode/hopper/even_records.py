"""Partial results of items that are all split into equally many parts, and the kernel that merges them.

A record lies as a consumer's registers do: for 16 of its columns 24 bytes a thread, so that what a warp stores or loads
at a time is whole lines. Then, for each row, what its weights are relative to (in base 2), and their sum, by which the
output is not yet divided. The three upper bytes of a number are kept, 16 bits of its mantissa: less than 2⁻¹⁵ of it are
lost, and what that is on average, the merging gives back. Infinities and NaN stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, ROWS
from flashlatte.kernels.triton.online_softmax import LOG2_E
from flashlatte.ops.sparse_decode.hopper.tiles import OUTPUT
from flashlatte.runtime.triton_kernel import gluon_kernel
from flashlatte.split_kv import output_rows

# Bytes of 16 columns: 16 for each of 128 threads, and 8.
_FIRST_BYTES = 2048
_STEP_BYTES = gl.constexpr(_FIRST_BYTES + 1024)
_HALF_BYTES = gl.constexpr(HALF.value // 16 * _STEP_BYTES.value)
# Words of a record: two halves, and two for each row.
RECORD = gl.constexpr(2 * _HALF_BYTES.value // 4 + 2 * ROWS.value)
# What a program merges, 16 columns a warp, and how many records at a time.
_TILE_ROWS = gl.constexpr(16)
_TILE_COLS = gl.constexpr(64)
_COL_TILES = gl.constexpr(LATENT.value // _TILE_COLS.value)
_AT_ONCE = gl.constexpr(16)
_TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], [0, 8]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[16, 64],
    )
)
_ROWS = gl.constexpr(gl.SliceLayout(1, _TILE))
# Half of 2⁻¹⁵ of the leading bit, which is seven tenths of a number.
_GIVEN_BACK = gl.constexpr(1 + 0.7 * 2.0**-16)


@gluon.jit
def record_of(scratch, number, group, num_groups):
    """Where the record of a part and a group of heads lies."""
    return scratch + (number * num_groups + group).to(gl.int64) * RECORD


@gluon.jit
def _places(half, row, col):
    """Addresses of the first 16 bytes of a thread's numbers of 16 columns, and of the other 8, from their half's."""
    thread = ((row >> 4) * 32 + (row & 7) * 4 + ((col & 7) >> 1)).to(gl.int64)
    step = ((col >> 4) * _STEP_BYTES).to(gl.int64)
    # In this order, for addresses of all columns that are the same but for a constant.
    return (half + thread * 16) + step, (half + thread * 8) + step


@gluon.constexpr_function
def _store_asm():
    # Operands: 0 to 7 the numbers, also 8 to 15, then eight times each the two addresses and whether the rows are used.
    # Of four numbers, the fourth fills the lowest bytes of the others.
    packs = " ".join(
        f"prmt.b32 w{3 * four + i}, ${4 * four + i}, ${4 * four + 3}, {0x3215 + i};"
        for four in range(2)
        for i in range(3)
    )
    return (
        f"{{ .reg .pred p; .reg .b32 w<6>; setp.ne.b32 p, $32, 0; {packs} "
        f"@p st.global.v4.b32 [$16], {{w0, w1, w2, w3}}; @p st.global.v2.b32 [$24+{_FIRST_BYTES}], {{w4, w5}}; }}"
    )


@gluon.constexpr_function
def _store_constraints():
    return ",".join(["=r"] * 8 + [str(i) for i in range(8)] + ["l"] * 16 + ["r"] * 8)


@gluon.jit
def _kept(address):
    """The same address; what it follows from is worked out before this, and what follows from it is after."""
    return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [address], gl.int64, is_pure=False, pack=1)


@gluon.jit
def write(state, record, rows_in_use, FIRST_COL: gl.constexpr):
    """Write the columns from FIRST_COL that a consumer has; those from 0 bring references and sums along."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, OUTPUT))[:, None]
    col = gl.arange(0, HALF, gl.SliceLayout(0, OUTPUT))[None, :]
    first, second = _places(_kept(record.to(gl.int64)) + FIRST_COL // HALF * _HALF_BYTES, row, col)
    in_use = (row < rows_in_use).to(gl.int32) + col * 0
    words = state.out.to(gl.int32, bitcast=True)
    gl.inline_asm_elementwise(
        _store_asm(), _store_constraints(), [words, first, second, in_use], gl.int32, is_pure=False, pack=8
    )
    if FIRST_COL == 0:
        row = gl.arange(0, ROWS, state.row_sum.type.layout)
        sums = record + 2 * _HALF_BYTES // 4 + row * 2
        gl.store(sums, state.row_max)
        gl.store(sums + 1, state.row_sum)


@gluon.constexpr_function
def _load_asm():
    # Operands: 0 to 7 the numbers, then eight times each the two addresses and whether the record exists.
    code = "{ .reg .pred p; .reg .b32 w<8>; setp.ne.b32 p, $24, 0; " + " ".join(f"mov.b32 w{i}, 0;" for i in range(6))
    code += f" @p ld.global.v4.b32 {{w0, w1, w2, w3}}, [$8]; @p ld.global.v2.b32 {{w4, w5}}, [$16+{_FIRST_BYTES}]; "
    for four in range(2):
        a, b, c = (f"w{3 * four + i}" for i in range(3))
        code += f"and.b32 w6, {a}, 0xff; prmt.b32 w7, w6, {b}, 0x1401; prmt.b32 ${4 * four + 3}, w7, {c}, 0x4210; "
        code += " ".join(f"and.b32 ${4 * four + i}, {word}, 0xffffff00;" for i, word in enumerate((a, b, c))) + " "
    return code + "}"


@gluon.constexpr_function
def _load_constraints():
    return ",".join(["=&r"] * 8 + ["l"] * 16 + ["r"] * 8)


@gluon.jit
def _load(first, second, exists):
    """Numbers of a record; 0 where there is none."""
    exists = gl.zeros([_TILE_ROWS, _TILE_COLS], gl.int32, _TILE) + exists
    words = gl.inline_asm_elementwise(
        _load_asm(), _load_constraints(), [first, second, exists], gl.int32, is_pure=False, pack=8
    )
    return words.to(gl.float32, bitcast=True)


_LOAD_SUMS = gl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.f32 $0, 0fFF800000; mov.f32 $1, 0f00000000; "
    "@p ld.global.v2.f32 {$0, $1}, [$2]; }"
)


@gluon.jit
def _load_sums(sums, exists):
    """Reference and sum of rows; -inf and 0 where there is no record."""
    exists = gl.zeros([_TILE_ROWS], gl.int32, _ROWS) + exists
    return gl.inline_asm_elementwise(
        _LOAD_SUMS, "=&f,=&f,l,r", [sums, exists], (gl.float32, gl.float32), is_pure=False, pack=1
    )


def merge_even_kernel(
    scratch,
    out,
    out_stride_request: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    lse,
    lse_stride_request: tl.int64,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    sink,
    sink_stride: tl.int64,
    tokens: tl.int32,
    heads: tl.int32,
    empty_lse: tl.float32,
    num_groups: tl.int32,
    row_tiles: tl.int32,
    splits: tl.int32,
    OUT_ALIGN: tl.constexpr,
):
    """A program merges 16 rows and 64 columns of an item, of a group of 64 heads with ``row_tiles`` of 16 in use."""
    outputs = output_rows.Outputs(
        out,
        out_stride_request,
        out_stride_token,
        out_stride_head,
        lse,
        lse_stride_request,
        lse_stride_token,
        lse_stride_head,
        sink,
        sink_stride,
        tokens,
        heads,
        heads,
        empty_lse,
    )
    program = gl.program_id(0)
    first_col = program % _COL_TILES * _TILE_COLS
    first_row = program // _COL_TILES % row_tiles * _TILE_ROWS
    group = program // _COL_TILES // row_tiles % num_groups
    item = program // _COL_TILES // row_tiles // num_groups
    row = first_row + gl.arange(0, _TILE_ROWS, _ROWS)
    col = gl.arange(0, _TILE_COLS, gl.SliceLayout(0, _TILE))
    record = record_of(scratch, item * splits, group, num_groups).to(gl.int64)
    stride = num_groups.to(gl.int64) * (RECORD * 4)
    first, second = _places(record + first_col // HALF * _HALF_BYTES, row[:, None], (first_col % HALF + col)[None, :])
    # Worked out already when the records have been written.
    first, second, sums = _kept(first), _kept(second), _kept(record + 2 * _HALF_BYTES + row * 8)
    values = gl.zeros([_TILE_ROWS, _TILE_COLS], gl.float32, _TILE)
    peak = gl.full([_TILE_ROWS], float("-inf"), gl.float32, _ROWS)
    total = gl.zeros([_TILE_ROWS], gl.float32, _ROWS)
    gdc_wait()
    gdc_launch_dependents()
    for split in range(0, splits, _AT_ONCE):
        references = ()
        totals = ()
        loaded = ()
        for i in gl.static_range(_AT_ONCE):
            reference, part_total = _load_sums(sums + (split + i) * stride, (split + i < splits).to(gl.int32))
            references += (reference,)
            totals += (part_total,)
        for i in gl.static_range(_AT_ONCE):
            distance = (split + i) * stride
            loaded += (_load(first + distance, second + distance, (split + i < splits).to(gl.int32)),)
        new_peak = peak
        for i in gl.static_range(_AT_ONCE):
            new_peak = gl.maximum(new_peak, references[i])
        decay = gl.exp2(peak - new_peak)
        total *= decay
        values *= decay[:, None]
        for i in gl.static_range(_AT_ONCE):
            weight = gl.exp2(references[i] - new_peak)
            total += weight * totals[i]
            values += weight[:, None] * loaded[i]
        peak = new_peak

    is_empty = total == 0
    factor = gl.where(is_empty, 0.0, _GIVEN_BACK / total)
    lse2 = gl.where(is_empty, float("-inf"), peak + gl.log2(total))
    head = group * ROWS + row
    if sink is not None:
        sink2 = gl.load(sink + head * sink_stride, mask=head < heads, other=0.0) * LOG2_E
        factor *= gl.where(is_empty, 0.0, 1.0 / (1.0 + gl.exp2(sink2 - lse2)))
    offset = (
        (item // tokens).to(gl.int64) * out_stride_request
        + (item % tokens).to(gl.int64) * out_stride_token
        + head.to(gl.int64) * out_stride_head
    ) * OUT_ALIGN
    pointers = (out + offset)[:, None] + (first_col + col)[None, :]
    gl.store(pointers, (values * factor[:, None]).to(out.dtype.element_ty), mask=(head < heads)[:, None])
    if first_col == 0:
        output_rows.write_lse(outputs, item, 0, head, lse2)


merge_even = gluon_kernel(merge_even_kernel, ["sink", "lse"])


def launch_merge(
    scratch: torch.Tensor, outputs: tuple[Any, ...], *, items: int, heads: int, splits: int, out_align: int
) -> None:
    """Merge the records in ``scratch`` of ``items`` items with ``splits`` parts each.

    Args:
        outputs: the kernel's arguments from ``out`` to ``empty_lse``.
    """
    num_groups = -(-heads // ROWS.value)
    row_tiles = -(-min(heads, ROWS.value) // _TILE_ROWS.value)
    merge_even[(items * num_groups * row_tiles * _COL_TILES.value,)](
        scratch,
        *outputs,
        num_groups,
        row_tiles,
        splits,
        OUT_ALIGN=out_align,
        num_warps=4,
        enable_fp_fusion=True,
        launch_pdl=True,
    )
