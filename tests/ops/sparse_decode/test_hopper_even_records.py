"""Records of even parts: what is kept of a number, and what the compiler makes of the kernel that merges them."""

from __future__ import annotations

import math
import random
import re
import struct
from collections import Counter

import pytest
from support import compile as support

from flashlatte.runtime import dispatch

pytest.importorskip("triton")

from support.hopper_sparse_decode import CALLS, KERNEL, MERGE_EVEN, recording

from flashlatte.ops.sparse_decode.hopper import even_records, launch

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="compiles, which the interpreter does not")

EVEN = ["v32, even parts", "v32, even parts, alone", "model1, blocks"]


@pytest.fixture
def record(monkeypatch):
    return recording(monkeypatch)


def bits(number: float) -> int:
    return struct.unpack("<I", struct.pack("<f", number))[0]


def number_of(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def run(asm: str, registers: dict[str, int]) -> dict[str, int]:
    """What PRMT and AND make of registers; an instruction of another kind is passed over."""

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for name, operands in re.findall(r"(prmt|and)\.b32 ([^;]+);", asm):
        target, *sources = (operand.strip() for operand in operands.split(","))
        if name == "and":
            registers[target] = value(sources[0]) & value(sources[1])
            continue
        both = value(sources[0]).to_bytes(4, "little") + value(sources[1]).to_bytes(4, "little")
        selected = bytes(both[value(sources[2]) >> 4 * i & 7] for i in range(4))
        registers[target] = int.from_bytes(selected, "little")
    return registers


def kept(numbers: list[float]) -> list[float]:
    """Eight numbers, stored and loaded."""
    stored = run(str(even_records._store_asm()), {f"${i}": bits(number) for i, number in enumerate(numbers)})
    loaded = run(str(even_records._load_asm()), {f"w{i}": stored[f"w{i}"] for i in range(6)})
    return [number_of(loaded[f"${i}"]) for i in range(8)]


def test_a_record_keeps_16_bits_of_each_number():
    rng = random.Random(0)
    given_back = even_records._GIVEN_BACK.value
    errors = []
    for _ in range(500):
        numbers = [rng.choice((-1, 1)) * rng.uniform(1, 2) * 2.0 ** rng.randrange(-120, 120) for _ in range(8)]
        for number, one in zip(numbers, kept(numbers), strict=True):
            errors.append(one * given_back / number - 1)
    assert max(map(abs, errors)) < 2**-15
    # Nothing is lost on average.
    assert abs(sum(errors) / len(errors)) < 2**-20


def test_a_record_keeps_what_is_no_number():
    special = [math.inf, -math.inf, math.nan, 0.0, -0.0, 2.0**-126, 3e38, 1.0]
    for turn in range(8):
        turned = special[turn:] + special[:turn]
        for before, after in zip(turned, kept(turned), strict=True):
            assert math.isnan(after) if math.isnan(before) else math.copysign(1, after) == math.copysign(1, before)
            assert math.isinf(after) == math.isinf(before)
            assert before not in (0.0, 1.0, 2.0**-126) or after == before


@pytest.mark.parametrize("name", EVEN)
def test_stores_are_whole_lines(record, name):
    widths = Counter(re.findall(r"\bSTG\.E(\.\w+)?", support.compile_gluon(KERNEL, record(**CALLS[name])).sass))
    # 256 columns of each consumer, 16 at a time; then reference and sum of a thread's two rows.
    assert widths[".128"] == widths[".64"] == 2 * 256 // 16
    assert widths[""] <= 4


def test_merging_is_lean(record):
    record(**CALLS["v32, even parts"])
    (launched,) = record.merges()
    code = support.compile_gluon(MERGE_EVEN, launched)
    assert code.spills == code.shared == 0
    # Two programs of four warps on an SM.
    assert code.registers <= 255
    loads = Counter(re.findall(r"\bLDG\.E(\.\w+)?", code.sass))
    # 16 records at a time, of which a thread has 24 bytes, and reference and sum of two rows; the sinks of these.
    assert (loads[".128"], loads[".64"], loads[""]) == (16, 16 + 2 * 16, 2)
    before, _ = code.sass.split("ACQBULK")
    assert not re.search(r"\b(?:LDG|STG)\b", before)


@pytest.mark.parametrize("name", EVEN)
def test_both_kernels_stay_in_the_instruction_cache(record, name):
    """Of 128 KB, as it seems, from call to call: fetching code costs a small call more than its work."""
    kernel = support.compile_gluon(KERNEL, record(**CALLS[name]))
    (launched,) = record.merges()
    assert code_bytes(kernel.sass) + code_bytes(support.compile_gluon(MERGE_EVEN, launched).sass) < 105_000


def code_bytes(sass: str) -> int:
    return 16 * len(re.findall(r"/\*[0-9a-f]{4,5}\*/ +[A-Z@]", sass))


@pytest.mark.parametrize(("heads", "programs"), [(16, 8), (17, 16), (64, 32), (128, 64)])
def test_rows_that_no_head_has_are_not_merged(record, heads, programs):
    record(batch=1, s_q=1, heads=heads)
    (launched,) = record.merges()
    assert launched.grid == (programs,)


@pytest.mark.parametrize("call", [{}, {"heads": 16}, {"batch": 1, "s_q": 1}, {"form": "bf16"}], ids=str)
def test_there_is_a_record_for_each_part(record, call):
    launched = record(**call)
    (merged,) = record.merges()
    arguments = launched.arguments
    assert arguments["EVEN"] is True
    programs = launched.grid[0] * (2 if arguments["PAIRED"] else 1)
    assert arguments["scratch"].numel() == programs * even_records.RECORD.value
    assert merged.arguments["scratch"] is arguments["scratch"]
    assert merged.arguments["splits"] == arguments["parts"]
    assert launched.options["launch_pdl"] is merged.options["launch_pdl"] is True


def test_other_parts_are_merged_by_the_common_combine(record):
    record(batch=74, s_q=1)
    assert record.merges() == []
    assert not launch.make_plan(132, 74, 128, 2048, 0, True).even
