"""Stores of half an output [64, 256] in 16-byte pieces.

Of a WGMMA's result, the four threads of a row have two columns each of every eight: in 16 bits, stores of 4 bytes, 16
bytes side by side, half of what memory takes at once. Here they first exchange, and each then stores 16 bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Numbers of a thread: of its two rows, eight apart, the same two columns of every eight.
_NUMBERS = gl.constexpr(128)


@gluon.constexpr_function
def _store_asm():
    # Operands: 0 to 31 nothing, then 64 pairs of columns, of both rows in turn, 128 addresses of the number's row, and
    # 128 flags whether it is in use. Two rounds of exchange transpose 4 pairs of 4 threads: 32 columns.
    pairs, rows, flags = 32, 96, 224
    code = [
        "{ .reg .pred odd, high, in_use; .reg .b32 x, y, a, b, c, d; .reg .b64 row;",
        "mov.u32 x, %laneid; and.b32 y, x, 2; setp.ne.u32 high, y, 0; and.b32 y, x, 1; setp.ne.u32 odd, y, 0;",
    ]
    for row in range(2):
        # The threads of a row store 16 bytes each, side by side.
        code += [
            f"mov.u32 x, %laneid; and.b32 x, x, 3; mul.wide.u32 row, x, 16; add.u64 row, row, ${rows + 2 * row};",
            f"setp.ne.b32 in_use, ${flags + 2 * row}, 0;",
        ]
        for group in range(8):
            first, second, third, fourth = (f"${pairs + 8 * group + 2 * pair + row}" for pair in range(4))
            code += [
                f"selp.b32 x, {first}, {second}, odd; selp.b32 y, {third}, {fourth}, odd;",
                "shfl.sync.bfly.b32 x, x, 1, 31, 0xffffffff; shfl.sync.bfly.b32 y, y, 1, 31, 0xffffffff;",
                f"selp.b32 a, x, {first}, odd; selp.b32 b, {second}, x, odd;",
                f"selp.b32 c, y, {third}, odd; selp.b32 d, {fourth}, y, odd;",
                "selp.b32 x, a, c, high; selp.b32 y, b, d, high;",
                "shfl.sync.bfly.b32 x, x, 2, 31, 0xffffffff; shfl.sync.bfly.b32 y, y, 2, 31, 0xffffffff;",
                "selp.b32 a, x, a, high; selp.b32 b, y, b, high; selp.b32 c, c, x, high; selp.b32 d, d, y, high;",
                f"@in_use st.global.v4.b32 [row + {64 * group}], {{a, b, c, d}};",
            ]
    return " ".join([*code, "}"])


@gluon.constexpr_function
def _constraints():
    return ",".join(["=r"] * 32 + ["r"] * 64 + ["l"] * 128 + ["r"] * 128)


@gluon.jit
def store_halves(row_pointers, in_use, values):
    """Store bf16 or fp16 ``values`` [64, 256] at ``row_pointers`` [64], 16-byte aligned, of the rows ``in_use``."""
    addresses = row_pointers.to(gl.int64)[:, None]
    gl.inline_asm_elementwise(
        _store_asm(),
        _constraints(),
        [values, addresses, in_use.to(gl.int32)[:, None]],
        gl.int8,
        is_pure=False,
        pack=_NUMBERS,
    )
