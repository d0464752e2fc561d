"""Values of e4m3 in shared memory as the left operand of a transposed product: outᵀ = Vᵀ · Pᵀ.

WGMMA takes e4m3 operands only with adjacent keys (K-major), while a gathered tile [keys, columns] has adjacent columns.
``ldmatrix`` transposes pairs of bytes, and ``prmt`` separates the two columns of a pair.

The result is permuted in two ways, which cost nothing to undo:

* In each 16 keys, position 4t + j of the product holds key (2t, 2t + 1, 2t + 8, 2t + 9)[j]. A thread of a WGMMA result
  [rows, keys] holds exactly these four keys of a row, so that it stores P in this order as one word.
* In each 16 columns, row r < 8 of the product is column 2r, and row 8 + r column 2r + 1. A thread of the WGMMA result
  holds rows r and r + 8: two adjacent columns of the output.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx.registers import in_place_constraints

# Bytes between 128 columns of a tile [64, 512] with a 128-byte swizzle, and between its 32 keys.
_COLUMNS_BYTES = 64 * 128
_KEYS_BYTES = 32 * 128
_REGISTERS = 8


# A lane reads the row of its key; a warp reads 16 of 64 columns. The swizzle permutes the 16-byte chunks of 128 bytes.
_ADDRESS = gl.constexpr(
    """{
    .reg .b32 lane, warp, key;
    mov.u32 warp, %tid.x;
    and.b32 lane, warp, 31;
    shr.u32 warp, warp, 5;
    and.b32 warp, warp, 3;
    and.b32 key, lane, 7;
    xor.b32 key, key, warp;
    mov.u32 $0, global_smem;
    add.u32 $0, $0, $1;
    mad.lo.u32 $0, lane, 128, $0;
    mad.lo.u32 $0, key, 16, $0;
    }"""
)


@gluon.jit
def thread_address(offset):
    """The address of the first 16 bytes that this thread reads of a tile [64, 512] at ``offset`` bytes from the start
    of shared memory, in its own partition of four warps."""
    return gl.inline_asm_elementwise(_ADDRESS, "=&r,r", [offset], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _load_asm(tile):
    # Operands: 8 results, then copies of the address. A tile of 64 columns is half of 128 columns; warp w reads 16 of
    # its columns.
    offset = tile // 2 * _COLUMNS_BYTES
    code = ["{ .reg .b32 r<4>, address;", f"xor.b32 address, ${_REGISTERS}, {tile % 2 * 64};"]
    for keys in range(2):
        results = [f"${4 * keys + i}" for i in range(4)]
        code += [
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {r0, r1, r2, r3}, "
            f"[address + {offset + keys * _KEYS_BYTES}];",
            f"prmt.b32 {results[0]}, r0, r1, 0x6420; prmt.b32 {results[1]}, r0, r1, 0x7531;",
            f"prmt.b32 {results[2]}, r2, r3, 0x6420; prmt.b32 {results[3]}, r2, r3, 0x7531;",
        ]
    return " ".join([*code, "}"])


@gluon.constexpr_function
def _load_constraints():
    return ",".join(["=&r"] * _REGISTERS + ["r"] * (4 * _REGISTERS))


@gluon.jit
def load_columns(address, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns 64 · TILE to 64 · TILE + 63 of 64 keys, as the left operand [64, 64] of a WGMMA.

    ``address``: result of ``thread_address``, plus a multiple of 1,024.
    """
    addresses = gl.full([64, 64], address, gl.int32, LAYOUT)
    return gl.inline_asm_elementwise(
        _load_asm(TILE), _load_constraints(), [addresses], gl.float8e4nv, is_pure=False, pack=32
    )


@gluon.constexpr_function
def _rescale_asm():
    # Operands: 4 tiles of 32 elements, tied to as many more, and the factor of each of the 32 elements. Elements
    # alternate between two adjacent columns in two rows.
    factor = 256
    code = ["{ .reg .pred any;", f"setp.neu.f32 any, ${factor}, 0f3F800000;"]
    for i in range(32):
        if i & 2 == 0 and i > 0:
            code.append(f"setp.neu.or.f32 any, ${factor + i}, 0f3F800000, any;")
    code += ["vote.sync.any.pred any, any, 0xffffffff;", "@!any bra.uni DONE;"]
    code += [f"mul.f32 ${i}, ${i}, ${factor + (i & 29)};" for i in range(128)]
    return " ".join([*code, "DONE: }"])


@gluon.constexpr_function
def _rescale_constraints():
    return ",".join([in_place_constraints("f", 128)] + ["f"] * 32)


@gluon.jit
def rescale_columns(tiles, factor):
    """A tuple of four WGMMA results [64, 64] times ``factor`` [64] of their columns. A warp skips the product if all
    factors are 1."""
    factor, _ = gl.broadcast(factor[None, :], tiles[0])
    return gl.inline_asm_elementwise(
        _rescale_asm(),
        _rescale_constraints(),
        [tiles[0], tiles[1], tiles[2], tiles[3], factor],
        (gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=32,
    )
