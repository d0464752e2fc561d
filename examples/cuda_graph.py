"""A CUDA graph of a decode step, captured once and replayed with other lengths."""

import torch

import flashlatte
from flashlatte import kv_cache

REQUESTS, LONGEST, PAGE = 8, 4096, 64


def main() -> None:
    if not torch.cuda.is_available():
        print("cuda_graph.py needs a CUDA GPU, and torch finds none: nothing was run.")
        return
    torch.manual_seed(0)
    pages = REQUESTS * LONGEST // PAGE
    cache = kv_cache.allocate("bf16", pages, PAGE, device="cuda")
    kv_cache.write(cache, torch.arange(pages * PAGE, device="cuda"), torch.randn(pages * PAGE, 576, device="cuda"))
    q = torch.randn(REQUESTS, 1, 128, 576, device="cuda").bfloat16()
    block_table = torch.arange(pages, device="cuda", dtype=torch.int32).view(REQUESTS, -1)
    lengths = torch.zeros(REQUESTS, device="cuda", dtype=torch.int32)

    flashlatte.dense_decode(q, cache, block_table, lengths)  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashlatte.dense_decode(q, cache, block_table, lengths)

    for step in range(3):
        lengths.copy_(torch.randint(LONGEST + 1, (REQUESTS,)))
        graph.replay()
        eager_out, eager_lse = flashlatte.dense_decode(q, cache, block_table, lengths)
        assert torch.equal(out, eager_out)
        assert torch.equal(lse, eager_lse)
        print(f"replay {step} with lengths {lengths.tolist()}: the eager call's result, bit for bit")


if __name__ == "__main__":
    main()
