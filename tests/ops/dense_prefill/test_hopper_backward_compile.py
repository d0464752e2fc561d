"""Compile tests of the Hopper backward, without a GPU: recorded launches are compiled to cubins."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from support.compile import Launch, Recorder

from flashlatte.runtime import machine

triton = pytest.importorskip("triton")

from support import compile as support  # noqa: E402

from flashlatte.ops.dense_prefill.hopper.backward import launch  # noqa: E402
from flashlatte.ops.dense_prefill.hopper.backward.kernel import backward_kernel  # noqa: E402
from flashlatte.ops.dense_prefill.hopper.backward.rows import finish_kernel, prepare_kernel  # noqa: E402
from flashlatte.ops.dense_prefill.reference import DensePrefillGradients, DensePrefillParams  # noqa: E402

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

UNLIMITED = 2**31 - 1
KERNELS = {"prepare": prepare_kernel, "backward": backward_kernel, "finish": finish_kernel}


@pytest.fixture
def record(monkeypatch):
    """Calls the launcher and returns its launches by kernel."""
    recorders = {name: Recorder(fn) for name, fn in KERNELS.items()}
    for name, recorder in recorders.items():
        monkeypatch.setattr(launch, f"{name}_kernel", recorder)

    def call(**arguments: Any) -> dict[str, Launch]:
        for recorder in recorders.values():
            recorder.launches.clear()
        call_backward(**arguments)
        return {name: recorder.launches[0] for name, recorder in recorders.items() if recorder.launches}

    return call


def call_backward(
    tokens_q: int = 256,
    tokens_k: int = 256,
    requests: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    d_qk: int = 192,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int32,
    dlse: bool = False,
    deterministic: bool = False,
    pad: int = 0,
) -> None:
    """A call of the implementation with tensors of arbitrary contents."""

    def tensor(tokens: int, heads: int, columns: int) -> torch.Tensor:
        return torch.empty(tokens, heads, columns + pad, dtype=dtype)[..., :columns]

    q, k, v = tensor(tokens_q, heads, d_qk), tensor(tokens_k, kv_heads, d_qk), tensor(tokens_k, kv_heads, 128)
    cu_seqlens = torch.zeros(requests + 1, dtype=index_dtype)
    launch.backward(
        DensePrefillParams(q, k, v, cu_seqlens, cu_seqlens, tokens_k, d_qk**-0.5, UNLIMITED, 0, empty_lse=-math.inf),
        DensePrefillGradients(
            tensor(tokens_q, heads, 128),
            torch.empty(heads, tokens_q).T,
            tensor(tokens_q, heads, 128),
            torch.empty(tokens_q, heads) if dlse else None,
            deterministic,
            tensor(tokens_q, heads, d_qk),
            tensor(tokens_k, kv_heads, d_qk),
            tensor(tokens_k, kv_heads, 128),
        ),
    )


def compiled(launched: Launch) -> support.Compiled:
    """The machine code of a recorded launch of the main kernel."""
    return support.compile_gluon(backward_kernel, launched)


def test_dq_is_added_by_tma_reductions(record):
    code = compiled(record()["backward"])
    # Boxes of 64 x 32 of the 192 columns, from shared memory, where they were stored 16 bytes at a time.
    assert len(re.findall(r"\bUTMAREDG\.3D\.ADD\b", code.sass)) >= 192 // 32
    assert len(re.findall(r"\bSTS\.128\b", code.sass)) >= 64 * 192 // (4 * 128)
    assert not re.search(r"\bREDG?\.", code.sass)


def test_rows_kernels_compile(record):
    launched = record(dlse=True, deterministic=True)
    for name in ("prepare", "finish"):
        code = support.compile_launch(KERNELS[name], launched[name], 90)
        assert code.spills == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_workspace(record, deterministic):
    launched = record(tokens_q=300, heads=4, requests=3, deterministic=deterministic)["backward"].arguments
    assert launched["dq_sums"].base.shape == (4, 300, 192)
    lse, delta = launched["inputs_lse"], launched["inputs_delta"]
    assert lse.shape == delta.shape == (4, 300)
    assert {x.dtype for x in (launched["dq_sums"].base, lse, delta)} == {torch.float32}
    # One semaphore per tile of queries of a head.
    semaphores = launched["dq_semaphores"]
    assert (semaphores is not None) == deterministic
    assert semaphores is None or semaphores.shape == (4, 300 // 64 + 3 + 2)


@pytest.mark.parametrize(("tokens_k", "requests"), [(1, 1), (128, 1), (1000, 16)])
def test_grid_has_a_program_for_every_block_of_keys(record, tokens_k, requests):
    launched = record(tokens_k=tokens_k, requests=requests, kv_heads=2)["backward"]
    assert launched.grid == (2 * (tokens_k // 128 + requests + 2),)
    assert 2 ** launched.arguments["bisections"] > requests + 1


@pytest.mark.parametrize("tokens", [{"tokens_q": 0}, {"tokens_k": 0}])
def test_empty_calls_launch_nothing(record, tokens):
    assert record(**tokens) == {}


def test_a_misaligned_buffer_is_an_error(record):
    bytes_ = torch.empty(2 * 64 * 4 * 192 + 8, dtype=torch.int8)
    start = 2 if bytes_.data_ptr() % 16 == 0 else 0
    q = torch.frombuffer(bytes_.numpy().data[start:], dtype=torch.bfloat16)[: 64 * 4 * 192].view(64, 4, 192)
    k, v, lse = torch.zeros(64, 4, 192).bfloat16(), torch.zeros(64, 4, 128).bfloat16(), torch.zeros(64, 4)
    cu = torch.zeros(2, dtype=torch.int32)
    params = DensePrefillParams(q, k, v, cu, cu, 64, 0.1, UNLIMITED, 0, empty_lse=-math.inf)
    with pytest.raises(ValueError, match=r"^q must begin at a multiple of 16 bytes for backend='hopper', got 0x"):
        launch.backward(params, DensePrefillGradients(v, lse, v, None, False, q, k, v))
