"""The MLA layer: 100 tokens of a prompt attend in multi-head form, then three tokens one by one, absorbed."""

import torch

from flashlatte import kv_cache
from flashlatte.layers import MLAAttention, MLAConfig, MLAMetadataBuilder

PROMPT, NEW, PAGE = 100, 3, 64


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The portable and Hopper kernels support 16-bit dtypes; the reference supports all.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = MLAConfig(hidden_size=256, num_attention_heads=4, q_lora_rank=None)
    layer = MLAAttention(config, dtype=dtype, device=device)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.05) if weight.dim() > 1 else torch.nn.init.ones_(weight)
    hidden = torch.randn(PROMPT + NEW, 256, device=device, dtype=dtype)
    table = torch.tensor([[0, 1]], device=device)

    with torch.inference_mode():
        whole = run(layer, hidden, [(0, PROMPT + NEW)], table)
        steps = [(0, PROMPT), *((token, token + 1) for token in range(PROMPT, PROMPT + NEW))]
        stepwise = run(layer, hidden, steps, table)
    difference = ((whole - stepwise).norm() / whole.norm()).item()
    print(f"all tokens at once and the last {NEW} one by one: outputs differ by {difference:.1e}")
    assert difference < (1e-4 if dtype == torch.float32 else 2e-2)


def run(layer: MLAAttention, hidden: torch.Tensor, steps: list[tuple[int, int]], table: torch.Tensor) -> torch.Tensor:
    """The layer's outputs for one request whose tokens are computed in these steps, with a new cache."""
    cache_format = {torch.float32: "fp32", torch.bfloat16: "bf16"}[hidden.dtype]
    cache = kv_cache.allocate(cache_format, num_pages=2, page_size=PAGE, device=hidden.device)
    builder = MLAMetadataBuilder(
        PAGE, max_requests=1, max_tokens=len(hidden), max_seq_len=2 * PAGE, device=hidden.device, num_pages=2
    )
    outputs = []
    for first, end in steps:
        metadata = builder.build([0, end - first], [end], table)  # where queries begin, and keys of each request
        outputs.append(layer(hidden[first:end], cache, metadata))
    return torch.cat(outputs)


if __name__ == "__main__":
    main()
