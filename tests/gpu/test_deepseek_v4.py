"""DeepSeek-V4's operations and layer on a GPU: kernels compared with the reference, and steps in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.harness import DEVICE, bits

import flashlatte
from flashlatte import kv_cache
from flashlatte.kv_cache.registry import as_format
from flashlatte.layers import V4Attention, V4Cache, V4Config, V4IndexerConfig, V4Step, WorkspaceLimits
from flashlatte.layers.v4.hyper_connection import read_streams
from flashlatte.ops.mhc import mhc_post, mhc_pre

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
BACKENDS = ("portable", "reference")


def share_that_differs(a: torch.Tensor, b: torch.Tensor) -> float:
    """The fraction of different elements: another order of summation changes about 0.1% of the roundings."""
    return (bits(a) != bits(b)).float().mean().item()


def table(positions: int = 5000, rope_dim: int = 64) -> torch.Tensor:
    angles = torch.rand(positions, rope_dim // 2, device=DEVICE) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def compress_arguments(form: str, ratio: int, spans: list[tuple[int, int]], dtype: torch.dtype) -> dict[str, Any]:
    head_dim = 128 if form.startswith("index") else 512
    width = head_dim * (2 if ratio == 4 else 1)
    requests, tokens = len(spans), sum(end - begin for begin, end in spans)
    both = torch.randn(tokens, 2 * width, device=DEVICE).to(dtype)
    ids = torch.cat([torch.full((end - begin,), i) for i, (begin, end) in enumerate(spans)])
    positions = torch.cat([torch.arange(begin, end) for begin, end in spans])
    pages = max(end for _, end in spans) // ratio // 64 + 1
    return {
        "kv": both[:, :width],
        "score": both[:, width:],
        "ape": torch.randn(ratio, width, device=DEVICE),
        "weight": torch.rand(head_dim, device=DEVICE) + 0.5,
        "cos_sin": table(),
        "request_ids": ids.to(DEVICE, torch.int32),
        "positions": positions.to(DEVICE),
        "cache": kv_cache.allocate(as_format(form, head_dim), requests * pages, 64, device=DEVICE),
        "slot_mapping": (ids * pages * 64 + positions // ratio).to(DEVICE),
        "state_cache": torch.randn(3 * requests, ratio, 2 * width, device=DEVICE),
        "state_table": torch.arange(3 * requests, device=DEVICE, dtype=torch.int32).view(requests, 3),
    }


@pytest.mark.parametrize("form", ["model1", "bf16", "fp32", "index_fp8", "index_mxfp4"])
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_compress(form: str, ratio: int, dtype: torch.dtype) -> None:
    arguments = compress_arguments(form, ratio, [(255, 256), (0, 700), (5, 8), (1023, 1024), (77, 3000)], dtype)
    found = []
    for backend in ("portable", *BACKENDS):
        own = {name: arguments[name].clone() for name in ("cache", "state_cache")}
        flashlatte.compress(**{**arguments, **own}, backend=backend)
        found.append(own)
    assert bits(found[0]["cache"]).equal(bits(found[1]["cache"]))
    assert found[1]["state_cache"].equal(found[2]["state_cache"])
    if form == "fp32":
        torch.testing.assert_close(found[1]["cache"], found[2]["cache"], rtol=1e-4, atol=1e-4)
    else:
        assert share_that_differs(found[1]["cache"], found[2]["cache"]) < 5e-3


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_compress_however_divided(ratio: int, dtype: torch.dtype) -> None:
    arguments = compress_arguments("model1", ratio, [(0, 400)], dtype)
    whole, divided, at = arguments["cache"].clone(), arguments["cache"].clone(), 0
    flashlatte.compress(**{**arguments, "cache": whole}, backend="portable")
    of_tokens = ("kv", "score", "request_ids", "positions", "slot_mapping")
    for count in (1, 5, 2, 130, 3, 250, 9):
        part = {name: arguments[name][at : at + count] for name in of_tokens}
        flashlatte.compress(**{**arguments, **part, "cache": divided}, backend="portable")
        at += count
    assert bits(divided).equal(bits(whole))


@pytest.mark.parametrize("form", ["model1", "bf16"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_rotate_and_cache(form: str, tokens: int) -> None:
    q, kv = (torch.randn(*shape, device=DEVICE).to(BF16) for shape in ((tokens, 64, 512), (tokens, 512)))
    where = torch.randint(0, 5000, (tokens,), device=DEVICE), torch.randperm(512, device=DEVICE)[:tokens]
    cos_sin, outs, caches = table(), [], []
    for backend in BACKENDS:
        caches.append(kv_cache.allocate(as_format(form, 512), 8, 64, device=DEVICE))
        outs.append(
            flashlatte.rotate_and_cache(q, kv, cos_sin, where[0], caches[-1], where[1], out=q.clone(), backend=backend)
        )
    torch.testing.assert_close(outs[0], outs[1], rtol=2.0**-7, atol=2.0**-7)
    assert share_that_differs(caches[0], caches[1]) < 5e-3
    in_place = q.clone()
    flashlatte.rotate_and_cache(in_place, kv, cos_sin, where[0], caches[0], where[1], out=in_place, backend="portable")
    assert in_place.equal(outs[0])


@pytest.mark.parametrize("packed", [False, True])
def test_inverse_rope_quantize(packed: bool) -> None:
    o, positions, cos_sin = torch.randn(301, 64, 512, device=DEVICE).to(BF16), torch.arange(301, device=DEVICE), table()
    (values, scales), (expected, wanted_scales) = (
        flashlatte.inverse_rope_quantize(o, cos_sin, positions, 8, packed_scales=packed, backend=backend)
        for backend in BACKENDS
    )
    assert share_that_differs(values.contiguous(), expected.contiguous()) < 2e-3
    assert share_that_differs(scales.contiguous(), wanted_scales.contiguous()) < 2e-3


def test_norms_and_index_queries() -> None:
    both, weights = torch.randn(77, 1536, device=DEVICE).to(BF16), torch.rand(1536, device=DEVICE)
    (q_rows, kv_rows), (q_weight, kv_weight) = both.split((1024, 512), dim=1), weights.split((1024, 512))
    found = [flashlatte.q_kv_norm(q_rows, kv_rows, q_weight, kv_weight, backend=backend) for backend in BACKENDS]
    for part, expected in zip(*found, strict=True):
        torch.testing.assert_close(part, expected, rtol=2.0**-7, atol=2.0**-7)
    q, head_weights = torch.randn(77, 64, 128, device=DEVICE).to(BF16), torch.randn(77, 64, device=DEVICE)
    positions = torch.arange(77, device=DEVICE)
    arguments = q, head_weights, table(), positions
    found = [flashlatte.index_query_mxfp4(*arguments, backend=backend) for backend in BACKENDS]
    assert share_that_differs(found[0][0], found[1][0]) < 2e-3
    assert share_that_differs(found[0][1], found[1][1]) < 2e-3
    torch.testing.assert_close(found[0][2], found[1][2])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("tokens", "width"), [(1, 4096), (300, 2048), (3, 1500)])
def test_mhc(dtype: torch.dtype, tokens: int, width: int) -> None:
    streams, projected = torch.randn(tokens, 4, width, device=DEVICE).to(dtype), torch.randn(tokens, 24, device=DEVICE)
    base, scale = torch.randn(24, device=DEVICE), torch.randn(3, device=DEVICE)
    made, expected = (mhc_pre(streams, projected, base, scale, backend=backend) for backend in (None, "reference"))
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.01 if a.dtype == BF16 else 1e-4, atol=1e-4)
    for a, b in zip(mhc_pre(streams, projected, base, scale), made, strict=True):
        assert a.equal(b)
    after, exact = (mhc_post(made[2], streams, *made[:2], backend=backend) for backend in (None, "reference"))
    torch.testing.assert_close(after, exact, rtol=0.01 if dtype == BF16 else 1e-5, atol=1e-2 if dtype == BF16 else 1e-5)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 512, 513, 700])
def test_streams_are_projected_in_float32(dtype: torch.dtype, tokens: int) -> None:
    streams, weight = torch.randn(tokens, 4, 2048, device=DEVICE).to(dtype), torch.randn(24, 8192, device=DEVICE)
    projected = streams.flatten(1).double() @ weight.double().T
    scale, base, norm = torch.ones(3, device=DEVICE), torch.zeros(24, device=DEVICE), SimpleNamespace(eps=1e-6)
    module = SimpleNamespace(fn=weight, base=base, scale=scale, input_norm=norm, hc_eps=1e-6, hc_sinkhorn_iters=20)
    expected = mhc_pre(streams, projected.float(), base, scale)
    for a, b in zip(read_streams(module, streams, None), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.01 if a.dtype == BF16 else 1e-3, atol=1e-2 if a.dtype == BF16 else 1e-4)


def test_index_workspace() -> None:
    cu_seqlens, lengths = torch.tensor([0, 100, 101, 300], device=DEVICE), torch.tensor([900, 40, 200], device=DEVICE)
    indices = torch.randint(-1, 200, (300, 512), device=DEVICE, dtype=torch.int32)
    sizes: dict[str, Any] = {"window": 128, "ratio": 4, "workspace_rows": 2000, "window_row": 300}
    found = [flashlatte.index_workspace(indices, cu_seqlens, lengths, 300, **sizes, backend=one) for one in BACKENDS]
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])


def layer_of(ratio: int) -> tuple[V4Attention, V4Cache, torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """A layer with caches for two requests of 512 tokens."""
    torch.manual_seed(ratio)
    config = V4Config(hidden_size=1024, ratio=ratio, indexer=V4IndexerConfig() if ratio == 4 else None)
    layer = V4Attention(config, dtype=BF16, device=DEVICE)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02 if parameter.dim() > 1 else 1.0)
    cache = V4Cache.allocate(config, 16, 64, state_pages=6, state_page_size=max(ratio, 1), device=DEVICE)
    pages = torch.arange(16, device=DEVICE, dtype=torch.int32).view(2, 8)
    states = torch.arange(6, device=DEVICE, dtype=torch.int32).view(2, 3)
    return layer, cache, pages, {ratio: (pages, states)} if ratio else {}


def clone(cache: V4Cache) -> V4Cache:
    copies: dict[str, Any] = {name: value.clone() for name, value in cache.tensors.items()}
    return replace(cache, **copies)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("over_workspace", [False, True])
def test_layer(ratio: int, over_workspace: bool) -> None:
    """Prefill and a few tokens, over pages only, or with prefill over a workspace."""
    limits = WorkspaceLimits(min_queries=90) if over_workspace else None
    layer, cache, pages, groups = layer_of(ratio)
    hidden, outs = torch.randn(390, 1024, device=DEVICE).to(BF16), []
    for backend in (None, "reference"):
        layer.backend, own, parts = backend, clone(cache), []
        for spans in ([(0, 300), (0, 90)], [(300, 303), (90, 97)]):
            step = V4Step.from_spans(spans, pages, groups, limits=None if backend else limits)
            parts.append(layer(hidden[-len(step.positions) :], step, own).float())
        outs.append(torch.cat(parts))
    error = (outs[0] - outs[1]).norm() / outs[1].norm()
    # An index key that is rounded differently may select another group.
    assert error < (0.1 if ratio == 4 else 0.02)


@pytest.mark.parametrize("ratio", [4, 128])
def test_decode_in_a_graph(ratio: int) -> None:
    """Lengths change between replays, and some replays complete groups."""
    layer, cache, pages, groups = layer_of(ratio)
    ids, positions = torch.arange(2, device=DEVICE), torch.tensor([10, 250], device=DEVICE)
    x, hidden = torch.zeros(2, 1024, device=DEVICE, dtype=BF16), torch.randn(18, 1024, device=DEVICE).to(BF16)
    replayed, eager = clone(cache), clone(cache)

    def decode(own: V4Cache) -> torch.Tensor:
        return layer(x, V4Step.build(ids, positions, pages, groups), own)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decode(clone(cache))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = decode(replayed)
    for i in range(9):
        positions.copy_(torch.tensor([10 + i, 250 + i]))
        x.copy_(hidden[2 * i : 2 * i + 2])
        graph.replay()
        assert out.equal(decode(eager))


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_step_that_a_graph_captured_serves_eager_calls(ratio: int) -> None:
    """Values shared between layers are not computed if the graph has not been replayed."""
    layer, cache, pages, groups = layer_of(ratio)
    ids, positions = torch.arange(2, device=DEVICE), torch.tensor([10, 250], device=DEVICE)
    hidden = torch.randn(2, 1024, device=DEVICE).to(BF16)
    expected = layer(hidden, V4Step.build(ids, positions, pages, groups), clone(cache))
    step, captured = V4Step.build(ids, positions, pages, groups), clone(cache)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(hidden, step, captured)
    assert layer(hidden, step, clone(cache)).equal(expected)
