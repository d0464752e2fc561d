"""What the compiler makes of dense prefill's Triton kernels, for GPUs that are not here."""

from __future__ import annotations

import random

import pytest
import torch
from support.compile import SHARED_BYTES, Compiled, Launch, Recorder, compile_launch, loop_spills, variant_key

from flashlatte.ops.dense_prefill.portable import launch as portable
from flashlatte.runtime import dispatch

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="compiles, which the interpreter does not")

CLASSES = {80: "ampere", 86: "small", 90: "hopper", 100: "blackwell"}
KERNELS = ("forward_kernel", "row_sums_kernel", "keys_kernel", "queries_kernel")


@pytest.fixture
def launches(monkeypatch):
    """The launches that a GPU of a compute capability would get, without the GPU, by kernel."""
    recorders = {name: Recorder(getattr(portable, name)) for name in KERNELS}
    for name, recorder in recorders.items():
        monkeypatch.setattr(portable, name, recorder)

    def record(
        arch: int = 90,
        tokens: int = 64,
        requests: int = 2,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 192,
        d_v: int = 128,
        window: tuple[int, int] = (2**31 - 1, 0),
        dtype: torch.dtype = torch.bfloat16,
    ) -> dict[str, Launch]:
        monkeypatch.setattr(portable, "gpu_class", lambda _: CLASSES[arch])
        for recorder in recorders.values():
            recorder.launches.clear()
        q, out = (torch.empty(tokens, heads[0], width, dtype=dtype) for width in (head_dim, d_v))
        k, v = (torch.empty(tokens + 1, heads[1], width, dtype=dtype) for width in (head_dim, d_v))
        lse = torch.empty(heads[0], tokens).T
        lengths = torch.empty(requests + 1, dtype=torch.int32), torch.empty(requests + 1, dtype=torch.int32)
        portable.forward(q, k, v, *lengths, tokens, tokens, 0.1, *window, float("-inf"), out, lse)
        gradients = (torch.empty_like(x) for x in (q, k, v))
        portable.backward(out, lse, q, k, v, out, lse, *lengths, tokens, tokens, 0.1, *window, False, *gradients)
        return {name: recorder.launches[0] for name, recorder in recorders.items()}

    record.kernels = {name: recorder.fn for name, recorder in recorders.items()}
    return record


def compiled_for(launches, kernel: str, arch: int, **call) -> Compiled:
    return compile_launch(launches.kernels[kernel], launches(arch, **call)[kernel], arch)


@pytest.mark.parametrize("head_dim", [192, 128])
@pytest.mark.parametrize(("kernel", "products"), [("forward_kernel", 2), ("keys_kernel", 4), ("queries_kernel", 3)])
def test_on_hopper(launches, kernel, products, head_dim):
    compiled = compiled_for(launches, kernel, 90, head_dim=head_dim)
    assert compiled.shared <= SHARED_BYTES[90], compiled
    assert compiled.hmma == 0, compiled
    assert compiled.hgmma >= products * 4, compiled
    assert compiled.async_copies > 0, compiled
    # dK and dV of 128 keys leave few registers.
    assert loop_spills(compiled.sass) <= (24 if (kernel, head_dim) == ("keys_kernel", 192) else 0), compiled


def test_one_loop_whose_products_run_on(launches):
    """Two loops in a row would make ptxas serialise all of them: see docs/kernels/portable.md."""
    compiled = compiled_for(launches, "forward_kernel", 90)
    assert compiled.hgmma == (192 + 128) // 16, compiled


@pytest.mark.parametrize("kernel", ["forward_kernel", "keys_kernel", "queries_kernel"])
@pytest.mark.parametrize("arch", [80, 86])
def test_fits_other_gpus(launches, arch, kernel):
    compiled = compiled_for(launches, kernel, arch)
    assert compiled.shared <= SHARED_BYTES[arch], compiled
    assert compiled.async_copies > 0, compiled
    if kernel != "keys_kernel":
        assert loop_spills(compiled.sass) == 0, compiled


def test_row_sums(launches):
    compiled = compiled_for(launches, "row_sums_kernel", 90)
    assert compiled.spills == 0, compiled


@pytest.mark.parametrize("kernel", ["forward_kernel", "keys_kernel", "queries_kernel"])
@pytest.mark.parametrize("arch", [86, 90])
def test_widest_rows_fit(launches, arch, kernel):
    compiled = compiled_for(launches, kernel, arch, head_dim=256, d_v=256)
    assert compiled.shared <= SHARED_BYTES[arch], compiled


def test_new_lengths_batches_and_windows_compile_nothing(launches):
    rng = random.Random(0)
    recorded = [
        launches(
            tokens=rng.randint(1, 500),
            requests=rng.randint(1, 20),
            heads=(8 * rng.randint(1, 4), rng.choice((1, 2, 8))),
            window=(rng.randint(0, 2**31 - 1), rng.choice((0, 5, 2**31 - 1))),
        )
        for _ in range(20)
    ]
    for kernel, fn in launches.kernels.items():
        assert len({variant_key(fn, one[kernel]) for one in recorded}) == 1, kernel


def test_grids_have_one_axis_and_follow_tokens_and_requests(launches):
    for kernel, launch in launches(tokens=70_000, requests=3, heads=(128, 128)).items():
        assert len(launch.grid) == 1, kernel
        assert launch.grid[0] <= 128 * (70_001 // 32 + 5), kernel
