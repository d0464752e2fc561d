"""Compile tests of the Hopper kernel, without a GPU: recorded launches are compiled to cubins."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support import attention_calls
from support.attention_calls import Recorded
from support.compile import Launch, Recorder, variant_key
from support.later_spills import allowed
from support.marks import mostly_full

from flashlatte import sparse_prefill
from flashlatte.runtime import dispatch, machine

triton = pytest.importorskip("triton")

from support import compile as support  # noqa: E402

from flashlatte.ops.sparse_prefill import by_token  # noqa: E402
from flashlatte.ops.sparse_prefill.hopper import launch, unions  # noqa: E402
from flashlatte.ops.sparse_prefill.hopper.kernel import sparse_prefill_kernel  # noqa: E402
from flashlatte.ops.sparse_prefill.reference import SparsePrefillParams  # noqa: E402

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


def compiled(key: str) -> support.Compiled:
    """The machine code of a recorded launch, by its variant key."""
    return support.compile_gluon(sparse_prefill_kernel, LAUNCHES[key])


LAUNCHES: dict[str, Launch] = {}


@pytest.fixture
def recorded(monkeypatch):
    """Calls the launcher and returns its launch and variant key."""
    recorder = Recorder(sparse_prefill_kernel)
    monkeypatch.setattr(unions, "union_kernel", Recorder(unions.union_kernel))
    monkeypatch.setattr(by_token, "sparse_prefill_kernel", Recorder(by_token.sparse_prefill_kernel))
    monkeypatch.setattr(launch, "sparse_prefill_kernel", recorder)
    monkeypatch.setattr(machine, "num_sms", lambda _: 132)

    def record(**call: Any) -> tuple[Launch, str]:
        recorder.launches.clear()
        prefill(**call)
        (only,) = recorder.launches
        key = variant_key(sparse_prefill_kernel, only)
        LAUNCHES[key] = only
        return only, key

    return record


def prefill(**call: Any) -> None:
    """A call of the implementation with tensors of arbitrary contents: ``attention_calls.sparse_prefill``."""

    def run(operation: str, backend: str, params: SparsePrefillParams, *, arch: int | None) -> list[Recorded]:
        launch.sparse_prefill(params)
        return []

    attention_calls.sparse_prefill(run, "hopper", **call)


CALLS = {
    "bf16 576": {"head_dim": 576},
    "bf16 512": {"head_dim": 512},
    "bf16 576, lengths": {"head_dim": 576, "lengths": True},
    "fp16 512, int64 indices": {"head_dim": 512, "dtype": torch.float16, "index_dtype": torch.int64, "lengths": True},
    "bf16 576, no sinks": {"head_dim": 576, "sinks": False},
}


@pytest.mark.full
def test_every_warpgroup_reads_the_lengths(recorded):
    _, key = recorded(lengths=True)
    # Loads for the first and for the next tile. A warpgroup that reused the first length would deadlock.
    assert len(re.findall(r"tt\.load [^\n]*: !tt\.ptr<i32>", compiled(key).ttgir)) == 3 * 2


@pytest.mark.full
def test_out_is_stored_by_tma(recorded):
    launched, key = recorded()
    code = compiled(key).sass
    # One half per consumer, with a cache policy (``desc``) and the descriptor in the first parameter.
    stores = re.findall(r"\bUTMASTG\S* (.*?) ;", code)
    assert len(stores) >= 2
    assert all("desc[" in store for store in stores)
    assert next(iter(launched.arguments)) == "output_descriptor"
    # Two statistics of 64 rows, at full and partial height.
    assert len(re.findall(r"\bSTG\b", code)) <= 4


@pytest.mark.parametrize("name", mostly_full(CALLS, "bf16 576, lengths"))
def test_copies_of_q_are_encoded_correctly(recorded, name):
    """ptxas encodes copies with a cache policy and a uniform register in their address wrongly.

    They are disassembled as copies by an odd register pair.
    """
    _, key = recorded(**CALLS[name])
    copies = re.findall(r"\bLDGSTS\S* \[(.*?)\], desc\[UR(\d+)\]", compiled(key).sass)
    assert len(copies) >= 3 * 64 * CALLS[name]["head_dim"] // (8 * 128)
    for address, policy in copies:
        assert "UR" not in address
        assert int(policy) % 2 == 0


@pytest.mark.parametrize(("s_q", "heads", "grid"), [(1, 16, 1), (3, 64, 3), (3, 65, 6), (200, 128, 132)])
def test_grid_covers_the_tiles(recorded, s_q, heads, grid):
    launched, _ = recorded(s_q=s_q, heads=heads)
    assert launched.grid == (grid,)
    assert launched.arguments["work_tiles"] == s_q * -(-heads // 64)


@pytest.mark.parametrize(
    ("s_q", "heads", "topk", "s_kv", "group"),
    [
        (4096, 8, 2048, 131072, 4),
        (4096, 16, 2048, 131072, 4),
        (4096, 17, 2048, 32768, 2),
        (512, 32, 2048, 32768, 2),
        (4096, 33, 2048, 32768, 1),
        # Groups would leave most SMs idle.
        (128, 16, 2048, 32768, 1),
        (600, 16, 2048, 32768, 1),
        # Building lists would cost more than it saves.
        (4096, 16, 2048, 131073, 1),
        (4096, 32, 2048, 32769, 1),
        (4096, 16, 511, 8192, 1),
        # An entry of a list would have no room for the position.
        (4096, 16, 2**26, 2**27 + 1, 1),
    ],
)
def test_queries_per_tile(s_q, heads, topk, s_kv, group):
    assert launch.queries_per_tile(s_q, heads, topk, s_kv, 132) == group


@pytest.mark.full
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 576), (32, 576), (16, 512), (32, 512)])
def test_tiles_of_several_tokens(recorded, heads, head_dim):
    launched, key = recorded(s_q=527, heads=heads, head_dim=head_dim, topk=512, lengths=True)
    group = 64 // heads
    assert launched.grid == (min(132, -(-527 // group)),)
    assert launched.arguments["GROUP"] == group
    code = compiled(key)
    assert code.hgmma > 0
    assert code.shared <= support.SHARED_BYTES[90]
    assert support.loop_spills(code.sass) <= allowed(f"sparse_prefill hopper 90, head_dim {head_dim}", 0)


def test_kv_is_not_copied(recorded):
    launched, _ = recorded(kv_pad=8)
    assert launched.arguments["kv"].stride(0) == 584
    assert launched.arguments["kv_stride"] == 584 // 8


def call(head_dim: int = 576, head_dim_v: int = 512, rows_aligned: bool = True) -> dispatch.CallSpec:
    return dispatch.CallSpec(
        "sparse_prefill",
        torch.device("cuda", 0),
        torch.bfloat16,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        h_q=128,
        h_kv=1,
        rows_aligned=rows_aligned,
    )


def refusal(of: dispatch.CallSpec) -> str | None:
    return {choice.backend: choice.refusal for choice in dispatch.explain(of)}["hopper"]


def test_refuses_misaligned_rows(monkeypatch):
    monkeypatch.setattr("flashlatte.runtime.machine.compute_capability", lambda _: (9, 0))
    assert refusal(call()) is None
    assert refusal(call(rows_aligned=False)) == "takes tensors whose rows begin at multiples of 16 bytes"
    assert dispatch.select(call(rows_aligned=False)) == "portable"


@pytest.mark.parametrize("misaligned", ["q", "kv", "out"])
def test_refusal_names_misaligned_rows(monkeypatch, misaligned):
    calls = []
    monkeypatch.setattr(dispatch, "select", lambda call, _: calls.append(call) or "reference")
    shapes = {"q": (2, 3, 576), "kv": (4, 1, 576), "out": (2, 3, 512)}
    tensors: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    indices = torch.zeros(2, 1, 5, dtype=torch.int32)
    sparse_prefill(indices=indices, **tensors)
    *rows, columns = shapes[misaligned]
    tensors[misaligned] = torch.zeros(*rows, columns + 1, dtype=torch.bfloat16)[..., :columns]
    sparse_prefill(indices=indices, **tensors)
    assert [call.rows_aligned for call in calls] == [True, False]


def test_a_misaligned_buffer_is_an_error(recorded):
    bytes_ = torch.empty(2 * 64 * 576 + 8, dtype=torch.int8)
    start = 2 if bytes_.data_ptr() % 16 == 0 else 0
    kv = torch.frombuffer(bytes_.numpy().data[start:], dtype=torch.bfloat16)[: 64 * 576].view(64, 1, 576)
    assert kv.storage_offset() == 0
    params: Any = attention_calls.sparse_prefill(lambda _, __, params, arch: params, "hopper")
    with pytest.raises(ValueError, match=r"^kv must begin at a multiple of 16 bytes for backend='hopper', got 0x"):
        launch.sparse_prefill(params._replace(kv=kv))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(576, 256), (640, 512), (128, 128)])
def test_refuses_other_head_dims(monkeypatch, head_dim, head_dim_v):
    monkeypatch.setattr("flashlatte.runtime.machine.compute_capability", lambda _: (9, 0))
    reason = f"takes head dims 576 with 512 or 512 with 512, not {head_dim} with {head_dim_v}"
    assert refusal(call(head_dim, head_dim_v)) == reason
