"""The fp24 combine kernel: the calls that use it, and compile tests."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.compile import Launch, Recorder
from support.marks import mostly_full

from flashlatte.runtime import machine

pytest.importorskip("triton")

from support import compile as support
from support.hopper_dense_decode import decode

from flashlatte.ops.dense_decode.hopper import launch
from flashlatte.split_kv import combine, fp24_combine
from flashlatte.split_kv.fp24_partials import PARTIAL

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

COMBINE = fp24_combine.combine_fp24_kernel


@pytest.fixture
def record(monkeypatch):
    """Calls the launcher; returns the launches of the kernel and of the combine kernel, if any."""
    kernel, combiner = Recorder(launch.dense_decode_kernel), Recorder(COMBINE)
    monkeypatch.setattr(launch, "dense_decode_kernel", kernel)
    monkeypatch.setattr(launch, "clear_kernel", Recorder(launch.clear_kernel))
    monkeypatch.setattr(fp24_combine, "combine_fp24_kernel", combiner)
    monkeypatch.setattr(combine, "combine_kernel", Recorder(combine.combine_kernel))
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)

    def record(batch: int = 1, **call: Any) -> tuple[Launch, Launch | None]:
        kernel.launches.clear()
        combiner.launches.clear()
        decode(batch=batch, **call)
        (launched,) = kernel.launches
        combined = combiner.launches[0] if combiner.launches else None
        assert launched.arguments["CONFIG"].fp24_partials is (combined is not None)
        return launched, combined

    return record


@pytest.mark.parametrize(
    ("call", "splits", "ctas"),
    [
        # Two row groups of 4 tiles of 16 rows, and columns: the warps that do not hold splits hold columns.
        ({"columns": 16}, 1, 2 * 4 * 4),
        ({"columns": 64}, 4, 2 * 4 * 16),
        ({"columns": 2048}, 8, 2 * 4 * 32),
        ({"batch": 4, "s_q": 4, "heads": 16, "columns": 1024}, 4, 4 * 4 * 16),
        ({"batch": 4, "heads": 24, "columns": 1024}, 4, 4 * 2 * 16),
        ({"cache_dtype": torch.float8_e4m3fn, "heads": 17}, 4, 2 * 16),
    ],
    ids=str,
)
def test_warps_divide_many_splits(record, call, splits, ctas):
    launched, combined = record(**call)
    assert (combined.arguments["CONFIG"].splits, combined.grid) == (splits, (ctas,))
    assert combined.arguments["uniform_ranges"] == launched.arguments["grid_num_splits"]
    assert combined.arguments["scratch"] is launched.arguments["scratch"]
    of_each_range = 2 * launched.arguments["grid_num_groups"] * PARTIAL.value
    assert launched.arguments["scratch"].numel() == launched.arguments["grid_num_splits"] * of_each_range
    assert launched.options["launch_pdl"] is combined.options["launch_pdl"] is True


@pytest.mark.parametrize("call", [{"heads": 16}, {"batch": 128}, {"columns": 2}, {"batch_invariant": True}], ids=str)
def test_other_calls_use_the_common_combine(record, call):
    assert record(**call)[1] is None


@pytest.mark.parametrize("columns", mostly_full((16, 32, 64, 2048), 2048))
def test_resources_and_dependent_launch(record, columns):
    _, combined = record(columns=columns)
    code = support.compile_gluon(COMBINE, combined)
    assert code.spills == 0
    # Two CTAs of eight warps per SM.
    assert code.registers <= 128
    before, after = code.sass.split("ACQBULK")
    # Before the wait: the lengths of requests, which determine the ranges.
    assert not re.search(r"\b(?:LDG\.E\.(?:64|128)|STG)\b", before)
    assert len(re.findall(r"\bLDG\.E\.128\b", after)) >= 8
