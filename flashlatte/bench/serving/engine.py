"""The engine compared with transformers on a DeepSeek-V2-Lite-shaped model with random weights, on a GPU.

    flashlatte bench engine [--cases generate generate_batch ...] [--layers 27] [--json FILE]

Requests of 512 tokens in and 128 out: by transformers' ``generate`` and its continuous batching (``generate_batch``),
by the engine with and without CUDA graphs. 64 requests that share a prefix of 8,192 tokens, with and without prefix
caching. And a decode step of 64 requests: its time, and the shares in which the GPU is idle or runs attention and cache
kernels. Tokens per second count the generated ones over the whole time.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import torch

from flashlatte.bench.alternate import add_json_option
from flashlatte.bench.environment import check_gpu, describe
from flashlatte.bench.results import append_line
from flashlatte.bench.serving import decode_profile, transformers_generate
from flashlatte.bench.timing import microseconds
from flashlatte.engine import Engine, SamplingParams

PROMPT, NEW, SHARED, SHARING = 512, 128, 8192, 64
Result = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="default: all")
    add("--layers", type=int, default=27, help="layers of the model (default 27)")
    add("--requests", type=int, default=256, help="requests for the engine (default 256)")
    add("--transformers-batch", type=int, default=64, help="requests for transformers (default 64)")
    add_json_option(parser)


def run(options: argparse.Namespace) -> int:
    import transformers

    check_gpu()
    about = describe(torch.device("cuda"))
    known = {"device": about.device, "commit": about.commit, "transformers": transformers.__version__}
    model = v2_lite(options.layers)
    for name in options.cases:
        result = CASES[name](model, options)
        torch.cuda.empty_cache()
        print(name, json.dumps(result, indent=2), flush=True)
        append_line(options.json, {**known, "layers": options.layers, "case": name, **result})
    return 0


def by_generate(model: Any, options: argparse.Namespace) -> Result:
    prompts = random_prompts(options.transformers_batch)
    return rate(transformers_generate.generate(model, prompts, NEW), len(prompts))


def by_generate_batch(model: Any, options: argparse.Namespace) -> Result:
    """As many requests as ``generate`` has; it chooses itself how many run concurrently."""
    transformers_generate.generate_batch(model, random_prompts(options.transformers_batch, seed=10**6), 4)
    prompts = random_prompts(options.transformers_batch)
    seconds, tokens = transformers_generate.generate_batch(model, prompts, NEW)
    assert all(len(one) == NEW for one in tokens)
    return rate(seconds, len(prompts))


def by_engine(model: Any, options: argparse.Namespace, *, cuda_graphs: bool = True) -> Result:
    served = Engine(model, max_num_seqs=256, max_num_batched_tokens=8192, num_pages=8192, cuda_graphs=cuda_graphs)
    prompts = random_prompts(options.requests)
    return rate(serve(served, prompts), len(prompts))


def shared_prefix(model: Any, options: argparse.Namespace, *, cached: bool = True) -> Result:
    prefix = random_prompt(SHARED, 1)
    sharing = [[*prefix, *random_prompt(16, seed)] for seed in range(SHARING)]
    served = Engine(model, max_num_seqs=64, max_num_batched_tokens=8192, num_pages=10240, enable_prefix_caching=cached)
    served.generate([[*prefix, 1]], SamplingParams(temperature=0, max_tokens=1))
    before = served.statistics()["computed_tokens"]
    seconds = serve(served, sharing, warm=False)
    return rate(seconds, SHARING, computed_tokens=int(served.statistics()["computed_tokens"] - before))


CASES: dict[str, Callable[[Any, argparse.Namespace], Result]] = {
    "generate": by_generate,
    "generate_batch": by_generate_batch,
    "engine": by_engine,
    "engine_without_graphs": functools.partial(by_engine, cuda_graphs=False),
    "shared_prefix": shared_prefix,
    "shared_prefix_without_cache": functools.partial(shared_prefix, cached=False),
    "decode_step": lambda model, _: decode_profile.decode_step(model, random_prompts(64)),
}


def rate(seconds: float, requests: int, **more: Any) -> Result:
    return {"requests": requests, "seconds": seconds, "tokens_per_second": requests * NEW / seconds, **more}


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


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    return [random_prompt(PROMPT, seed + number) for number in range(count)]


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, 102400, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def serve(served: Engine, prompts: list[list[int]], *, warm: bool = True) -> float:
    """Seconds of the engine; ``warm`` compiles and captures beforehand with other prompts."""
    if warm:
        served.generate(random_prompts(len(prompts), seed=10**6), SamplingParams(temperature=0, max_tokens=16))
    return microseconds(lambda: served.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW))) / 1e6
