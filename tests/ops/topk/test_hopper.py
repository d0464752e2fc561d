"""Top-k on Hopper: supported calls, launch shapes, compile tests, and the paths of a row."""

import functools

import pytest
import torch
from ops.topk.test_topk import check, generator
from support.compile import Recorder, compile_launch
from support.marks import mostly_full
from support.topk_rows import rows_of

from flashlatte.ops.topk import api
from flashlatte.ops.topk.hopper import kernel, launch, shared_layout
from flashlatte.ops.topk.reference import TopkParams
from flashlatte.runtime import dispatch, machine


@pytest.mark.skipif(machine.interpreting(), reason="the interpreter is no Hopper")
@pytest.mark.parametrize(
    ("rows", "columns", "k", "capability", "reason"),
    [
        (4096, 32_768, 2048, (9, 0), None),
        (1, 262_144, 1, (9, 0), None),
        (33, 1_048_576, 2048, (9, 0), None),
        (8, 1_048_576, 2048, (9, 0), None),
        (None, None, None, (9, 0), None),
        (32, 262_145, 2048, (9, 0), "takes up to 262144 columns of 9 to 32 rows"),
        (4096, 32_768, 2049, (9, 0), "takes k up to 2048, not 2049"),
        (4096, 32_768, 2048, (10, 0), "needs compute capability 9.0"),
    ],
)
def test_supported_calls(rows, columns, k, capability, reason, monkeypatch):
    monkeypatch.setattr(machine, "_compute_capability", lambda _: capability)
    call = dispatch.CallSpec(api.OPERATION, torch.device("cuda", 0), torch.float32, rows=rows, columns=columns, k=k)
    (choice,) = (one for one in dispatch.explain(call) if one.backend == "hopper")
    assert choice.refusal is None if reason is None else str(choice.refusal).startswith(reason)
    assert dispatch.select(call) == ("hopper" if reason is None else "portable")


@pytest.mark.parametrize(("rows", "ctas"), [(1, 8), (8, 8), (9, 2), (66, 2), (67, 1), (132, 1), (133, 1)])
def test_launch_shape(rows, ctas):
    found, warps, registers = launch._launch_shape(rows, 132, False)
    assert found == ctas
    assert (warps, registers) == ((8, 80) if rows > 132 else (16, None))
    assert launch._launch_shape(rows, 132, True) == (ctas, 16, None)
    assert rows * ctas <= 132 or ctas == 1


def test_the_list_of_the_largest_k_fits_shared_memory():
    assert shared_layout.num_words(2 * api._HOPPER_MAX_K) <= 12_288


@functools.cache
def compiled(rows, dtype, with_values, with_table):
    """The kernel of one CTA per row, and the launch."""
    table = torch.empty(rows, 500, dtype=torch.int32) if with_table else None
    logits, indices = torch.empty(1, 1, dtype=dtype).expand(rows, 30_000), torch.empty(rows, 2048, dtype=torch.int32)
    recorder = Recorder(kernel.kernel_1_cta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(launch.KERNELS, 1, recorder)
        patch.setattr(machine, "num_sms", lambda device: 132)
        values = indices.to(dtype) if with_values else None
        launch.topk(TopkParams(logits, None, None, 1, indices, values, table, 64 if with_table else 1))
    (launched,) = recorder.launches
    return compile_launch(recorder.fn, launched, 90), launched


@pytest.mark.skipif(machine.interpreting(), reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize("rows", [100, 700])
@pytest.mark.parametrize("with_values", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_table", [False, True])
def test_shared_memory_fits_48_kib(dtype, with_values, with_table, rows):
    """Triton's own shared memory plus the words of the list."""
    code, launched = compiled(rows, dtype, with_values, with_table)
    assert code.shared + 4 * shared_layout.num_words(launched.arguments["CONFIG"].capacity) <= 48 * 1024


@pytest.mark.full
@pytest.mark.skipif(machine.interpreting(), reason="kernels are interpreted, not compiled")
def test_nothing_is_read_before_the_preceding_kernel_has_finished(monkeypatch):
    recorder = Recorder(kernel.kernel_8_ctas)
    monkeypatch.setitem(launch.KERNELS, 8, recorder)
    monkeypatch.setattr(machine, "num_sms", lambda device: 132)
    end, indices = torch.empty(1, dtype=torch.int32), torch.empty(1, 64, dtype=torch.int32)
    launch.topk(TopkParams(torch.empty(1, 9000), None, end, 1, indices, None))
    sass = compile_launch(recorder.fn, recorder.launches[0], 90).sass
    assert 0 < sass.index("ACQBULK") < min(sass.index(access) for access in ("LDG", "STG"))


def launch_on_132_sms(rows, monkeypatch):
    """The launch of a call with ``rows`` rows."""
    recorders = {ctas: Recorder(fn) for ctas, fn in launch.KERNELS.items()}
    monkeypatch.setattr(launch, "KERNELS", recorders)
    monkeypatch.setattr(machine, "num_sms", lambda device: 132)
    monkeypatch.setattr(machine, "interpreting", lambda: False)
    launch.topk(TopkParams(torch.empty(rows, 9), None, None, 1, torch.empty(rows, 4, dtype=torch.int32), None))
    (launched,) = (one for recorder in recorders.values() for one in recorder.launches)
    return launched


@pytest.mark.parametrize(("rows", "overlaps"), [(8, True), (9, False), (700, False)])
def test_few_rows_use_dependent_launch(rows, overlaps, monkeypatch):
    launched = launch_on_132_sms(rows, monkeypatch)
    assert launched.options.get("launch_pdl", False) is launched.arguments["CONFIG"].overlapped is overlaps


@pytest.mark.parametrize(("rows", "short"), [(1, True), (9, True), (132, True), (133, False)])
def test_short_rows_of_rows_that_run_at_the_same_time(rows, short, monkeypatch):
    launched = launch_on_132_sms(rows, monkeypatch)
    assert launched.arguments["CONFIG"].short_rows is short


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", mostly_full(["normal", "mostly zero", "nan", "zeros"], "mostly zero", "nan"))
def test_only_long_rows_are_listed(kind, monkeypatch):
    listed = []
    reach = kernel.locate_candidates
    monkeypatch.setattr(kernel, "locate_candidates", lambda *args: listed.append(True) or reach(*args))
    lengths = torch.tensor([8192, 8193, 4097, 4096, 65, 64, 0])
    check(rows_of(kind, len(lengths), 9000, 1), 64, None, lengths, 1, "hopper")
    assert len(listed) == 1


@pytest.fixture
def counted(monkeypatch):
    """Counts rows that fell back to the radix select in global memory."""
    rows = []
    store = kernel.store_largest_of_row
    monkeypatch.setattr(kernel, "store_largest_of_row", lambda *args: rows.append(True) or store(*args))
    return rows


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", mostly_full(["normal", "one bin", "concentrated", "sorted", "nan"], "normal"))
def test_rows_without_many_ties_are_read_once(kind, counted):
    check(rows_of(kind, 2, 9000, 1), 64, None, None, 1, "hopper")
    assert not counted


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["equal", "normal, low where the sample is"])
def test_rows_with_an_insufficient_list_fall_back(kind, counted):
    logits = rows_of(kind.split(",")[0], 2, 9000, 1)
    if kind != "equal":
        runs = 4096 // 32
        logits[:, torch.arange(9000) % (9000 // runs) < 32] -= 20
    check(logits, 64, None, None, 1, "hopper")
    assert len(counted) == 2


@pytest.mark.interpreter
@pytest.mark.parametrize("change", [-20, 20])
def test_a_failed_small_sample_is_followed_by_a_larger_one(change, counted, monkeypatch):
    listed = []
    reach = kernel.locate_candidates
    monkeypatch.setattr(kernel, "locate_candidates", lambda *args: listed.append(True) or reach(*args))
    monkeypatch.setitem(launch.FIRST_SAMPLE, 1, 64)
    logits = rows_of("normal", 2, 9000, 1)
    # The two runs of the small sample.
    logits[0, :32] += change
    logits[0, 4500:4532] += change
    check(logits[:1], 300, None, None, 1, "hopper")
    assert len(listed) == 2
    assert not counted


@pytest.mark.interpreter
def test_a_row_of_several_segments_of_the_bitmap():
    logits = torch.randn(1, 70_000, generator=generator(3))
    check(logits, 2000, torch.tensor([3]), None, 1, "hopper")
