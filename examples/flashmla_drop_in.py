"""FlashLatte as a drop-in for FlashMLA: dense decode, and sparse decode over a v32 cache."""

import torch

import flashlatte.flash_mla as flash_mla  # instead of: import flash_mla
from flashlatte import kv_cache

REQUESTS, HEADS, PAGE = 2, 128, 64


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = torch.tensor([100, 300], dtype=torch.int32, device=device)
    block_table = torch.arange(REQUESTS * 5, dtype=torch.int32, device=device).view(REQUESTS, 5)
    tokens = torch.randn(REQUESTS * 5 * PAGE, 576, device=device).bfloat16()
    slots = torch.arange(len(tokens), device=device)
    q = torch.randn(REQUESTS, 1, HEADS, 576, device=device).bfloat16()
    schedule, _ = flash_mla.get_mla_metadata()

    cache = kv_cache.allocate("bf16", REQUESTS * 5, PAGE, device=device)
    kv_cache.write(cache, slots, tokens)
    dense, _ = flash_mla.flash_mla_with_kvcache(q, cache, block_table, lengths, 512, schedule, causal=True)

    # The same tokens in DeepSeek-V3.2's format, each query selecting all tokens of its request.
    cache = kv_cache.allocate("v32", REQUESTS * 5, PAGE, device=device)
    kv_cache.write(cache, slots, tokens)
    positions = torch.arange(5 * PAGE, dtype=torch.int32, device=device).expand(REQUESTS, 1, -1)
    selected = torch.where(positions < lengths.view(-1, 1, 1), positions, -1)
    indices = kv_cache.to_cache_indices(selected, block_table, PAGE)
    sparse, _ = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, schedule, is_fp8_kvcache=True, indices=indices
    )

    difference = ((sparse.float() - dense.float()).norm() / dense.float().norm()).item()
    print(f"dense decode over bf16 and sparse decode over v32 differ by {difference:.1%}: what 8 bits a number cost")
    assert difference < 0.1


if __name__ == "__main__":
    main()
