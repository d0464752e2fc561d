"""Storage of float32 values in three bytes in global memory: rounded to 16 significant bits, with the full exponent
range.

Four values are packed into three words: the upper three bytes of each word are one value, and the lowest bytes together
are the fourth. Rounding is to nearest, ties away from zero; values that overflow become infinite. The sign of zero,
infinities and NaN are preserved: GPU arithmetic generates a single NaN, 0x7FFFFFFF, whose rounding is clamped so that
it does not reach the sign bit.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx.registers import in_place_constraints

# Offset in bytes from the first four words of eight values (16 bytes for each of 128 threads) to their last two words.
FIRST_BYTES = 2048


@gluon.constexpr_function
def _store_asm():
    # Operands: 0 to 7 the values, tied to 8 to 15, then eight times each the two addresses and the mask.
    rounded = " ".join(
        f"min.s32 n{i}, ${8 + i}, 0x7fffff7f; add.s32 n{i}, n{i}, 0x80;"  # the NaN plus half a unit would be -0
        for i in range(8)
    )
    packed = " ".join(
        f"prmt.b32 w{3 * four + i}, n{4 * four + i}, n{4 * four + 3}, {0x3215 + i};"
        for four in range(2)
        for i in range(3)
    )
    return (
        f"{{ .reg .pred p; .reg .b32 n<8>; .reg .b32 w<6>; setp.ne.b32 p, $32, 0; {rounded} {packed} "
        f"@p st.global.v4.b32 [$16], {{w0, w1, w2, w3}}; @p st.global.v2.b32 [$24+{FIRST_BYTES}], {{w4, w5}}; }}"
    )


@gluon.constexpr_function
def _store_constraints():
    return ",".join([in_place_constraints("r", 8)] + ["l"] * 16 + ["r"] * 8)


@gluon.jit
def store(tile, first, second, in_use):
    """Store groups of eight values of a thread: four words at ``first``, two at ``second`` + FIRST_BYTES.

    Args:
        tile: float32.
        first, second: int64 addresses of the tile's shape, the same for all values of a group.
        in_use: int32 mask of the tile's shape; 0 stores nothing.
    """
    words = tile.to(gl.int32, bitcast=True)
    gl.inline_asm_elementwise(
        _store_asm(), _store_constraints(), [words, first, second, in_use], gl.int32, is_pure=False, pack=8
    )


@gluon.constexpr_function
def _load_asm():
    # Operands: 0 to 7 the values, then eight times each the two addresses and the mask.
    code = "{ .reg .pred p; .reg .b32 w<8>; setp.ne.b32 p, $24, 0; " + " ".join(f"mov.b32 w{i}, 0;" for i in range(6))
    code += f" @p ld.global.v4.b32 {{w0, w1, w2, w3}}, [$8]; @p ld.global.v2.b32 {{w4, w5}}, [$16+{FIRST_BYTES}]; "
    for four in range(2):
        a, b, c = (f"w{3 * four + i}" for i in range(3))
        code += f"and.b32 w6, {a}, 0xff; prmt.b32 w7, w6, {b}, 0x1401; prmt.b32 ${4 * four + 3}, w7, {c}, 0x4210; "
        code += " ".join(f"and.b32 ${4 * four + i}, {word}, 0xffffff00;" for i, word in enumerate((a, b, c))) + " "
    return code + "}"


@gluon.constexpr_function
def _load_constraints():
    return ",".join(["=&r"] * 8 + ["l"] * 16 + ["r"] * 8)


@gluon.jit
def load(first, second, exists):
    """Load values stored by ``store``; 0 where ``exists`` is 0."""
    words = gl.inline_asm_elementwise(
        _load_asm(), _load_constraints(), [first, second, exists], gl.int32, is_pure=False, pack=8
    )
    return words.to(gl.float32, bitcast=True)


_LOAD_TWO = gl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.f32 $0, 0fFF800000; mov.f32 $1, 0f00000000; "
    "@p ld.global.v2.f32 {$0, $1}, [$2]; }"
)


@gluon.jit
def load_two(addresses, exists):
    """Load pairs of adjacent float32 at ``addresses`` as two vectors; -inf and 0 where ``exists`` is 0."""
    return gl.inline_asm_elementwise(
        _LOAD_TWO, "=&f,=&f,l,r", [addresses, exists], (gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.jit
def materialize_int64(address):
    """The same int64, computed at this point of the program and opaque to the compiler."""
    return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [address], gl.int64, is_pure=False, pack=1)
