"""Every cache format: bytes per token, and the error of tokens that are written to scattered slots and read back."""

import torch

from flashlatte import kv_cache

TOKENS, PAGES, PAGE = 200, 8, 64


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # A request whose pages are in random order in the cache.
    block_table = torch.tensor([[5, 2, 7, 0]], dtype=torch.int32, device=device)
    slots = kv_cache.to_cache_indices(torch.arange(TOKENS, device=device)[None], block_table, PAGE)[0]
    starts = torch.tensor([0, TOKENS], dtype=torch.int32, device=device)

    print("format         bytes a token   relative error")
    for name in kv_cache.FORMAT_NAMES:
        layout = kv_cache.get_format(name)
        rows = torch.randn(TOKENS, layout.head_dim, device=device)
        cache = kv_cache.allocate(name, PAGES, PAGE, device=device)
        kv_cache.write(cache, slots, rows, cache_format=name)
        back = kv_cache.gather(cache, block_table, starts, cache_format=name, total_tokens=TOKENS, dtype=torch.float32)
        error = ((back - rows).norm() / rows.norm()).item()
        print(f"{name:<14} {layout.bytes_per_token:>13}   {error:.1e}")
        # Looser for formats with four bits per element.
        assert error < (0.12 if layout.bytes_per_token < 400 else 0.04)


if __name__ == "__main__":
    main()
