"""The engine beside transformers' ``generate`` on a DeepSeek-V2-Lite-shaped model with random weights, on a GPU.

    PYTHONPATH=. python benchmarks/engine.py [--layers 27] [--requests 256] [--json FILE]

Loads: requests of 512 tokens in and 128 out; and 64 requests that share a prefix of 8,192 tokens, with and without the
prefix cache. Tokens a second count what is generated, over the whole time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from flashlatte.engine import Engine, SamplingParams

PROMPT, NEW, SHARED, SHARING = 512, 128, 8192, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=27, help="of the model (default 27)")
    parser.add_argument("--requests", type=int, default=256, help="of the first load (default 256)")
    parser.add_argument("--transformers-batch", type=int, default=64, help="requests that generate() takes at once")
    parser.add_argument("--json", type=Path, help="append a line a measurement to this file")
    options = parser.parse_args()
    model = v2_lite(options.layers)
    results: list[dict[str, Any]] = []

    def report(name: str, seconds: float, tokens: int, **more: Any) -> None:
        results.append({"case": name, "seconds": seconds, "tokens_per_second": tokens / seconds, **more})
        print(f"{name:44s} {seconds:8.2f} s {tokens / seconds:10,.0f} tokens/s  {more or ''}", flush=True)

    prompts = [random_prompt(PROMPT, seed) for seed in range(options.requests)]
    batch = prompts[: options.transformers_batch]
    report("transformers generate", generate(model, batch), len(batch) * NEW, batch=len(batch))
    for graphs in (True, False):
        served = Engine(model, max_requests=256, max_tokens=8192, num_pages=8192, graphs=graphs)
        seconds = serve(served, prompts)
        report(f"engine, graphs {'on' if graphs else 'off'}", seconds, len(prompts) * NEW, **steps(served))
        del served
        torch.cuda.empty_cache()
    prefix = random_prompt(SHARED, 1)
    sharing = [[*prefix, *random_prompt(16, seed)] for seed in range(SHARING)]
    for cached in (True, False):
        served = Engine(model, max_requests=64, max_tokens=8192, num_pages=10240, prefix_cache=cached)
        served.generate([[*prefix, 1]], SamplingParams(max_new_tokens=1))
        before = served.statistics()
        seconds = serve(served, sharing, warm=False)
        computed = served.statistics()["computed_tokens"] - before["computed_tokens"]
        name = f"shared prefix, cache {'on' if cached else 'off'}"
        report(name, seconds, SHARING * NEW, computed_tokens=int(computed))
        del served
        torch.cuda.empty_cache()
    if options.json:
        with options.json.open("a") as file:
            for line in results:
                file.write(
                    json.dumps({"device": torch.cuda.get_device_name(), "layers": options.layers, **line}) + "\n"
                )


def v2_lite(layers: int) -> Any:
    """DeepSeek-V2-Lite's shape with random bf16 weights, made on the GPU."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_shared_experts=2,
        n_routed_experts=64,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=32768,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: Any = DeepseekV2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, 102400, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generate(model: Any, prompts: list[list[int]]) -> float:
    """Seconds that transformers takes, after a short warm-up."""
    ids = torch.tensor(prompts, device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    model.generate(ids, max_new_tokens=2, **options)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=NEW, **options)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def serve(served: Engine, prompts: list[list[int]], *, warm: bool = True) -> float:
    """Seconds that the engine takes; ``warm`` compiles and captures beforehand with other prompts."""
    if warm:
        served.generate([random_prompt(PROMPT, 10**6 + seed) for seed in range(len(prompts))], SamplingParams(16))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    served.generate(prompts, SamplingParams(max_new_tokens=NEW))
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def steps(served: Engine) -> dict[str, int]:
    return {"pages_used": served.pool.num_pages - served.pool.available}


if __name__ == "__main__":
    main()
