"""Launches of operations: scratch, grids, and compiler assumptions on which the safety of a kernel depends."""

import importlib
import re

import pytest
from support.calls import CALLS, FP8
from support.compile import loop_spills
from support.recording import NUM_SMS, Recording

from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

MOST_SCRATCH = 64 << 20


@pytest.fixture
def launches(monkeypatch):
    record = Recording(monkeypatch)

    def call(operation, backend, **arguments):
        importlib.import_module(f"flashlatte.ops.{operation.removesuffix('_backward')}")
        return CALLS[operation](record, backend, **arguments)

    return call


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("dense_decode", {"columns": 2048}),
        ("dense_decode", {"columns": 2048, "batch_invariant": True}),
        ("sparse_decode", {"topk": 640}),
        ("sparse_decode", {"topk": 2048, "lengths": True}),
    ],
    ids=str,
)
def test_scratch_is_bounded(launches, operation, backend, call):
    sizes = []
    for batch in (1, 5, 128, 1000):
        for one in launches(operation, backend, batch=batch, **call):
            scratch = one.launch.arguments.get("scratch")
            sizes.append(0 if scratch is None else scratch.nbytes)
    assert 0 < max(sizes) <= MOST_SCRATCH


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize(
    ("operation", "call"), [("dense_decode", {"columns": 2048}), ("sparse_decode", {"topk": 16_384})]
)
def test_a_call_of_one_request_fills_the_gpu(launches, operation, backend, call):
    (first, *_) = launches(operation, backend, batch=1, s_q=1, **call)
    assert first.launch.grid[0] > 60


@pytest.mark.parametrize(
    ("operation", "backend"),
    [
        ("sparse_prefill", "portable"),
        ("sparse_attention_backward", "portable"),
        ("sparse_attention_backward", "hopper"),
        ("indexer_loss", "portable"),
        ("indexer_loss", "hopper"),
        ("dense_prefill", "portable"),
        ("dense_prefill_backward", "portable"),
    ],
)
def test_grids_of_many_tokens_have_one_axis(launches, operation, backend):
    """The other axes of a grid are limited to 65,535."""
    call = {"tokens": 70_000} if operation.startswith("dense") else {"s_q": 70_000, "heads": 1}
    found = launches(operation, backend, **call)
    assert found
    assert all(len(one.launch.grid) == 1 for one in found)


@pytest.mark.parametrize("heads", [64, 128])
def test_launches_of_deterministic_sparse_attention_fill_all_sms(launches, heads):
    """An SM runs one program at a time: 448 programs would take as long as 528 on 132 SMs."""
    options = {"heads": heads, "s_q": 400, "topk": 2048, "deterministic": True}
    found = launches("sparse_attention_backward", "hopper", **options)
    for name in ("query_gradients_kernel", "key_gradients_kernel"):
        *grids, _ = [one.launch.grid[0] for one in found if one.name == name]
        assert grids
        assert not any(programs % NUM_SMS for programs in grids), grids


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("dense_decode", {}),
        pytest.param("sparse_prefill", {}, marks=pytest.mark.full),
        pytest.param("sparse_decode", {"form": "bf16", "lengths": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_tile_is_not_loaded_again_while_it_is_multiplied(launches, operation, call):
    """Two buffers of tiles suffice if every product in the loop is waited for immediately."""
    code = launches(operation, "portable", heads=128, **call)[0].compile()
    assert "memdesc<2x64x512xbf16" in code.ttgir
    assert set(re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", code.ttgir)) == {"0"}


@pytest.mark.parametrize(
    ("call", "by_tma"),
    [
        ({}, True),
        pytest.param({"page_size": 128, "h_kv": 2, "head_dim": 512}, True, marks=pytest.mark.full),
        pytest.param({"page_size": 32}, False, marks=pytest.mark.full),
        pytest.param({"heads": 32}, False, marks=pytest.mark.full),
        pytest.param({"d_v": 500}, False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_dense_decode_loads_tiles_by_tma_where_pages_hold_them(launches, call, by_tma):
    code = launches("dense_decode", "portable", **{"heads": 128, **call})[0].compile()
    assert ("UTMALDG" in code.sass) == by_tma


@pytest.mark.full
@pytest.mark.parametrize("call", [{"batch": 1}, {"batch": 64}, {"batch": 4, "cache_dtype": FP8}], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_combine_spills_nothing(launches, call, batch_invariant):
    found = launches("dense_decode", "portable", **call, batch_invariant=batch_invariant)
    (combine,) = {one.variant: one for one in found if "combine" in one.name}.values()
    assert combine.compile().spills == 0


@pytest.mark.full
def test_one_loop_whose_products_run_on(launches):
    """Two consecutive loops would make ptxas serialize all products: see docs/kernels/portable.md."""
    (forward,) = launches("dense_prefill", "portable")
    code = forward.compile()
    assert loop_spills(code.sass) == 0
    # An instruction sums over 16: dims of a key, then keys of a step.
    assert code.hgmma == (192 + forward.launch.arguments["STEP"].block_n) // 16, code
