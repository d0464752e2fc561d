"""vLLM's operations: layouts and special cases of vLLM, compared with bytes and values computed here."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashlatte.integrations.vllm import ops

E4M3 = torch.float8_e4m3fn
ONE = torch.tensor(1.0)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def e4m3(x):
    """Saturating cast, as uint8."""
    return x.clamp(-448, 448).to(E4M3).view(torch.uint8)


@pytest.mark.parametrize(("width", "rope"), [(320, 64), (576, 64), (512, 0)])
def test_concat_and_cache_mla_copies_or_quantizes_the_whole_row(width, rope):
    kv_c, k_pe = draw(5, width - rope, dtype=torch.bfloat16), draw(5, rope, seed=1, dtype=torch.bfloat16)
    slots = torch.tensor([6, -1, 0, 99])  # two tokens are skipped, the fifth is padding
    rows = torch.cat((kv_c, k_pe), dim=1)

    cache = torch.full((2, 4, width), 7.0, dtype=torch.bfloat16)
    ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "auto", ONE)
    expected = torch.full_like(cache, 7.0)
    expected[1, 2], expected[0, 0] = rows[0], rows[2]
    assert cache.equal(expected)

    for scale, skip_scale in ((0.25, False), (1.0, True)):
        cache = torch.full((2, 4, width), 7, dtype=torch.uint8)
        ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "fp8", torch.tensor(0.25), skip_scale)
        expected = torch.full_like(cache, 7)
        expected[1, 2], expected[0, 0] = e4m3(rows[0].float() / scale), e4m3(rows[2].float() / scale)
        assert cache.equal(expected)


@pytest.mark.parametrize("rounding", ["exact", "power_of_two"])
def test_fp8_ds_mla_is_four_tiles_their_scales_and_the_rope(rounding):
    kv_c, k_pe = draw(1, 512, dtype=torch.bfloat16), draw(1, 64, seed=1, dtype=torch.bfloat16)
    cache = torch.zeros(1, 2, 656, dtype=torch.uint8)
    options: dict[str, Any] = {} if rounding == "power_of_two" else {"scale_rounding": rounding}
    ops.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([1]), "fp8_ds_mla", ONE, **options)
    tiles = kv_c.float().view(4, 128)
    scales = tiles.abs().amax(dim=1) / 448
    if rounding == "power_of_two":
        scales = torch.tensor([2.0 ** math.ceil(math.log2(scale)) for scale in scales.tolist()])
    record = cache[0, 1]
    assert record[512:528].view(torch.float32).equal(scales)
    assert record[:512].equal(e4m3(tiles / scales[:, None]).flatten())
    assert record[528:].view(torch.bfloat16).equal(k_pe[0])
    assert cache[0, 0].eq(0).all()

    rows = torch.full((3, 576), 5.0, dtype=torch.bfloat16)
    table = torch.zeros(2, 1, dtype=torch.int32)
    starts, firsts = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    ops.cp_gather_and_upconvert_fp8_kv_cache(cache, rows, table, starts, 2, firsts)
    values = (record[:512].view(E4M3).float().view(4, 128) * scales[:, None]).bfloat16().flatten()
    assert rows[0].equal(torch.cat((values, k_pe[0])))
    assert rows[1].eq(0).all()  # the second request begins at token 0 and extends to the last row
    assert rows[2].equal(rows[0])


def test_fp8_ds_mla_of_keys_without_rope_has_zeros_in_its_place():
    kv_c, slots = draw(3, 512, dtype=torch.bfloat16), torch.tensor([1, -1])
    caches = [torch.full((1, 2, 656), 7, dtype=torch.uint8) for _ in range(2)]
    for cache, k_pe in zip(caches, (kv_c[:, :0], torch.zeros(3, 64, dtype=torch.bfloat16)), strict=True):
        ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "fp8_ds_mla", ONE)
    assert caches[0].equal(caches[1])
    assert caches[0][0, 1, 528:].eq(0).all()


@pytest.mark.parametrize("is_neox", [True, False])
def test_concat_and_cache_mla_rope_fused_rotates_pairs_in_place(is_neox):
    kv_c, k_pe, q_pe = draw(2, 16), torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), torch.ones(2, 3, 4)
    # Rotate the first frequency by 90 degrees, the second by 0.
    cos_sin, positions = torch.tensor([[1.0, 1, 0, 0], [0, 1, 1, 0]]), torch.tensor([1, 0])
    cache = torch.zeros(1, 2, 20)
    ops.concat_and_cache_mla_rope_fused(
        positions, q_pe, k_pe, kv_c, cos_sin, is_neox, torch.tensor([1, 0]), cache, "auto", ONE
    )
    turned = [-3.0, 2, 1, 4] if is_neox else [-2.0, 1, 3, 4]
    assert k_pe.tolist() == [turned, [5, 6, 7, 8]]
    assert q_pe[0].tolist() == [[-1.0, 1, 1, 1]] * 3
    assert q_pe[1].eq(1).all()
    assert cache[0, 1].equal(torch.cat((kv_c[0], k_pe[0])))
    assert cache[0, 0].equal(torch.cat((kv_c[1], k_pe[1])))


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_gathers_follow_the_table_from_each_requests_first_token(name):
    width, lengths, firsts = 320, [3, 0, 5], [2, 1, 0]
    rows = draw(6, 4, width)
    cache = rows if name == "auto" else e4m3(rows)
    values = rows if name == "auto" else cache.view(E4M3).float() * 0.5
    table = torch.tensor([[5, 1], [0, 0], [2, 3]], dtype=torch.int32)
    cu_seq_lens = torch.tensor([0, *lengths]).cumsum(0).int()
    places = [
        (int(table[request, position // 4]), position % 4)
        for request, length in enumerate(lengths)
        for position in range(firsts[request], firsts[request] + length)
    ]
    pages, offsets = (torch.tensor(part) for part in zip(*places, strict=True))
    starts, token_to_seq = torch.tensor(firsts, dtype=torch.int32), torch.tensor([0] * 3 + [2] * 5)

    dst = torch.full((10, width), 9.0)
    given = (cache, dst, table, cu_seq_lens, token_to_seq, 8, name, torch.tensor(0.5), starts)
    ops.gather_and_maybe_dequant_cache(*given)
    assert dst[:8].equal(values[pages, offsets])
    assert dst[8:].eq(9.0).all()
    # vLLM 0.26 passes the number of tokens as a tensor; compiled operations accept NumPy integers.
    counts: tuple[Any, ...] = (cu_seq_lens[-1], np.int64(8))
    for count in counts:
        counted = torch.full((10, width), 9.0)
        ops.gather_and_maybe_dequant_cache(cache, counted, *given[2:5], count, *given[6:])
        assert counted.equal(dst)

    raw = torch.full((10, width), 9, dtype=cache.dtype)
    ops.cp_gather_cache(cache, raw, table, cu_seq_lens, 3, starts)
    assert raw[:8].equal(cache[pages, offsets])
    assert raw[8:].eq(9).all()
    first_two = torch.full((10, 5, 64), 9, dtype=cache.dtype)
    ops.cp_gather_cache(cache.unflatten(2, (5, 64)), first_two, table, cu_seq_lens, 2, starts)
    assert first_two[:3].flatten(1).equal(raw[:3])
    assert first_two[3:].eq(9).all()


def test_gathers_end_at_the_last_boundary_of_a_longer_table():
    """A block table with an additional row is that of a padded batch, not an open-ended request."""
    table, ends = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    cache, dst = draw(2, 4, 576), torch.full((4, 576), 9.0)
    more = torch.tensor([1, 0], dtype=torch.int32)
    ops.gather_and_maybe_dequant_cache(cache, dst, table, ends, torch.zeros(4), 4, "auto", ONE, more)
    assert dst[:2].equal(cache[1, 1:3])
    assert dst[2:].eq(9).all()

    keys = torch.arange(2 * 4 * 132, dtype=torch.uint8).view(2, 4, 132)
    values, scales = torch.full((4, 128), 3, dtype=torch.uint8), torch.full((4, 4), 3, dtype=torch.uint8)
    ops.cp_gather_indexer_k_quant_cache(keys, values, scales, table, ends)
    assert values[:2].equal(keys[1].view(-1)[:256].view(2, 128))
    assert values[2:].eq(3).all()
    assert scales[2:].eq(3).all()


def test_one_byte_dtypes_are_gathered_unchanged():
    cache = torch.arange(256, dtype=torch.uint8).view(2, 1, 128)
    for dtype in (torch.uint8, torch.int8, E4M3, torch.float8_e5m2):
        dst = torch.zeros(2, 128, dtype=torch.uint8).view(dtype)
        ops.cp_gather_cache(cache.view(dtype), dst, torch.tensor([[1, 0]]), torch.tensor([0, 2]), 1)
        assert dst.view(torch.uint8).equal(cache.squeeze(1).flip(0))


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp8_e4m3"])
def test_index_keys_precede_their_scales_in_a_page(scale_format):
    k, cache = draw(3, 128, dtype=torch.bfloat16), torch.zeros(2, 4, 132, dtype=torch.uint8)
    k[2] = 0
    ops.indexer_k_quant_and_cache(k, cache, torch.tensor([5, -1, 0]), 128, scale_format)
    expected = torch.zeros_like(cache)
    for token, (page, offset) in ((0, (1, 1)), (2, (0, 0))):
        scale = k[token].float().abs().amax().clamp_min(1e-4) / 448
        if scale_format == "ue8m0":
            scale = torch.tensor(2.0 ** math.ceil(math.log2(scale)))
        page_bytes = expected[page].view(-1)
        page_bytes[offset * 128 : offset * 128 + 128] = e4m3(k[token].float() / scale)
        page_bytes[512 + offset * 4 : 516 + offset * 4] = scale.view(1).view(torch.uint8)
    assert cache.equal(expected)

    for scales in (torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(4, 1), torch.zeros(4)):
        values = torch.full((4, 128), 3, dtype=torch.uint8)
        table, cu_seq_lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
        ops.cp_gather_indexer_k_quant_cache(cache, values, scales, table, cu_seq_lens)
        assert values[1].equal(expected[1].view(-1)[128:256])
        assert scales.view(torch.uint8).view(4, 4)[1].equal(expected[1].view(-1)[516:520])
        assert values[2:].eq(3).all()


def test_scales_of_a_single_index_key_may_have_any_stride():
    cache = torch.arange(132, dtype=torch.uint8).view(1, 1, 132)
    values, scales = torch.zeros(1, 128, dtype=torch.uint8), torch.zeros(1, 5, dtype=torch.uint8)
    table, cu_seq_lens = torch.tensor([[0]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    ops.cp_gather_indexer_k_quant_cache(cache, values, scales[:, :4], table, cu_seq_lens)
    assert scales.tolist() == [[128, 129, 130, 131, 0]]


def test_top_k_per_row():
    logits = draw(6, 40)
    starts, ends = torch.tensor([0, 5, 3, 9]), torch.tensor([40, 30, 4, 9])
    indices = torch.full((6, 9), 77, dtype=torch.int32)
    ops.top_k_per_row_prefill(logits, starts, ends, indices, 4, 40, 1, 8)
    for row in range(4):
        inside = logits[row, starts[row] : ends[row]]
        best = sorted(inside.topk(min(8, len(inside))).indices.tolist())
        assert indices[row, :8].tolist() == best + [-1] * (8 - len(best))
    assert indices[4:].eq(77).all()
    assert indices[:, 8].eq(77).all()

    by_row = torch.tensor([28, 29, 30, 5, 6, 7])
    for seq_lens in (torch.tensor([30, 7]), by_row.view(2, 3)):
        indices = torch.full((6, 8), 77, dtype=torch.int32)
        ops.top_k_per_row_decode(logits, 3, seq_lens, indices, 6, 40, 1, 8)
        assert [set(row) - {-1} for row in indices.tolist()] == [
            set(logits[row, :length].topk(min(8, length)).indices.tolist())
            for row, length in enumerate(by_row.tolist())
        ]
    # More requests than num_rows / next_n, also as many as rows.
    longer = torch.full_like(indices, 77)
    ops.top_k_per_row_decode(logits, 3, torch.tensor([30, 7, 1, 1, 1, 1]), longer, 6, 40, 1, 8)
    assert longer.equal(indices)
    longer.fill_(77)
    ops.top_k_per_row_decode(logits, 3, torch.tensor([30, 7]), longer, 3, 40, 1, 8)
    assert longer[:3].equal(indices[:3])
    assert longer[3:].eq(77).all()
    again = torch.empty_like(indices)
    ops.persistent_topk(logits, by_row.view(2, 3), again, None, 8, 40)
    assert again.equal(indices)


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("layout", ["heads first", "NHD", "HND"])
def test_reshape_and_cache(name, layout):
    pages, page_size, heads, width = 3, 4, 2, 16
    key, value = draw(4, heads, width), draw(4, heads, width, seed=1)
    slots = torch.tensor([9, -1, 2])
    scales = torch.tensor(0.5), torch.tensor(0.25)
    dtype = torch.float32 if name == "auto" else torch.uint8
    if layout == "heads first":
        key_cache = torch.zeros(pages, heads, width // 4, page_size, 4, dtype=dtype)
        value_cache = torch.zeros(pages, heads, width, page_size, dtype=dtype)
        ops.reshape_and_cache(key, value, key_cache, value_cache, slots, name, *scales)
        found = key_cache.permute(0, 3, 1, 2, 4).flatten(3), value_cache.permute(0, 3, 1, 2)
        again = torch.zeros_like(key_cache), torch.zeros_like(value_cache)
        ops.triton_reshape_and_cache_flash(key, value, *again, slots, name, *scales)
        # vLLM's Triton function writes e4m3 for every fp8 dtype: its readers support no other.
        assert again[0].equal(key_cache) is (name != "fp8_e5m2")
        e4m3s = torch.zeros_like(key_cache), torch.zeros_like(value_cache)
        ops.reshape_and_cache(key, value, *e4m3s, slots, "auto" if name == "auto" else "fp8", *scales)
        assert again[0].equal(e4m3s[0])
        assert again[1].equal(e4m3s[1])
    else:
        shape = (pages, page_size, heads, width) if layout == "NHD" else (pages, heads, page_size, width)
        found = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        if layout == "HND":
            found = found[0].transpose(1, 2), found[1].transpose(1, 2)
        ops.reshape_and_cache_flash(key, value, *found, slots, name, *scales)
    for cache, rows, scale in zip(found, (key, value), scales, strict=True):
        expected = torch.zeros_like(cache)
        if name == "auto":
            written = rows
        else:
            kind = E4M3 if name == "fp8" else torch.float8_e5m2
            written = (rows / scale).to(kind).view(torch.uint8)
        expected[2, 1], expected[0, 2] = written[0], written[2]
        assert cache.equal(expected)


def test_a_scale_for_each_token_and_head():
    key, value = draw(2, 2, 16), draw(2, 2, 24, seed=1)
    caches = torch.zeros(1, 4, 2, 16, dtype=torch.int8), torch.zeros(1, 4, 2, 24, dtype=torch.int8)
    scales = torch.zeros(1, 4, 2), torch.zeros(1, 4, 2)
    mode = SimpleNamespace(name="INT8_PER_TOKEN_HEAD")
    write = ops.triton_reshape_and_cache_flash_per_token_head_quant
    write(key, value, *caches, *scales, torch.tensor([3, 1]), mode)
    for rows, cache, scale in zip((key, value), caches, scales, strict=True):
        for token, slot in ((0, 3), (1, 1)):
            expected = rows[token].abs().amax(dim=-1) / 127
            assert torch.allclose(scale[0, slot], expected)
            assert cache[0, slot].equal((rows[token] / expected[:, None]).round().to(torch.int8))
    with pytest.raises(ValueError, match=r"^kv_quant_mode must be an 8-bit mode, got INT4_PER_TOKEN_HEAD$"):
        write(key, value, *caches, *scales, torch.tensor([3, 1]), SimpleNamespace(name="INT4_PER_TOKEN_HEAD"))


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:]], ids=["one tensor", "views"])
def test_swap_blocks_reads_every_block_of_a_tensor_before_it_writes_one(view):
    x = torch.arange(4)
    ops.swap_blocks(x, view(x), 8, torch.tensor([[0, 1], [1, 2], [2, 0]]))
    assert x.tolist() == [2, 0, 1, 3]


def test_swap_blocks_copies_bytes_unchanged():
    src, dst = draw(4, 3, 2, 8).transpose(1, 2), torch.zeros(5, 2, 3, 8).transpose(1, 2)
    dst = dst.transpose(1, 2).contiguous().transpose(1, 2)
    before = src.clone()
    ops.swap_blocks(src, dst, 3 * 2 * 8 * 4, torch.tensor([[3, 0], [1, 4]]))
    memory = dst.transpose(1, 2).reshape(5, -1)
    assert memory[0].equal(before.transpose(1, 2)[3].flatten())
    assert memory[4].equal(before.transpose(1, 2)[1].flatten())
    assert memory[1:4].eq(0).all()


def test_requests_are_packed_and_unpacked():
    x, lengths = draw(6, 2, 3), torch.tensor([1, 0, 3, 2])
    packed = ops.pack_seq_triton(x, lengths)
    assert packed.shape == (4, 3, 2, 3)
    assert packed[0, 0].equal(x[0])
    assert packed[2].equal(x[1:4])
    assert packed[1].eq(-math.inf).all()
    assert ops.unpack_seq_triton(packed, lengths).equal(x)
    assert ops.pack_seq_triton(x.to(torch.uint8), lengths, 255)[1].eq(255).all()


def test_vision_towers_attend_within_images():
    q, k, v = (draw(1, 7, 2, 8, seed=seed) for seed in range(3))
    boundaries = torch.tensor([0, 3, 7], dtype=torch.int32)
    images = []
    for part in (slice(0, 3), slice(3, 7)):
        heads = [x[:, part].transpose(1, 2).double() for x in (q, k, v)]
        attended = torch.nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], scale=0.3)
        images.append(attended.transpose(1, 2))
    expected = torch.cat(images, dim=1)
    longest = torch.tensor(4)
    for given in (
        ops.vit_flash_attn_wrapper(q, k, v, 1, False, None, 0.3, boundaries, longest),
        ops.vit_triton_attn_wrapper(q, k, v, 1, 0.3, boundaries, longest),
        ops.vit_torch_sdpa_wrapper(q, k, v, 0.3, boundaries),
    ):
        assert given.shape == q.shape
        assert torch.allclose(given.double(), expected, atol=1e-5)
    # PyTorch's wrapper takes boundaries within a row, the same for every row.
    q2, k2, v2 = (torch.cat((x, x.flip(2))) for x in (q, k, v))
    two = ops.vit_torch_sdpa_wrapper(q2, k2, v2, 0.3, boundaries)
    assert torch.allclose(two.double(), torch.cat((expected, expected.flip(2))), atol=1e-5)
    whole = ops.vit_torch_sdpa_wrapper(q, k[:, :, :1], v[:, :, :1], enable_gqa=True)
    assert whole.shape == q.shape
    with pytest.raises(ValueError, match=r"^k must have q's 2 heads without enable_gqa, got 1$"):
        ops.vit_torch_sdpa_wrapper(q, k[:, :, :1], v[:, :, :1])
    with pytest.raises(ValueError, match=r"^batch_size must be the first axis of q's \[1, 7, 2, 8\], got 2$"):
        ops.vit_triton_attn_wrapper(q, k, v, 2)


def test_queries_into_an_output_with_more_heads():
    """vLLM pads heads to a kernel's number: padded heads stay unchanged."""
    latent, rope = torch.randn(3, 8, 512).bfloat16(), torch.randn(3, 8, 64).bfloat16()
    padded = torch.full((3, 64, 576), 7.0, dtype=torch.bfloat16)
    ops.concat_mla_q(latent, rope, padded)
    assert padded[:, :8].equal(torch.cat((latent, rope), dim=-1))
    assert padded[:, 8:].eq(7).all()
    with pytest.raises(ValueError, match="q_out must have shape"):
        ops.concat_mla_q(latent, rope, padded[:, :4])
