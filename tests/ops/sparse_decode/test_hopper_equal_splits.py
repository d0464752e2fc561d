"""Equal splits: precision of fp24 partial outputs, and compile tests of the combine kernel."""

from __future__ import annotations

import math
import random
import re
import struct
from collections import Counter

import pytest
from support import compile as support

from flashlatte.runtime import machine

pytest.importorskip("triton")

from support.hopper_sparse_decode import CALLS, COMBINE_FP24, KERNEL, recording
from support.later_spills import allowed

from flashlatte.kernels.hopper.ptx import fp24
from flashlatte.ops.sparse_decode.hopper import launch
from flashlatte.split_kv.fp24_partials import PARTIAL

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

EQUAL = ["v32, equal splits", "v32, equal splits, alone", "model1, blocks"]


@pytest.fixture
def record(monkeypatch):
    return recording(monkeypatch)


def bits(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


def number_of(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def run(asm: str, registers: dict[str, int]) -> dict[str, int]:
    """Emulates integer instructions on registers; skips others."""

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    def signed(word: int) -> int:
        return word - 2**32 * (word >> 31)

    for name, operands in re.findall(r"(prmt\.b32|and\.b32|min\.s32|add\.s32) ([^;]+);", asm):
        target, *sources = (operand.strip() for operand in operands.split(","))
        first, second = value(sources[0]), value(sources[1])
        if name == "and.b32":
            registers[target] = first & second
        elif name == "min.s32":
            registers[target] = min(signed(first), signed(second)) % 2**32
        elif name == "add.s32":
            registers[target] = (first + second) % 2**32
        else:
            both = first.to_bytes(4, "little") + second.to_bytes(4, "little")
            selected = bytes(both[value(sources[2]) >> 4 * i & 7] for i in range(4))
            registers[target] = int.from_bytes(selected, "little")
    return registers


def kept(numbers: list[float]) -> list[float]:
    """Eight values after a store and a load."""
    stored = run(str(fp24._store_asm()), {f"${8 + i}": bits(number) for i, number in enumerate(numbers)})
    loaded = run(str(fp24._load_asm()), {f"w{i}": stored[f"w{i}"] for i in range(6)})
    return [number_of(loaded[f"${i}"]) for i in range(8)]


def nearest(number: float) -> float:
    """Rounds to 16 significant bits, to nearest, ties away from zero."""
    mantissa, exponent = math.frexp(abs(number))
    return math.copysign(math.ldexp(math.floor(mantissa * 2**16 + 0.5), exponent - 16), number)


def test_values_are_rounded_to_16_bits():
    rng = random.Random(0)
    for _ in range(500):
        numbers = [rng.choice((-1, 1)) * rng.uniform(1, 2) * 2.0 ** rng.randrange(-120, 120) for _ in range(8)]
        numbers = [number_of(bits(number)) for number in numbers]
        assert kept(numbers) == [nearest(number) for number in numbers]
    halfway = [1 + 2.0**-16, -1 - 2.0**-16, 1 + 3 * 2.0**-16, 2 - 2.0**-16, 2 - 2.0**-17, -(2.0**100), 3.0, 1 / 3]
    assert kept(halfway) == [nearest(number_of(bits(number))) for number in halfway]


def test_nan_and_infinities_are_preserved():
    nan = number_of(0x7FFFFFFF)  # the NaN that GPU arithmetic produces
    special = [math.inf, -math.inf, nan, 0.0, -0.0, 2.0**-126, -(2.0**127), 1.0]
    for turn in range(8):
        turned = special[turn:] + special[:turn]
        for before, after in zip(turned, kept(turned), strict=True):
            assert math.isnan(after) if math.isnan(before) else after == before
            assert math.isnan(after) or math.copysign(1, after) == math.copysign(1, before)
    largest = number_of(0x7F7FFFFF)
    assert kept([largest, -largest, math.nan] + [1.0] * 5)[:2] == [math.inf, -math.inf]


@pytest.mark.full
@pytest.mark.parametrize("name", EQUAL)
def test_stores_are_whole_cache_lines(record, name):
    widths = Counter(re.findall(r"\bSTG\.E(\.\w+)?", support.compile_gluon(KERNEL, record(**CALLS[name])).sass))
    # 256 columns of each consumer, 16 at a time; then row_max and row_sum of a thread's two rows.
    assert min(widths[".128"], widths[".64"]) >= 2 * 256 // 16
    assert widths[""] <= 4


def test_combine_resources(record):
    record(**CALLS["v32, equal splits"])
    (launched,) = record.combines()
    code = support.compile_gluon(COMBINE_FP24, launched)
    assert code.spills == code.shared == 0
    # Two CTAs of four warps per SM.
    assert code.registers <= 255
    loads = Counter(re.findall(r"\bLDG\.E(\.\w+)?", code.sass))
    # 16 splits at a time: 24 bytes per thread, row_max and row_sum of two rows; and their sinks.
    assert loads[".128"] >= 16
    assert loads[""] <= 2
    before, _ = code.sass.split("ACQBULK")
    assert not re.search(r"\b(?:LDG|STG)\b", before)


@pytest.mark.full
@pytest.mark.parametrize("name", EQUAL)
def test_both_kernels_stay_in_the_instruction_cache(record, name):
    """It seems to have 128 KB: for a small call, fetching code costs more than the work."""
    kernel = support.compile_gluon(KERNEL, record(**CALLS[name]))
    (launched,) = record.combines()
    size = code_bytes(kernel.sass) + code_bytes(support.compile_gluon(COMBINE_FP24, launched).sass)
    assert size <= allowed(f"sparse_decode bytes {name}", 112_000)


def code_bytes(sass: str) -> int:
    return 16 * len(re.findall(r"/\*[0-9a-f]{4,5}\*/ +[A-Z@]", sass))


@pytest.mark.parametrize(("heads", "programs"), [(16, 8), (17, 16), (64, 32), (128, 64)])
def test_unused_rows_are_not_combined(record, heads, programs):
    record(batch=1, s_q=1, heads=heads)
    (launched,) = record.combines()
    assert launched.grid == (programs,)


@pytest.mark.parametrize("call", [{}, {"heads": 16}, {"batch": 1, "s_q": 1}, {"form": "bf16"}], ids=str)
def test_there_is_a_partial_output_for_each_split(record, call):
    launched = record(**call)
    (combined,) = record.combines()
    arguments = launched.arguments
    assert arguments["CONFIG"].equal_splits is True
    programs = launched.grid[0] * (2 if arguments["CONFIG"].cluster else 1)
    assert arguments["scratch"].numel() == programs * PARTIAL.value
    assert combined.arguments["scratch"] is arguments["scratch"]
    assert combined.arguments["grid_num_splits"] == arguments["num_splits"]
    assert launched.options["launch_pdl"] is combined.options["launch_pdl"] is True


def test_other_splits_use_the_common_combine(record):
    record(batch=74, s_q=1)
    assert record.combines() == []
    assert launch.make_plan(132, 74, 128, 2048, 0, True).equal_splits is None
