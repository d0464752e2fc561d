"""Partial results that pass from part to part: who begins a request adds what the parts that continue it leave.

A part that continues a request does so first, and who begins it is done with it last, so that there is little to wait
for. A record of float32 numbers is a flag for each half of the output (0 until it is there, then whether the request
goes on beyond it), the base-2 lse [64], and the halves as the registers of the consumers hold them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import HALF, LATENT, OUTPUT_ROWS, ROWS
from flashlatte.runtime.gluon_compat import cta_barrier

# Numbers of a thread. Four warps store 16 bytes each at once.
_NUMBERS = gl.constexpr(128)
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Flags of a half that is there.
_ENDS = gl.constexpr(1.0)
_GOES_ON = gl.constexpr(2.0)
# Where a record's lse and its halves begin.
_LSE = gl.constexpr(4)
_VALUES = gl.constexpr(_LSE.value + ROWS.value)
# Numbers of a record.
RECORD = gl.constexpr(_VALUES.value + ROWS.value * LATENT.value)


class Records(NamedTuple):
    """At ``scratch``, one for each part and group; the program's part is number ``part`` of ``parts``."""

    scratch: Any
    part: Any
    parts: Any
    group: Any


@gluon.jit
def at(records, part):
    """That of a part, for the program's group of rows."""
    return records.scratch + (part * records.group.count + records.group.number).to(gl.int64) * RECORD


@gluon.constexpr_function
def _address_asm(operand):
    return f"mov.u32 t, %laneid; mul.wide.u32 a, t, 16; add.u64 a, a, ${operand};"


@gluon.constexpr_function
def _store_asm():
    # Operands: 32 registers of nothing, 128 numbers, 128 times the warp's address.
    code = ["{ .reg .b32 t; .reg .b64 a;", _address_asm(32 + 128)]
    for first in range(0, 128, 4):
        numbers = ", ".join(f"${32 + first + i}" for i in range(4))
        code.append(f"st.global.v4.f32 [a + {first // 4 * 2048}], {{{numbers}}};")
    return " ".join([*code, "}"])


@gluon.constexpr_function
def _add_asm(ahead):
    # Operands: 128 numbers, the same again, 128 times the warp's address, and each number's weight. A thread holds in
    # turn two numbers of its first row and two of its second. ``ahead`` loads are under way at a time.
    code = ["{ .reg .b32 t; .reg .b64 a;", f".reg .f32 x<{4 * ahead}>;", _address_asm(256)]
    for begin in range(0, 32, ahead):
        for at in range(ahead):
            numbers = ", ".join(f"x{4 * at + i}" for i in range(4))
            code.append(f"ld.global.v4.f32 {{{numbers}}}, [a + {(begin + at) * 2048}];")
        for at in range(4 * ahead):
            number = 4 * begin + at
            code.append(f"fma.rn.f32 ${number}, x{at}, ${384 + (number & 2)}, ${number};")
    return " ".join([*code, "}"])


@gluon.constexpr_function
def _store_constraints():
    return ",".join(["=r"] * 32 + ["f"] * 128 + ["l"] * 128)


@gluon.constexpr_function
def _add_constraints():
    return ",".join(["=f"] * 128 + [str(i) for i in range(128)] + ["l"] * 128 + ["f"] * 128)


@gluon.jit
def _address(record, FIRST_COL: gl.constexpr):
    # Of the first thread of each warp, which has 16 rows.
    warp = gl.arange(0, ROWS, OUTPUT_ROWS) // 16
    return ((record + _VALUES + FIRST_COL * ROWS).to(gl.int64) + warp * (32 * 16))[:, None]


@gluon.jit
def leave(record, values, lse2, goes_on, FIRST_COL: gl.constexpr):
    """Write half of a partial result ``values`` [64, 256]; the half from column 0 brings ``lse2`` [64] along."""
    gl.inline_asm_elementwise(
        _store_asm(), _store_constraints(), [values, _address(record, FIRST_COL)], gl.int8, is_pure=False, pack=_NUMBERS
    )
    if FIRST_COL == 0:
        gl.store(record + _LSE + gl.arange(0, ROWS, OUTPUT_ROWS), lse2)
    cta_barrier()
    _raise_flag(record + FIRST_COL // HALF, gl.where(goes_on, _GOES_ON, _ENDS))


@gluon.jit
def _raise_flag(flag, value):
    addresses = gl.arange(0, 128, _THREADS).to(gl.int64) * 0 + flag.to(gl.int64)
    gl.inline_asm_elementwise(
        "st.release.gpu.global.f32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,f",
        [addresses, value],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait(record):
    """Wait for both halves of a record; whether the request goes on beyond it."""
    addresses = gl.arange(0, 128, _THREADS).to(gl.int64) * 0 + record.to(gl.int64)
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
    return gl.load(record, volatile=True) == _GOES_ON


@gluon.jit
def load_lse(record):
    return gl.load(record + _LSE + gl.arange(0, ROWS, OUTPUT_ROWS))


@gluon.jit
def add(output, record, weight, FIRST_COL: gl.constexpr):
    """``output`` [64, 256] plus ``weight`` [64] · half of a record's values."""
    return gl.inline_asm_elementwise(
        _add_asm(16),
        _add_constraints(),
        [output, _address(record, FIRST_COL), weight[:, None]],
        gl.float32,
        is_pure=False,
        pack=_NUMBERS,
    )
