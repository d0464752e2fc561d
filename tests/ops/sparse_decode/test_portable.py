"""Sparse decode's Triton kernel against the reference, in Triton's interpreter."""

# Triton's annotations and calls are not Python's.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from support.marks import mostly_full

from flashlatte import kv_cache, sparse_decode
from flashlatte.kernels.triton.config import AttentionConfig, choose
from flashlatte.ops.sparse_decode.portable import launch, tiles
from flashlatte.runtime import machine
from flashlatte.split_kv import combine
from flashlatte.testing import compare
from flashlatte.testing.cases import SparseDecodeCase

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

V32 = SparseDecodeCase(batch=2, s_q=2, s_k=60, h_q=4, topk=37, page_size=7)
NO_ROPE = replace(V32, cache_format="v32_no_rope")
MODEL1 = replace(V32, cache_format="model1")
V41 = replace(V32, cache_format="v41")
PLAIN = replace(V32, cache_format="bf16", head_dim=48, head_dim_v=32)
LENGTHS = {"topk_lengths": "token", "extra_topk_lengths": "request"}
EXTRA = {"extra_topk": 20, "extra_s_k": 30, "extra_page_size": 3}
CASES = {
    "v32": V32,
    "v32, lengths": replace(V32, topk_lengths="request"),
    "v32, many heads": replace(V32, batch=1, h_q=40),
    "v32, extra": replace(V32, **EXTRA),
    "v32, fp16 queries": replace(V32, dtype=torch.float16),
    "v32, narrow values": replace(V32, head_dim_v=100),
    "v32_no_rope": NO_ROPE,
    "v32_no_rope, extra and lengths": replace(NO_ROPE, **EXTRA, **LENGTHS),
    "model1": MODEL1,
    "model1, extra and lengths": replace(MODEL1, **EXTRA, **LENGTHS),
    "model1, gaps": replace(MODEL1, batch=1, strided=True),
    "v41": V41,
    "v41, extra and lengths": replace(V41, **EXTRA, **LENGTHS),
    "v41, fp16 queries": replace(V41, dtype=torch.float16),
    "v41_fp4": replace(V41, cache_format="v41_fp4"),
    "v41_fp4, gaps": replace(V41, cache_format="v41_fp4", batch=1, strided=True),
    "plain": PLAIN,
    "plain, no rope": replace(PLAIN, head_dim=32),
    "plain, odd sizes": replace(PLAIN, head_dim=37, head_dim_v=20, h_q=3),
    "plain, extra and lengths": replace(PLAIN, **EXTRA, **LENGTHS),
    "plain, lengths of requests": replace(PLAIN, topk_lengths="request"),
    "plain, pages of one token": replace(PLAIN, page_size=1),
    "plain, one key": replace(PLAIN, topk=1),
    "plain, every token twice": replace(PLAIN, topk=70, duplicates=True),
    "plain, empty rows": replace(PLAIN, s_q=4, empty_rows=0.5, zero_lengths=True),
    "plain, all rows empty": replace(PLAIN, empty_rows=1.0),
    "plain, gaps": replace(PLAIN, strided=True),
    "plain, no sink": replace(PLAIN, attn_sink=False),
    "plain, int64 indices": replace(PLAIN, index_dtype=torch.int64, topk_lengths="token"),
    "plain, fp16": replace(PLAIN, cache_format="fp16", dtype=torch.float16),
    "plain, mla": replace(V32, cache_format="bf16", batch=1, head_dim=576),
}


@pytest.fixture(autouse=True)
def few_combining_ctas(monkeypatch):
    """Fewer combine CTAs, since each is slow in the interpreter."""
    monkeypatch.setattr(combine, "_TILES", (combine.CombineTile(16, 512, 4),))


@pytest.fixture
def many_parts(monkeypatch):
    monkeypatch.setattr(machine, "num_sms", lambda _: 7)


def decode(arguments, **more):
    q = arguments["q"]
    outputs = {
        "out": torch.full((*q.shape[:3], arguments["head_dim_v"]), torch.nan, dtype=q.dtype),
        "lse": torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan),
    }
    return sparse_decode(**(outputs | arguments), backend="portable", **more)


def check(arguments, **more):
    out, lse = decode(arguments, **more)
    expected_out, expected_lse = sparse_decode(**arguments, backend="reference", **more)
    compare.assert_close(out, expected_out, compare.SPARSE_DECODE_OUT, "out")
    compare.assert_close(lse, expected_lse, compare.DECODE_LSE, "lse")
    return out, lse


QUICK = (
    "v32",
    "v32, fp16 queries",
    "model1, extra and lengths",
    "v41",
    "v41_fp4",
    "plain, odd sizes",
    "plain, lengths of requests",
    "plain, every token twice",
    "plain, empty rows",
    "plain, gaps",
    "plain, int64 indices",
    "plain, mla",
)


@pytest.mark.parametrize("name", mostly_full(CASES, *QUICK))
def test_against_the_reference(name):
    check(CASES[name].inputs())


def test_fp4_beside_fp8(many_parts):
    """DeepSeek-V4.1's two caches: one softmax over both, as over their rows in bf16, which holds them exactly."""
    case = replace(V41, batch=1, topk=100, **EXTRA, **LENGTHS)
    arguments = case.inputs()
    arguments["extra_k_cache"] = kv_cache.allocate("v41_fp4", *arguments["extra_k_cache"].shape[:2]).fill_(0xFF)
    slots = arguments["extra_indices"].unique()
    slots = slots[(slots >= 0) & (slots < arguments["extra_k_cache"].shape[0] * 3)]
    rows = torch.randn(len(slots), 512, generator=torch.Generator().manual_seed(0)) / 10
    kv_cache.write(arguments["extra_k_cache"], slots, rows, backend="reference")

    out, lse = check(arguments)
    forms = (("k_cache", "v41"), ("extra_k_cache", "v41_fp4"))
    plain = {name: kv_cache.unpack(arguments[name], form) for name, form in forms}
    expected_out, expected_lse = sparse_decode(**arguments | plain | {"cache_format": "bf16"}, backend="reference")
    compare.assert_close(out, expected_out, compare.SPARSE_DECODE_OUT, "out")
    compare.assert_close(lse, expected_lse, compare.DECODE_LSE, "lse")


@pytest.mark.parametrize(
    ("cache_format", "column_sums"),
    [
        ("v32", True),
        ("bf16", False),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("v32", False), ("model1", True), ("bf16", True))),
    ],
)
def test_laid_out_for_warp_groups(monkeypatch, cache_format, column_sums):
    config = AttentionConfig(64, 32, num_warps=1, warpgroups=True, column_sums=column_sums)
    for table in (launch.PACKED_TOKENS, launch.STAGED_TOKENS, launch.SELECTED_ROWS):
        monkeypatch.setitem(table, "interpreter", (config,))
    launch.make_plan.cache_clear()
    check(replace(V32, batch=1, h_q=70, cache_format=cache_format, empty_rows=0.3).inputs())
    launch.make_plan.cache_clear()


STAGED = {
    "v32": V32,
    "v32, extra": replace(V32, **EXTRA, **LENGTHS),
    "v32, fp16 queries": replace(V32, dtype=torch.float16),
    "v32, gaps": replace(V32, strided=True, index_dtype=torch.int64),
    "v32, empty rows": replace(V32, s_q=4, empty_rows=0.5, zero_lengths=True),
    "model1": MODEL1,
    "model1, gaps": replace(MODEL1, batch=1, strided=True),
    "v41, extra and lengths": replace(V41, **EXTRA, **LENGTHS),
}


@pytest.mark.parametrize(
    "name", mostly_full(STAGED, "v32, extra", "v32, empty rows", "model1", "v41, extra and lengths")
)
def test_tiles_that_wait_in_shared_memory(monkeypatch, name):
    config = AttentionConfig(16, 16, num_warps=1, num_stages=5)
    monkeypatch.setitem(launch.STAGED_TOKENS, "interpreter", (config,))
    launch.make_plan.cache_clear()
    check(STAGED[name].inputs())
    launch.make_plan.cache_clear()


@pytest.mark.parametrize("more", mostly_full(["one list", "two lists"], "two lists"))
def test_split_over_parts(many_parts, more):
    case = replace(PLAIN, batch=1, s_q=1, topk=200)
    if more == "two lists":
        case = replace(case, topk=130, **EXTRA, **LENGTHS)
    arguments = case.inputs()
    first, second = check(arguments), decode(arguments)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    check(replace(case, empty_rows=1.0).inputs(), empty_lse=float("inf"))


def test_batch_invariant_is_the_same_alone_and_among_others(many_parts):
    arguments = replace(PLAIN, batch=3, topk=130, topk_lengths="request").inputs()
    together = check(arguments, batch_invariant=True)
    by_request = [name for name in ("q", "indices", "topk_length") if arguments[name] is not None]
    for request in range(3):
        one = slice(request, request + 1)
        alone = decode(arguments | {name: arguments[name][one] for name in by_request}, batch_invariant=True)
        for result, expected in zip(alone, together, strict=True):
            assert torch.equal(result, expected[one])


def test_lengths_outside_the_list(many_parts):
    arguments = PLAIN.inputs()
    lengths = torch.tensor([[-5, 2**31 - 1], [0, 3]], dtype=torch.int32)
    check(arguments | {"topk_length": lengths})
    check(arguments | {"topk_length": lengths.long() * 2**20})


def test_indices_that_no_int32_holds():
    arguments = replace(PLAIN, index_dtype=torch.int64).inputs()
    arguments["indices"][0, 0, :3] = torch.tensor([2**32, -(2**63), 2**63 - 1])
    check(arguments)


def test_pages_2_to_the_31_bytes_apart():
    arguments = replace(V32, s_k=14).inputs()
    pages = arguments["k_cache"][:2]
    storage = torch.empty(2**31 + pages[0].numel(), dtype=torch.uint8)
    arguments["k_cache"] = storage.as_strided(pages.shape, (2**31, *pages.stride()[1:])).copy_(pages)
    check(arguments)


def test_lengths_and_sinks_that_are_not_neighbors():
    arguments = replace(PLAIN, topk_lengths="token").inputs()
    apart = {name: arguments[name].repeat_interleave(2, dim=-1)[..., ::2] for name in ("topk_length", "attn_sink")}
    check(arguments | apart)


def test_empty_lse_and_strided_outputs():
    arguments = replace(PLAIN, s_q=4, empty_rows=0.5).inputs()
    out = torch.full((2, 4, 9, 40), torch.nan, dtype=torch.bfloat16)[:, :, :8:2, :32]
    lse = torch.full((2, 4, 4, 3), torch.nan)[..., 1]
    check(arguments | {"out": out, "lse": lse}, empty_lse=float("inf"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("cache_format", ["v32", "model1"])
def test_dtypes_of_bytes(cache_format, dtype):
    arguments = replace(V32, batch=1, cache_format=cache_format).inputs()
    check(arguments | {"k_cache": arguments["k_cache"].view(dtype)})


@pytest.mark.parametrize("gap", [1, *(pytest.param(gap, marks=pytest.mark.full) for gap in (656, 4))])
@pytest.mark.parametrize("cache_format", ["v32", "v32_no_rope", "model1", "v41", "v41_fp4"])
def test_gaps_between_pages(cache_format, gap):
    arguments = replace(V32, batch=1, cache_format=cache_format).inputs()
    cache = arguments["k_cache"]
    pages, page_size, _, width = cache.shape
    stride = page_size * width + gap
    storage = torch.full((pages * stride + gap,), 0xFF, dtype=torch.uint8)
    moved = storage[gap:].as_strided(cache.shape, (stride, width, width, 1))
    layout = kv_cache.get_format(cache_format)
    for source, target in zip(layout.page_views(cache), layout.page_views(moved), strict=True):
        target.copy_(source)
    check(arguments | {"k_cache": moved})


def test_any_scale_is_honoured():
    """Scales that are not powers of two, tiny and large ones: as if the keys were rounded to bf16 once."""
    arguments = replace(V32, batch=1, softmax_scale=1e-5, attn_sink=False).inputs()
    cache = arguments["k_cache"]
    slots = arguments["indices"][arguments["indices"] < cache.shape[0] * cache.shape[1]].unique()
    sizes = torch.tensor([1e-6, 0.7, 33.0, 3e5, 0.1]).repeat_interleave(128)[:576]
    rows = torch.randn(slots.numel(), 576, generator=torch.Generator().manual_seed(0)) * sizes
    kv_cache.write(cache, slots, rows, cache_format="v32", scale_rounding="exact")
    out, lse = decode(arguments)
    rounded = kv_cache.unpack(cache, "v32", dtype=torch.bfloat16)
    expected_out, expected_lse = sparse_decode(
        **arguments | {"k_cache": rounded, "cache_format": "bf16"}, backend="reference"
    )
    # Elements of equal magnitude, since cancellation amplifies relative errors.
    actual, expected = (each.double() / sizes[:512] for each in (out, expected_out))
    compare.assert_close(actual, expected, compare.Tolerance(1e-5, 2**-7, 1e-5), "out")
    compare.assert_close(lse, expected_lse, compare.DECODE_LSE, "lse")


@pytest.mark.parametrize("cache_format", ["v32", "v32_no_rope", "model1", "v41", "v41_fp4"])
def test_nan_scale_of_a_selected_token(cache_format):
    arguments = replace(V32, cache_format=cache_format, attn_sink=False, invalid_share=0.0).inputs()
    expected, _ = decode(arguments)
    slot = arguments["indices"][0, 1, 5]
    selected = (arguments["indices"] == slot).any(dim=-1)
    head_dim = arguments["q"].shape[-1]
    kv_cache.write(arguments["k_cache"], slot[None], torch.full((1, head_dim), torch.nan), cache_format=cache_format)
    out, lse = decode(arguments)
    assert out[selected].isnan().all()
    assert lse.transpose(1, 2)[selected].isnan().all()
    assert torch.equal(out[~selected], expected[~selected])


@pytest.mark.parametrize("byte", [0x7F, pytest.param(0xFF, marks=pytest.mark.full)])
@pytest.mark.parametrize("cache_format", ["v32", "v32_no_rope", "model1", "v41"])
def test_nan_number_of_a_selected_token(cache_format, byte):
    """e4m3's NaN with a finite scale, which this package's writers do not store."""
    arguments = replace(V32, cache_format=cache_format, attn_sink=False, invalid_share=0.0).inputs()
    slot = int(arguments["indices"][0, 1, 5])
    selected = (arguments["indices"] == slot).any(dim=-1)
    page, offset = divmod(slot, arguments["k_cache"].shape[1])
    row_bytes = {"v32": 656, "v32_no_rope": 528, "model1": 576, "v41": 528}[cache_format]
    arguments["k_cache"][page].view(torch.uint8).flatten()[offset * row_bytes + 101] = byte
    expected, expected_lse = sparse_decode(**arguments, backend="reference")
    out, lse = decode(arguments)
    for result, wanted in ((out, expected), (lse.transpose(1, 2), expected_lse.transpose(1, 2))):
        assert wanted[selected].isnan().all()
        assert result[selected].isnan().all()
        assert result[~selected].isfinite().all()


@triton.jit
def _unpack(
    words, scales, rope, latent, STEP: tl.constexpr, PLACE: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr
):
    rows = tl.arange(0, 16)[:, None]
    word, scale, number = tl.arange(0, WORDS)[None, :], tl.arange(0, TILES)[None, :], tl.arange(0, 64)[None, :]
    packed = tiles.Packed(
        tl.load(words + rows * WORDS + word),
        tl.load(scales + rows * TILES + scale),
        tl.load(rope + rows * 64 + number),
        None,
    )
    unpacked = tiles.unpack(packed, tl.bfloat16, PLACE, STEP)
    tl.store(latent + rows * 512 + tl.arange(0, 512)[None, :], unpacked.latent)


def unpacked(cache_format: str, numbers: torch.Tensor, scales: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """The latent elements [16, 512] that the kernel unpacks from a format's bytes."""
    layout = kv_cache.get_format(cache_format)
    _, step = choose(launch.PACKED_TOKENS, "interpreter", 16, layout.head_dim, 512, in_place=False)
    place = tiles.TokenAddress(layout.tiling, layout.block_scaling, native=False, page_size=64, wide=False, align=16)
    latent = torch.full((16, 512), torch.nan)
    words = numbers.view(torch.int32)
    _unpack[(1,)](words, scales, rope.view(torch.uint16), latent, step, place, words.shape[1], scales.shape[1])
    return latent


@pytest.mark.parametrize("model1", [False, True])
def test_unpacks_every_number_exactly(model1):
    """All e4m3 values, including subnormals and NaN, with scales that are powers of two."""
    numbers = torch.arange(256, dtype=torch.uint8).repeat(16, 2)
    rope = torch.randn(16, 64).to(torch.bfloat16)
    if model1:
        numbers[:, 448:] = 0
        scales = torch.randint(20, 240, (16, 8), dtype=torch.uint8)
        scales[:, 7] = 0
        factors = scales.view(torch.float8_e8m0fnu).float().repeat_interleave(64, dim=1)
    else:
        scales = torch.randint(-100, 100, (16, 4)).float().exp2()
        factors = scales.repeat_interleave(128, dim=1)
    latent = unpacked("model1" if model1 else "v32", numbers, scales, rope)
    expected = numbers.view(torch.float8_e4m3fn).float() * factors
    if model1:
        expected[:, 448:] = rope.float()
    torch.testing.assert_close(latent, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", ["v41", "v41_fp4"])
def test_unpacks_every_number_of_every_scale_exactly(form):
    numbers = torch.arange(256, dtype=torch.uint8).repeat(16, 1 if form == "v41_fp4" else 2)
    if form == "v41_fp4":
        scales = torch.arange(512).remainder(256).to(torch.uint8).view(16, 32)
    else:
        scales = torch.arange(256).clamp(20, 240).to(torch.uint8).view(16, 16)
    rows = kv_cache.dequantize(torch.cat((numbers, scales), dim=1), form, dtype=torch.float32)
    latent = unpacked(form, numbers, scales, torch.zeros(16, 64, dtype=torch.bfloat16))
    torch.testing.assert_close(latent, rows, rtol=0, atol=0, equal_nan=True)


def test_refusals():
    with pytest.raises(ValueError, match="512 latent elements as values, not 576"):
        sparse_decode(**replace(V32, head_dim_v=576).inputs(), backend="portable")
    with pytest.raises(ValueError, match="up to 1024, not 1040"):
        sparse_decode(**replace(PLAIN, head_dim=1040).inputs(), backend="portable")


@pytest.mark.parametrize("scale_rounding", ["power_of_two", "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_are_rounded_to_bf16_and_nothing_else_is(dtype, scale_rounding):
    generator = torch.Generator().manual_seed(1)
    rows = 3 * torch.randn(2, 8, 1, 576, generator=generator)
    q = (3 * torch.randn(1, 1, 3, 576, generator=generator)).to(dtype)
    cache = kv_cache.pack(rows, "v32", scale_rounding=scale_rounding)
    _, lse = sparse_decode(q, cache, torch.tensor([[[3, 9, 14]]]), backend="portable")

    keys = kv_cache.unpack(cache, dtype=torch.float32).view(16, 576)[[3, 9, 14]]
    query, scale = q[0, 0].double(), 576**-0.5

    def lse_of(keys: torch.Tensor) -> torch.Tensor:
        return (scale * query @ keys.double().T).logsumexp(dim=-1, keepdim=True)

    torch.testing.assert_close(lse[0].double(), lse_of(keys.bfloat16()), atol=1e-5, rtol=1e-6)
    error = (lse[0].double() - lse_of(keys)).abs()
    bound = 2**-9 * scale * (query.abs() @ keys.double().abs().T).amax(dim=-1, keepdim=True)
    assert (error <= bound + 1e-5).all()
    assert (error.amax() < 1e-5) == (scale_rounding == "power_of_two")
