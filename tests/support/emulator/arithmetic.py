"""Instructions that compute registers from registers. The functions take arrays of lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.emulator.conversions import conversion
from support.emulator.elements import FROM, LANE, LANES, TO, TYPES, Array, halves, pack, spread, type_of
from support.emulator.program import Instruction

Operation = tuple[Callable[..., Array], list[Any]]
# A literal operand, which the function takes as an int.
LITERAL = "literal"

_NUMPY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "neg": np.negative,
    "abs": np.abs,
}
_FUNCTIONS = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "rcp": lambda x: x.dtype.type(1) / x,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
}
_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_KNOWN = {
    *(*_NUMPY, *_FUNCTIONS, "setp", "selp", "mov", "cvta", "mad", "fma", "div", "rem", "min", "max", "shl", "shr"),
    *("bfe", "bfi", "bmsk", "lop3", "prmt", "popc", "clz", "bfind", "brev"),
}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def operation(ins: Instruction) -> Operation:
    """The function of an instruction, and the types of its sources; of these, the function returns the first."""
    name, modifiers = ins.name, ins.modifiers
    if name == "cvt":
        return conversion(modifiers)
    if name not in _KNOWN:
        raise NotImplementedError(ins.text)
    kind = type_of(modifiers)
    dtype = TYPES[kind]
    count = len(ins.operands) - 1
    if name == "setp":
        return _comparison(modifiers, kind)
    if name == "selp":
        return (lambda a, b, p: np.where(p, a, b)), [dtype, dtype, np.bool_]
    if name in ("mov", "cvta"):
        return (lambda a: a), [dtype]
    if kind in ("bf16", "f16", "bf16x2", "f16x2") and name not in ("and", "or", "xor", "not"):
        return _of_halves(_floating(name, modifiers), kind), [dtype] * count
    if kind in ("f32", "f64"):
        return _floating(name, modifiers), [dtype] * count
    return _integer(ins, dtype)


def _floating(name: str, modifiers: list[str]) -> Callable[..., Array]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name == "div":
        return np.divide
    if name == "fma":
        function: Callable[..., Array] = _fma
    elif name in ("min", "max"):
        quiet = {"min": np.fmin, "max": np.fmax}[name]
        function = {"min": np.minimum, "max": np.maximum}[name] if "NaN" in modifiers else quiet
    else:
        function = _NUMPY[name]
    if "relu" in modifiers:
        return lambda *x: np.maximum(function(*x), 0)
    return function


def _fma(a: Array, b: Array, c: Array) -> Array:
    if np.asarray(a).dtype == np.float64:
        return a * b + c
    # A product of two float32 is exact in float64.
    exact = np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)
    return exact.astype(np.float32)


def _of_halves(function: Callable[..., Array], kind: str) -> Callable[..., Array]:
    """``function`` of float32, applied to elements of 16 bits, or to pairs of them."""
    up, down = FROM[kind.removesuffix("x2")], TO[kind.removesuffix("x2")]

    def apply(*sources: Array) -> Array:
        sources = tuple(spread(source) for source in sources)
        if not kind.endswith("x2"):
            return down(function(*(up(source.view(np.uint16)) for source in sources)))
        low, high = zip(*map(halves, sources), strict=True)
        return pack(down(function(*map(up, low))), down(function(*map(up, high))))

    return apply


def _comparison(modifiers: list[str], kind: str) -> Operation:
    """With a third source, a predicate that the result is combined with."""
    compare = modifiers[0]
    combine = next((_COMBINE[modifier] for modifier in modifiers[1:] if modifier in _COMBINE), None)
    up = FROM.get(kind, lambda x: x)
    dtype = np.uint16 if kind == "f16" else TYPES[kind]

    def result(a: Array, b: Array, *predicate: Array) -> Array:
        found = _compare(compare, up(np.asarray(a)), up(np.asarray(b)))
        return found if combine is None else combine(found, predicate[0])

    return result, [dtype, dtype, np.bool_][: 3 if combine else 2]


def _compare(name: str, a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return _COMPARISONS[_UNSIGNED.get(name, name)](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return unordered if name == "nan" else ~unordered
    found = _COMPARISONS[name[:2]](a, b)
    return found | unordered if len(name) == 3 else found & ~unordered


def _integer(ins: Instruction, dtype: Any) -> Operation:
    name, modifiers = ins.name, ins.modifiers
    bits = 8 * np.dtype(dtype).itemsize
    if name in ("mul", "mad") and ("wide" in modifiers or "hi" in modifiers):
        return _wide(name, "hi" in modifiers, dtype)
    if name == "mad":
        return (lambda a, b, c: a * b + c), [dtype] * 3
    if name in ("min", "max"):
        function = {"min": np.minimum, "max": np.maximum}[name]
        if "relu" in modifiers:
            return (lambda a, b: np.maximum(function(a, b), dtype(0))), [dtype] * 2
        return function, [dtype] * 2
    if name in ("div", "rem"):
        return (_divide if name == "div" else lambda a, b: a - _divide(a, b) * b), [dtype] * 2
    if name in ("shl", "shr"):
        return (lambda a, b: _shift(spread(a), b, name == "shl")), [dtype, np.uint32]
    if name == "bfe":
        return _extract, [dtype, LITERAL, LITERAL]
    if name == "bfi":
        return _insert, [dtype, dtype, LITERAL, LITERAL]
    if name == "bmsk":
        return _mask, [np.uint32] * 2
    if name == "lop3":
        return _lop3, [np.uint32] * 3 + [LITERAL]
    if name == "prmt":
        return _permute, [np.uint32] * 3
    counts = {
        "popc": int.bit_count,
        "clz": lambda x: bits - x.bit_length(),
        "bfind": lambda x: (x.bit_length() - 1) & 0xFFFFFFFF,
        "brev": lambda x: int(f"{x:032b}"[::-1], 2),
    }
    if name in counts:
        return (lambda a: np.array([counts[name](int(x)) for x in spread(a)], np.uint32)), [dtype]
    if name in _NUMPY:
        return _NUMPY[name], [dtype] * (len(ins.operands) - 1)
    raise NotImplementedError(ins.text)


def _wide(name: str, high: bool, dtype: Any) -> Operation:
    """Products of twice the bits, or their upper half."""
    kind = np.dtype(dtype)
    # Python's integers where NumPy has none that are wide enough.
    wide = {2: f"{kind.kind}4", 4: f"{kind.kind}8"}.get(kind.itemsize, "O")

    def product(a: Array, b: Array, *c: Array) -> Array:
        full = np.asarray(a).astype(wide) * np.asarray(b).astype(wide)
        if high:
            full = (full >> (8 * kind.itemsize)).astype(dtype)
        return full + c[0] if c else full

    addend = dtype if high else np.dtype(wide).type
    return product, [dtype, dtype, addend][: 3 if name == "mad" else 2]


def _divide(a: Array, b: Array) -> Array:
    """Rounds to zero. A division by 0 gives ones in all bits, as on GPUs."""
    a, b = spread(a), spread(b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        exact = quotient * safe == a
        quotient = quotient + ((quotient < 0) & ~exact).astype(a.dtype)
    return np.where(b == 0, ~a.dtype.type(0), quotient)


def _shift(a: Array, b: Array, left: bool) -> Array:
    bits = 8 * a.dtype.itemsize
    amount = np.minimum(b, bits - 1).astype(a.dtype)
    if left:
        return np.where(b >= bits, a.dtype.type(0), a << amount)
    return a >> amount if a.dtype.kind == "i" else np.where(b >= bits, a.dtype.type(0), a >> amount)


def _extract(a: Array, start: int, count: int) -> Array:
    bits = 8 * a.dtype.itemsize
    if a.dtype.kind == "u":
        return (a >> a.dtype.type(start)) & a.dtype.type(2**count - 1)
    unused = a.dtype.type(bits - start - count)
    return (a << unused) >> (unused + a.dtype.type(start))


def _insert(a: Array, b: Array, start: int, count: int) -> Array:
    mask = b.dtype.type((2**count - 1) << start)
    return (b & ~mask) | ((a << b.dtype.type(start)) & mask)


def _mask(start: Array, count: Array) -> Array:
    """bmsk.wrap: counts modulo 32."""
    ones = (1 << (np.asarray(count).astype(np.int64) & 31)) - 1
    return (ones << (np.asarray(start).astype(np.int64) & 31)).astype(np.uint32)


def _lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    result = np.zeros(LANES, np.uint32)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def _permute(a: Array, b: Array, selectors: Array) -> Array:
    source = np.stack([(spread(x) >> np.uint32(8 * i)) & np.uint32(255) for x in (a, b) for i in range(4)])
    selectors, result = spread(selectors), np.zeros(LANES, np.uint32)
    for i in range(4):
        selector = (selectors >> np.uint32(4 * i)) & np.uint32(15)
        byte = source[selector & np.uint32(7), LANE]
        sign = np.where(byte & np.uint32(0x80), np.uint32(255), np.uint32(0))
        result |= np.where(selector & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result
