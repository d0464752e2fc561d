import pytest
import torch

from flashlatte import kv_cache

NAMES = ("bf16", "fp16", "fp32", "fp8", "v32", "v32_no_rope", "model1", "v41", "v41_fp4", "nvfp4_ds_mla")


def test_the_names():
    assert kv_cache.FORMAT_NAMES == NAMES


@pytest.mark.parametrize(
    ("name", "head_dim", "latent_dim", "bytes_per_token"),
    [
        ("bf16", 576, 512, 1152),
        ("fp16", 576, 512, 1152),
        ("fp32", 576, 512, 2304),
        ("fp8", 576, 512, 576),
        ("v32", 576, 512, 656),
        ("model1", 512, 448, 584),
        ("v32_no_rope", 512, 512, 528),
        ("v41", 512, 448, 528),
        ("v41_fp4", 512, 448, 288),
        ("nvfp4_ds_mla", 576, 512, 352),
    ],
)
def test_widths(name, head_dim, latent_dim, bytes_per_token):
    layout = kv_cache.get_format(name)
    assert layout.name == name
    assert (layout.head_dim, layout.latent_dim, layout.rope_dim) == (head_dim, latent_dim, head_dim - latent_dim)
    assert layout.bytes_per_token == bytes_per_token
    assert layout.record_width * layout.record_dtype.itemsize == bytes_per_token
    assert sum(plane.width for plane in layout.planes) == layout.record_width


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
def test_page_bytes_hold_all_tokens_and_model1_pages_are_multiples_of_576(name, page_size):
    layout = kv_cache.get_format(name)
    used = page_size * layout.bytes_per_token
    if name == "model1":
        assert layout.page_bytes(page_size) % 576 == 0
        assert used <= layout.page_bytes(page_size) < used + 576
    else:
        assert layout.page_bytes(page_size) == used


def test_formats_without_tiles_accept_any_head_dim():
    layout = kv_cache.get_format("bf16", 48)
    assert (layout.head_dim, layout.latent_dim, layout.rope_dim) == (48, 48, 0)
    assert kv_cache.get_format("fp8", 80).latent_dim == 16


def test_a_format_is_returned_unchanged():
    layout = kv_cache.get_format("v32")
    assert kv_cache.get_format(layout) is layout
    assert kv_cache.get_format("v32") == layout


@pytest.mark.parametrize(
    ("name", "head_dim", "message"),
    [
        (
            "int4",
            None,
            "^cache_format must be one of bf16, .*, model1, v41, v41_fp4, nvfp4_ds_mla, index_fp8, .*, got 'int4'$",
        ),
        ("v32", 512, "^head_dim of format v32 is 576, got 512$"),
        ("model1", 576, "^head_dim of format model1 is 512, got 576$"),
        ("v41", 576, "^head_dim of format v41 is 512, got 576$"),
        ("v41_fp4", 576, "^head_dim of format v41_fp4 is 512, got 576$"),
        ("nvfp4_ds_mla", 512, "^head_dim of format nvfp4_ds_mla is 576, got 512$"),
        ("bf16", 0, "^head_dim of format bf16 must be an int of at least 1, got 0$"),
        ("bf16", True, "^head_dim of format bf16 must be an int of at least 1, got True$"),
        (kv_cache.get_format("bf16", 48), 64, "^head_dim must be 48 as in the given bf16 format, got 64$"),
    ],
)
def test_names_that_are_not_formats(name, head_dim, message):
    with pytest.raises(ValueError, match=message):
        kv_cache.get_format(name, head_dim)


@pytest.mark.parametrize(
    ("dtype", "width", "name", "head_dim"),
    [
        (torch.bfloat16, 576, "bf16", 576),
        (torch.float16, 48, "fp16", 48),
        (torch.float32, 656, "fp32", 656),
        (torch.float8_e4m3fn, 576, "fp8", 576),
        (torch.uint8, 656, "v32", 576),
        (torch.int8, 656, "v32", 576),
        (torch.float8_e4m3fn, 656, "v32", 576),
        (torch.uint8, 584, "model1", 512),
        (torch.int8, 584, "model1", 512),
        (torch.float8_e4m3fn, 584, "model1", 512),
        (torch.uint8, 288, "v41_fp4", 512),
        (torch.float8_e4m3fn, 288, "fp8", 288),
        (torch.uint8, 352, "nvfp4_ds_mla", 576),
        (torch.float8_e4m3fn, 352, "fp8", 352),
    ],
)
def test_infer_format(dtype, width, name, head_dim):
    layout = kv_cache.infer_format(torch.empty(2, 3, 1, width, dtype=dtype))
    assert (layout.name, layout.head_dim) == (name, head_dim)


@pytest.mark.parametrize(
    ("rows", "name"), [((512, 0), "v32_no_rope"), ((448, 64), "v41"), ((512, 16), "fp8")], ids=lambda value: str(value)
)
def test_rows_distinguish_formats_of_the_same_width(rows, name):
    cache = torch.empty(2, 4, 1, 528, dtype=torch.float8_e4m3fn)
    assert kv_cache.infer_format(cache, rows=rows).name == name


@pytest.mark.parametrize(("dtype", "width"), [(torch.uint8, 576), (torch.int8, 655), (torch.int32, 656)])
def test_infer_format_rejects_ambiguous_caches(dtype, width):
    with pytest.raises(ValueError, match=f"^k_cache must be a .* cache.* got .* {width} wide$"):
        kv_cache.infer_format(torch.empty(2, width, dtype=dtype), "k_cache")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_an_ambiguous_width_is_an_error(dtype):
    cache = torch.empty(2, 3, 1, 528, dtype=dtype)
    message = "^k_cache is 528 bytes wide, which is ambiguous: cache_format must be given, 'v32_no_rope' or 'v41'$"
    with pytest.raises(ValueError, match=message):
        kv_cache.infer_format(cache, "k_cache")


@pytest.mark.parametrize("name", NAMES)
def test_planes_cover_a_page_without_overlap(name):
    cache = kv_cache.allocate(name, 3, 5)
    for view in kv_cache.get_format(name).page_views(cache):
        view.view(torch.uint8).add_(1)
    assert cache.view(torch.uint8).eq(1).all()
