"""Calls of the FlashMLA drop-in with the arguments of FlashLatte's operations."""

from flashlatte import flash_mla


def decode(inputs, **changes):
    """Dense or sparse decode: convert the operation's arguments to FlashMLA's names."""
    schedule, num_splits = flash_mla.get_mla_metadata()
    arguments = {
        "q": inputs["q"],
        "k_cache": inputs["k_cache"],
        "block_table": inputs.get("block_table"),
        "cache_seqlens": inputs.get("cache_seqlens"),
        "head_dim_v": inputs["head_dim_v"],
        "tile_scheduler_metadata": schedule,
        "num_splits": num_splits,
        "softmax_scale": inputs["softmax_scale"],
        "causal": inputs.get("causal", False),
        "is_fp8_kvcache": inputs["k_cache"].dtype.itemsize == 1,
        "indices": inputs.get("indices"),
        "attn_sink": inputs.get("attn_sink"),
        "extra_k_cache": inputs.get("extra_k_cache"),
        "extra_indices_in_kvcache": inputs.get("extra_indices"),
        "topk_length": inputs.get("topk_length"),
        "extra_topk_length": inputs.get("extra_topk_length"),
    }
    return flash_mla.flash_mla_with_kvcache(**(arguments | changes))


def assert_same(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        assert result.equal(wanted)
        assert result.stride() == wanted.stride()
