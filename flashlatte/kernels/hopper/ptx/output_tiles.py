"""Stores and loads in global memory of half an output: [64, 256] in four warps, a WGMMA result.

Partial outputs are stored in register order: 16 bytes per thread, so that a warp writes whole cache lines. Results are
stored row by row. There, each of the four threads of a row holds two of every eight columns, which are 4 bytes in
16-bit types; the threads exchange columns first, so that each stores 16 bytes.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx.registers import in_place_constraints
from flashlatte.kernels.hopper.ptx.threads import one_per_thread

# Elements of a thread: the same two of every eight columns in two rows, eight apart.
_ELEMENTS = gl.constexpr(128)


@gluon.constexpr_function
def _address_asm(operand):
    return f"mov.u32 t, %laneid; mul.wide.u32 a, t, 16; add.u64 a, a, ${operand};"


@gluon.constexpr_function
def _store_asm():
    # Operands: 32 unused results, 128 elements, 128 times the warp's address.
    code = ["{ .reg .b32 t; .reg .b64 a;", _address_asm(32 + 128)]
    for first in range(0, 128, 4):
        numbers = ", ".join(f"${32 + first + i}" for i in range(4))
        code.append(f"st.global.v4.f32 [a + {first // 4 * 2048}], {{{numbers}}};")
    return " ".join([*code, "}"])


@gluon.constexpr_function
def _store_constraints():
    return ",".join(["=r"] * 32 + ["f"] * 128 + ["l"] * 128)


@gluon.jit
def store_registers(address, tile):
    """Store a float32 ``tile`` [64, 256], 64 KB, in register order: each warp stores every fourth 512 bytes, beginning
    at its ``address`` (int64 [64, 1], the same for all rows of a warp)."""
    gl.inline_asm_elementwise(
        _store_asm(), _store_constraints(), [tile, address], gl.int8, is_pure=False, pack=_ELEMENTS
    )


@gluon.constexpr_function
def _add_asm(in_flight):
    # Operands: 128 elements, tied to the next 128, 128 times the warp's address, and the factor of each element.
    # Elements alternate between two of the thread's first row and two of its second. ``in_flight`` loads are in flight.
    code = ["{ .reg .b32 t; .reg .b64 a;", f".reg .f32 x<{4 * in_flight}>;", _address_asm(256)]
    for begin in range(0, 32, in_flight):
        for at in range(in_flight):
            numbers = ", ".join(f"x{4 * at + i}" for i in range(4))
            code.append(f"ld.global.v4.f32 {{{numbers}}}, [a + {(begin + at) * 2048}];")
        for at in range(4 * in_flight):
            number = 4 * begin + at
            code.append(f"fma.rn.f32 ${number}, x{at}, ${384 + (number & 2)}, ${number};")
    return " ".join([*code, "}"])


@gluon.constexpr_function
def _add_constraints():
    return ",".join([in_place_constraints("f", 128)] + ["l"] * 128 + ["f"] * 128)


@gluon.jit
def add_registers(tile, address, factor):
    """``tile`` [64, 256] plus ``factor`` [64, 1] times the tile that ``store_registers`` stored at ``address``."""
    return gl.inline_asm_elementwise(
        _add_asm(16), _add_constraints(), [tile, address, factor], gl.float32, is_pure=False, pack=_ELEMENTS
    )


@gluon.jit
def set_flag(flag, value):
    """Store float32 ``value`` at ``flag`` with release semantics."""
    addresses = gl.arange(0, 128, one_per_thread(128)).to(gl.int64) * 0 + flag.to(gl.int64)
    gl.inline_asm_elementwise(
        "st.release.gpu.global.f32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,f",
        [addresses, value],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_flags(flags):
    """Wait until both float32 values at ``flags`` are nonzero, with acquire semantics."""
    addresses = gl.arange(0, 128, one_per_thread(128)).to(gl.int64) * 0 + flags.to(gl.int64)
    gl.inline_asm_elementwise(
        "{ .reg .pred missing; .reg .b32 other; AGAIN: ld.acquire.gpu.global.b32 $0, [$1]; "
        "ld.acquire.gpu.global.b32 other, [$1 + 4]; setp.eq.b32 missing, $0, 0; "
        "setp.eq.or.b32 missing, other, 0, missing; @missing bra AGAIN; }",
        "=&r,l",
        [addresses],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _store_rows_asm():
    # Operands: 0 to 31 unused, then 64 pairs of columns, alternating between both rows, the row address of each of 128
    # elements, and 128 flags whether the row is in use. Two rounds of shuffles transpose 4 pairs of 4 threads: 32
    # columns.
    pairs, rows, flags = 32, 96, 224
    code = [
        "{ .reg .pred odd, high, in_use; .reg .b32 x, y, a, b, c, d; .reg .b64 row;",
        "mov.u32 x, %laneid; and.b32 y, x, 2; setp.ne.u32 high, y, 0; and.b32 y, x, 1; setp.ne.u32 odd, y, 0;",
    ]
    for row in range(2):
        # The threads of a row store 16 contiguous bytes each.
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
def _store_rows_constraints():
    return ",".join(["=r"] * 32 + ["r"] * 64 + ["l"] * 128 + ["r"] * 128)


@gluon.jit
def store_rows(row_pointers, in_use, tile):
    """Store the rows ``in_use`` of a bf16 or fp16 ``tile`` [64, 256] at ``row_pointers`` [64], which are 16-byte
    aligned."""
    addresses = row_pointers.to(gl.int64)[:, None]
    gl.inline_asm_elementwise(
        _store_rows_asm(),
        _store_rows_constraints(),
        [tile, addresses, in_use.to(gl.int32)[:, None]],
        gl.int8,
        is_pure=False,
        pack=_ELEMENTS,
    )
