"""The Triton kernels of ``write`` and ``gather`` give the reference's bytes, in Triton's interpreter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import kv_cache
from flashlatte.ops.cache_write.portable import cache_write
from flashlatte.ops.cache_write.reference import CacheWriteParams
from flashlatte.testing.draws import BEYOND_INT32, INT32_LIMITS, UNREACHED_PAGE

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

BLOCKED = ("v41", "v41_fp4", "nvfp4_ds_mla")
TILED = ("v32", "v32_no_rope", "model1", *BLOCKED)
SCALED = [("v32", "power_of_two"), ("v32", "exact"), ("v32_no_rope", "exact"), ("model1", "power_of_two")]
SCALED += [(name, "power_of_two") for name in BLOCKED]
NAMES = st.sampled_from(kv_cache.FORMAT_NAMES)
FLOAT_DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])
SEEDS = st.integers(0, 2**32)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


def cache_in(storage, name, pages, page_size, head_dim, gap, shift):
    """A cache within byte ``storage``, ``gap`` elements between its pages and ``shift`` elements from its start."""
    layout = kv_cache.get_format(name, head_dim)
    width = layout.record_width
    page_stride = page_size * width + gap
    typed = storage[: storage.numel() // 8 * 8].view(layout.record_dtype)
    return typed.as_strided((pages, page_size, 1, width), (page_stride, width, width, 1), shift)


def write_both(name, pages, page_size, *args, head_dim=None, gap=0, shift=0, **kwargs):
    """The storages of two caches, with surrounding bytes, written by the kernel and by the reference."""
    layout = kv_cache.get_format(name, head_dim)
    size = (pages * page_size * layout.record_width + pages * gap + shift + 8) * layout.record_dtype.itemsize
    storages = []
    for backend in ("portable", "reference"):
        storage = torch.full((size,), 0xA5, dtype=torch.uint8)
        cache = cache_in(storage, name, pages, page_size, head_dim, gap, shift)
        kv_cache.write(cache, *args, cache_format=layout, backend=backend, **kwargs)
        storages.append(storage)
    return storages


def gather_both(cache, *args, head_dim, rows, dtype, out_gap=0, **kwargs):
    outs = []
    for backend in ("portable", "reference"):
        out = torch.full((rows, head_dim + out_gap), 7.0, dtype=dtype)
        kv_cache.gather(cache, *args, out=out[:, :head_dim], backend=backend, **kwargs)
        outs.append(out)
    return outs


def scale_of(name, seed):
    """A scale for the format: None, a number or a tensor."""
    return None if name != "fp8" else (None, 0.037, torch.tensor([0.037]), torch.tensor(3.0))[seed % 4]


@given(
    name=NAMES,
    page_size=st.integers(1, 5),
    gap=st.sampled_from([0, 1, 4, 8, 64]),
    shift=st.sampled_from([0, 1, 4]),
    toy_dim=st.sampled_from([None, 17, 48, 130]),
    padding=st.integers(0, 2),
    apart=st.booleans(),
    spread=st.booleans(),
    dtype=FLOAT_DTYPES,
    index_dtype=INDEX_DTYPES,
    seed=SEEDS,
)
def test_write(name, page_size, gap, shift, toy_dim, padding, apart, spread, dtype, index_dtype, seed):
    head_dim = None if name in TILED else toy_dim
    layout = kv_cache.get_format(name, head_dim)
    limit = 3 * page_size
    outside = torch.tensor([-1, limit, *INT32_LIMITS, *(BEYOND_INT32 if index_dtype == torch.int64 else ())])
    mapping = torch.cat((torch.randperm(limit, generator=generator(seed))[: limit // 2 + 1], outside))
    mapping = mapping[torch.randperm(len(mapping), generator=generator(seed))].to(index_dtype)
    if spread:
        mapping = mapping.repeat_interleave(3)[::3]
    x = torch.randn(len(mapping) + padding, layout.head_dim + 3, generator=generator(seed)) * 5
    x[len(mapping) :] = torch.nan
    x = x.to(dtype)[:, : layout.head_dim] if spread else x[:, : layout.head_dim].to(dtype)
    rope = None
    if apart:
        cut = layout.latent_dim if name in TILED else layout.head_dim // 3
        x, rope = x[:, :cut], x[:, cut:]
    actual, expected = write_both(
        name, 3, page_size, mapping, x, rope=rope, head_dim=head_dim, gap=gap, shift=shift, scale=scale_of(name, seed)
    )
    assert actual.equal(expected)


@given(
    name=NAMES,
    page_size=st.integers(1, 5),
    gap=st.sampled_from([0, 1, 4, 8, 64]),
    shift=st.sampled_from([0, 1, 4]),
    toy_dim=st.sampled_from([None, 17, 48, 130]),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    first=st.integers(0, 2),
    extra_rows=st.integers(1, 9),
    starts=st.booleans(),
    open_end=st.booleans(),
    out_gap=st.sampled_from([0, 1, 8]),
    dtype=FLOAT_DTYPES,
    index_dtype=INDEX_DTYPES,
    seed=SEEDS,
)
def test_gather(
    name,
    page_size,
    gap,
    shift,
    toy_dim,
    lengths,
    first,
    extra_rows,
    starts,
    open_end,
    out_gap,
    dtype,
    index_dtype,
    seed,
):
    head_dim = None if name in TILED else toy_dim
    layout = kv_cache.get_format(name, head_dim)
    storage = torch.full((80_000,), 0xFF, dtype=torch.uint8)
    cache = cache_in(storage, name, 4, page_size, head_dim, gap, shift)
    rows = torch.randn(4 * page_size, layout.head_dim, generator=generator(seed))
    kv_cache.write(cache, torch.arange(4 * page_size), rows, cache_format=layout, backend="reference")

    pages = torch.tensor([0, 1, 2, 3, -1, 4, UNREACHED_PAGE, *(BEYOND_INT32 if index_dtype == torch.int64 else ())])
    table = pages[torch.randint(0, len(pages), (len(lengths), 3), generator=generator(seed))].to(index_dtype)
    cu_seqlens = (torch.tensor([first, *lengths]).cumsum(0)).to(index_dtype)
    begins = torch.randint(-1, 2 * page_size, (len(lengths),), generator=generator(seed)).to(index_dtype)
    actual, expected = gather_both(
        cache,
        table,
        cu_seqlens[:-1] if open_end else cu_seqlens,
        seq_starts=begins if starts else None,
        cache_format=layout,
        scale=scale_of(name, seed),
        head_dim=layout.head_dim,
        rows=first + sum(lengths) + extra_rows,
        dtype=dtype,
        out_gap=out_gap,
    )
    assert bytes_of(actual).equal(bytes_of(expected))


@pytest.mark.full
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp16", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_written_equally(name, dtype, apart):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    same_type = kv_cache.get_format(name).record_dtype == dtype
    if name != "fp8" and not same_type:
        # PyTorch's own NaNs differ between its vectorized and its scalar loops.
        numbers = numbers.nan_to_num(1.0, torch.inf, -torch.inf)
    x = numbers.view(-1, 512)
    x, rope = (x[:, :448], x[:, 448:]) if apart else (x, None)
    actual, expected = write_both(name, 128, 1, torch.arange(128), x, rope=rope, head_dim=512)
    assert actual.equal(expected)


@pytest.mark.parametrize("scale", [1.0, 0.3, 1e-30, 1e30])
def test_float32_values_are_rounded_equally_to_e4m3(scale):
    steps = torch.arange(0x7F).to(torch.uint8).view(torch.float8_e4m3fn).float()
    between = torch.cat((steps, steps[1:] / 2 + steps[:-1] / 2))
    bits = between.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    close = bits.view(torch.float32).flatten() * scale
    random = torch.randint(-(2**31), 2**31 - 1, (2048,), generator=generator(0)).to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-149, -(2.0**-126), 448.0, 464.0, 480.0])
    x = torch.cat((close, -close, random, special))
    x = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(-1, 128)
    actual, expected = write_both("fp8", len(x), 1, torch.arange(len(x)), x, head_dim=128, scale=scale)
    assert actual.equal(expected)


def tiles_of_all_magnitudes(tile, tiles, rope_dim, dtype):
    """Rows whose tiles reach from the smallest to the largest magnitude, some with 448 · 2^n and its neighbors."""
    exponents = torch.linspace(-150, 126, 40 * tiles).round()
    x = torch.randn(40 * tiles, tile, generator=generator(0)).clamp_(-1.7, 1.7)
    x = x * 2.0 ** exponents.clamp_min(-75)[:, None] * 2.0 ** (exponents - exponents.clamp_min(-75))[:, None]
    peaks = 448.0 * 2.0 ** (torch.arange(40 * tiles) % 200 - 100).float()
    peaks = (peaks.view(torch.int32) + torch.arange(40 * tiles, dtype=torch.int32) % 3 - 1).view(torch.float32)
    edges = torch.randn(40 * tiles, tile, generator=generator(1)) * peaks[:, None] / 448
    edges[:, 5] = -peaks
    x = torch.cat((x, edges)).view(80, -1)
    return torch.cat((x, torch.randn(80, rope_dim, generator=generator(2))), dim=-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "scale_rounding"), SCALED)
def test_tiles_of_all_magnitudes_are_quantized_equally(name, scale_rounding, dtype):
    tile, tiles = {
        "v32": (128, 4),
        "v32_no_rope": (128, 4),
        "model1": (64, 7),
        "v41": (32, 14),
        "v41_fp4": (16, 28),
    }.get(name, (16, 32))
    rope_dim = kv_cache.get_format(name).rope_dim
    x = tiles_of_all_magnitudes(tile, tiles, rope_dim, dtype)
    actual, expected = write_both(name, 20, 4, torch.arange(80), x, scale_rounding=scale_rounding)
    assert actual.equal(expected)


def test_scales_next_to_every_e4m3_value_are_rounded_up_equally():
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    amax = [6 * scales, *(torch.nextafter(6 * scales, torch.tensor(end)) for end in (0.0, torch.inf))]
    amax = torch.nn.functional.pad(torch.cat(amax), (0, 6)).view(12, 32)
    rows = torch.zeros(12, 576)
    rows[:, :512:16] = amax
    actual, expected = write_both("nvfp4_ds_mla", 1, 12, torch.arange(12), rows)
    assert actual.equal(expected)


@pytest.mark.parametrize(("name", "scale_rounding"), SCALED)
def test_nan_and_infinity_affect_only_their_tile_equally(name, scale_rounding):
    layout = kv_cache.get_format(name)
    x = torch.randn(6, layout.head_dim, generator=generator(0))
    x[0, 3] = torch.nan
    x[1, 130] = -torch.nan
    x[2, 300] = torch.inf
    x[3, 301] = -torch.inf
    x[4, :2] = torch.tensor([torch.inf, torch.nan])
    x[5] = 0.0
    x = x.bfloat16()
    storages = write_both(name, 2, 3, torch.arange(6), x, scale_rounding=scale_rounding)
    caches = [cache_in(storage, name, 2, 3, None, 0, 0) for storage in storages]
    if name in ("v32", "v32_no_rope"):
        # The bits of a NaN scale differ between PyTorch's loops.
        actual, expected = (cache[..., 512:528].contiguous().view(torch.float32) for cache in caches)
        assert actual.nan_to_num(-1.0).equal(expected.nan_to_num(-1.0))
        for cache in caches:
            cache[..., 512:528] = 0
    if name in ("v32", "v32_no_rope", "model1", "v41"):
        # The sign of a NaN also differs between NumPy versions.
        for cache in caches:
            latents = layout.page_views(cache)[0].view(torch.uint8)[..., :448]
            latents[latents == 0xFF] = 0x7F
    assert storages[0].equal(storages[1])


@pytest.mark.parametrize("name", ["fp8", "v32", "v32_no_rope", "model1", *BLOCKED])
def test_every_byte_is_dequantized_equally(name):
    layout = kv_cache.get_format(name, 512 if name == "fp8" else None)
    cache = kv_cache.allocate(layout, 2, 4)
    latent_bytes = layout.latent_dim
    if name == "v41":
        # Its scales are after the bytes that are set below.
        cache[..., 512:] = torch.arange(128, 256).to(torch.uint8).view(2, 4, 1, 16)
    for view in layout.page_views(cache):
        raw = view.view(torch.uint8)
        count = min(raw.shape[-1], latent_bytes)
        raw[..., :count] = torch.arange(8 * count).remainder(256).to(torch.uint8).view(2, 4, count)
    if name in ("v32", "v32_no_rope"):
        scales = torch.tensor([1.5, 1e-3, -7.0, 2.0**-140, torch.inf, torch.nan, 3e38, 0.0]).repeat(4)
        cache[..., 512:528] = scales.view(torch.uint8).view(2, 4, 1, 16)
    actual, expected = gather_both(
        cache,
        torch.tensor([[1, 0]]),
        torch.tensor([0, 8]),
        cache_format=layout,
        head_dim=layout.head_dim,
        rows=8,
        dtype=torch.float32,
    )
    assert actual.isnan().any()
    assert actual.nan_to_num(1e9).equal(expected.nan_to_num(1e9))


def test_a_missing_page_gives_zeros_whatever_the_scale():
    cache = kv_cache.allocate("fp8", 1, 2, head_dim=8)
    gathered = kv_cache.gather(
        cache, torch.tensor([[0, 1]]), torch.tensor([0, 4]), scale=torch.tensor(torch.nan), backend="portable"
    )
    assert gathered[:2].isnan().all()
    assert gathered[2:].view(torch.int16).eq(0).all()


def test_a_start_before_the_first_token_gives_zeros():
    cache = torch.arange(1.0, 13.0).view(4, 3, 1, 1)
    gathered = kv_cache.gather(
        cache,
        torch.tensor([[2, 1], [3, 0]]),
        torch.tensor([0, 5, 8]),
        seq_starts=torch.tensor([-3, -1]),
        dtype=torch.float32,
        backend="portable",
    )
    assert gathered.flatten().tolist() == [0, 0, 0, 7, 8, 0, 10, 11]


@pytest.mark.parametrize("requests", [1, 2, 3, 31, 32, 33, 1000])
def test_gather_finds_each_rows_request(requests):
    lengths = torch.randint(0, 3, (requests,), generator=generator(requests))
    cache = torch.arange(7.0).view(7, 1, 1, 1)
    table = torch.randint(0, 7, (requests, 2), generator=generator(0))
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    actual, expected = gather_both(
        cache, table, cu_seqlens, head_dim=1, rows=int(lengths.sum()) + 1, dtype=torch.float32
    )
    assert actual.equal(expected)


@pytest.mark.parametrize("name", ["v32", "fp8"])
def test_addresses_beyond_2_to_the_31(name):
    width = 656 if name == "v32" else 576
    page_stride = 2**31 + 16
    try:
        storage = torch.empty(page_stride + 4 * width, dtype=torch.uint8)
    except RuntimeError:
        pytest.skip("not enough address space")
    cache = storage.as_strided((2, 2, 1, width), (page_stride, width, width, 1))
    x = torch.randn(2, 576, generator=generator(0))
    kv_cache.write(cache, torch.tensor([3, 1]), x, cache_format=name, backend="portable")
    read = kv_cache.read(cache, torch.tensor([3, 1]), cache_format=name)
    assert read.equal(kv_cache.dequantize(kv_cache.quantize(x, name), name))
    gathered = kv_cache.gather(
        cache, torch.tensor([[1, 0]]), torch.tensor([0, 4]), cache_format=name, backend="portable"
    )
    assert gathered[[1, 3]].equal(read)


@pytest.mark.parametrize(("pages", "page_size"), [(2**31, 2), (2, 2**31)])
def test_slots_beyond_2_to_the_31(pages, page_size):
    storage = torch.zeros(2, 8)
    strides = (0, 8, 8, 1) if page_size == 2 else (8, 0, 8, 1)
    cache = storage.as_strided((pages, page_size, 1, 8), strides)
    last = pages * page_size - 1
    x = torch.randn(3, 8, generator=generator(0))
    # Without the checks: the cache is an expanded tensor with the memory of two slots.
    slots = torch.tensor([last, last + 1, -(2**33)])
    cache_write(CacheWriteParams(cache, slots, x, None, "fp32", 8, None, 1.0, "exact"))
    assert storage[1].equal(x[0])
    assert storage[0].eq(0).all()
    gathered = kv_cache.gather(
        cache,
        torch.tensor([[pages - 1]]),
        torch.tensor([0, 2]),
        seq_starts=torch.tensor([page_size - 1]),
        dtype=torch.float32,
        backend="portable",
    )
    assert gathered.equal(torch.stack((x[0], torch.zeros(8))))
