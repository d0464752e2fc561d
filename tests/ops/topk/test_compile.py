"""Compile tests of the kernels of ``topk``, without a GPU."""

import pytest
import torch
from support.allocations import recorded_bytes
from support.compile import SHARED_BYTES, Recorder, compile_launch, variant_key

from flashlatte.ops.topk.portable import launch
from flashlatte.ops.topk.reference import TopkParams
from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="kernels are interpreted, not compiled")


@pytest.fixture
def recorders(monkeypatch):
    """Kernels that record their launches: filter, finish."""
    found = []
    for name in ("filter_kernel", "finish_kernel"):
        found.append(Recorder(getattr(launch, name)))
        monkeypatch.setattr(launch, name, found[-1])
    monkeypatch.setattr(machine, "num_sms", lambda device: 132)
    return found


def run(rows=64, width=131072, k=2048, with_start=False, next_n=1, page_size=0):
    # Contents do not matter, nor is there so much memory.
    logits = torch.empty(1, 1).expand(rows, width)
    end = torch.empty(rows // next_n, dtype=torch.int32)
    start = torch.empty(rows, dtype=torch.int32) if with_start else None
    indices = torch.empty(rows, k, dtype=torch.int32)
    table = torch.empty(rows // next_n, 9, dtype=torch.int32) if page_size else None
    launch.topk(TopkParams(logits, start, end, next_n, indices, None, table, page_size or 1))


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.full), 90])
@pytest.mark.parametrize("rows", [pytest.param(64, marks=pytest.mark.full), 4096])
@pytest.mark.parametrize("page_size", [0, 64])
def test_kernels_fit(page_size, rows, arch, recorders):
    run(rows, page_size=page_size)
    for recorder in recorders:
        compiled = compile_launch(recorder.fn, recorder.launches[0], arch)
        # A few around the sample, which is read once a program, cost little.
        assert compiled.spills <= (16 if arch == 90 else 64)
        assert compiled.shared <= SHARED_BYTES[arch]
        threads = 32 * recorder.launches[0].options["num_warps"]
        assert compiled.registers * threads <= 65_536


def test_rows_are_divided_over_programs_by_their_number(recorders):
    filter_recorder, finish_recorder = recorders
    for rows, width, programs in ((1, 131072, 16), (64, 131072, 320), (300, 131072, 300), (1, 16384, 4)):
        filter_recorder.launches.clear()
        run(rows, width)
        assert sum(recorded.grid[0] for recorded in filter_recorder.launches) == programs
    finish_recorder.launches.clear()
    filter_recorder.launches.clear()
    run(5, 8192)  # rows that fit in registers are not filtered
    assert not filter_recorder.launches
    assert [recorded.grid for recorded in finish_recorder.launches] == [(5,)]


@pytest.mark.parametrize(
    "sizes",
    [((1, 8193), (16, 100_000), (200, 131_072), (7, 2**18)), ((300, 20_000), (5000, 30_000), (264, 32_768))],
    ids=["few rows", "many rows"],
)
def test_new_sizes_compile_nothing(sizes, recorders):
    for rows, width in sizes:
        run(rows, width)
    for recorder in recorders:
        assert len({variant_key(recorder.fn, recorded) for recorded in recorder.launches}) == 1


def test_scratch_is_bounded(recorders, monkeypatch):
    logits, indices = torch.empty(1, 1).expand(4096, 2**17), torch.empty(4096, 2048, dtype=torch.int32)
    sizes = recorded_bytes(monkeypatch)
    launch.topk(TopkParams(logits, None, None, 1, indices, None))
    assert sizes
    assert sum(sizes) <= launch.SCRATCH_BYTES + 2**20
