"""vLLM's engine with one attention backend in a process of its own, step by step."""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch

from flashlatte.bench.serving.engine_process import SteppedEngine, answer_requests
from flashlatte.bench.serving.random_model import has_indexer, is_v4, prompt, vocabulary
from flashlatte.bench.serving.step_cases import (
    COMPARED_TOKENS,
    PREFILLED,
    WARM_STEPS,
    generated_tokens,
    lengths_of,
    parsed,
    request_names,
)
from flashlatte.bench.serving.vllm_index_logits import replace_missing_deep_gemm
from flashlatte.bench.serving.vllm_v4_parts import replace_missing_parts
from flashlatte.bench.timing import microseconds

# vLLM's name of FlashLatte's backend.
OURS = "CUSTOM"
CONTEXTS = "flashlatte.bench.serving.vllm_contexts"
RANDOM_CONTEXTS = {"kv_connector": "RandomContexts", "kv_role": "kv_both", "kv_connector_module_path": CONTEXTS}
# vLLM's smallest default of max_num_batched_tokens.
MIN_BATCHED_TOKENS = 2048


class EngineSteps(SteppedEngine):
    """vLLM's engine, and the requests that run in it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import importlib

        self.index_logits = index_logits_of(arguments.backend) if has_indexer(arguments.model) else None
        self.stand_ins = stand_ins_of(arguments.backend) if is_v4(arguments.model) else {}
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        # Registers the load format "random".
        importlib.import_module(CONTEXTS)
        cases = parsed(arguments.cases)
        options: dict[str, Any] = json.loads(arguments.options)
        if arguments.random_contexts:
            options["kv_transfer_config"] = RANDOM_CONTEXTS
        if self.stand_ins:  # vLLM's warm-up compiles the kernels that are replaced
            options["kernel_config"] = {"enable_jit_warmup": False} | options.get("kernel_config", {})
        llm = LLM(
            model=arguments.model,
            load_format=arguments.load_format,
            dtype=arguments.dtype,
            kv_cache_dtype=arguments.kv_cache_dtype,
            attention_config={"backend": arguments.backend},
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=max(requests for requests, _ in cases),
            max_model_len=longest(cases, arguments, options),
            gpu_memory_utilization=arguments.memory,
            **options,
        )
        self.engine: Any = llm.llm_engine
        self.vocabulary = vocabulary(arguments.model)
        self.running: list[str] = []
        self.generated = 0

    def about(self) -> dict[str, Any]:
        import vllm  # pyright: ignore[reportMissingImports]

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        config = self.engine.vllm_config
        return {
            "device": device,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "page_size": config.cache_config.block_size,
            "async_scheduling": config.scheduler_config.async_scheduling,
            **({"index_logits": self.index_logits} if self.index_logits else {}),
            **({"stand_ins": self.stand_ins} if self.stand_ins else {}),
        }

    def start(self, requests: int, context: int) -> int:
        """Replace the running requests by new ones, and step until each has its first token."""
        self.begin(requests, context)
        begun: set[str] = set()
        while len(begun) < requests:
            begun.update(output.request_id for output in self.step() if output.outputs[0].token_ids)
        self.time(WARM_STEPS)
        return requests

    def begin(self, requests: int, context: int, kind: str = "", **sampling: Any) -> None:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        self.engine.abort_request(self.running)
        while self.engine.has_unfinished_requests():  # steps in flight
            self.engine.step()
        draw = random.Random(0)
        given: dict[str, Any] = {"temperature": 0.0, "max_tokens": None, "ignore_eos": True, "detokenize": False}
        self.running = request_names(requests, kind)
        for name in self.running:
            tokens = prompt(draw, self.vocabulary, context)
            self.engine.add_request(name, {"prompt_token_ids": tokens}, SamplingParams(**given | sampling))

    def tokens(self, requests: int, context: int, kind: str = "") -> list[list[tuple[int, float]]]:
        """The first generated tokens of new requests, each with its log-probability."""
        self.begin(requests, context, kind, max_tokens=COMPARED_TOKENS, logprobs=0)
        results: dict[str, list[tuple[int, float]]] = {}
        while self.engine.has_unfinished_requests():
            for output in self.step():
                chosen = output.outputs[0]
                pairs = zip(chosen.token_ids, chosen.logprobs or (), strict=True)
                results[output.request_id] = [(token, known[token].logprob) for token, known in pairs]
        return [results[name] for name in self.running]

    def prefill(self, context: int) -> float:
        """µs from a request of ``context`` tokens to its first token."""
        self.begin(1, context, PREFILLED, max_tokens=1)
        return microseconds(self.finish)

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def time(self, steps: int) -> float:
        """µs of a step. With asynchronous scheduling, a step returns the tokens of an earlier one."""
        self.generated = 0
        us = microseconds(lambda: [self.step() for _ in range(steps)]) / steps
        if self.generated != steps * len(self.running):
            raise SystemExit(f"{steps} steps of {len(self.running)} requests returned {self.generated} tokens")
        return us

    def step(self) -> list[Any]:
        outputs = self.engine.step()
        self.generated += len(outputs)
        return outputs


def index_logits_of(backend: str) -> str:
    """The library of a backend's index logits. If it is FlashLatte in another backend, a line is printed."""
    if backend != OURS and not replace_missing_deep_gemm():
        return "deep_gemm"
    if backend != OURS:
        print(f"{backend}: DeepGEMM is not installed. Index logits are FlashLatte's, top-k and attention vLLM's.")
    return "flashlatte"


def stand_ins_of(backend: str) -> dict[str, str]:
    """The replaced parts of V4 and their libraries, as in ``replace_missing_parts``. If there are any, prints them."""
    replaced = replace_missing_parts()
    if replaced:
        parts = ", ".join(f"{part} by {library}" for part, library in replaced.items())
        print(f"{backend}: stand-ins for parts whose packages are missing, as in all backends: {parts}.")
    return replaced


def longest(cases: list[tuple[int, int]], arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    """Tokens of the longest request: the first requests decode in each step in which others are still prefilled."""
    batch = options.get("max_num_batched_tokens", MIN_BATCHED_TOKENS)
    prefill = 0 if arguments.random_contexts else 1
    lengths = [context + prefill * -(-requests * context // max(batch - requests, 1)) for requests, context in cases]
    return max([*lengths, *lengths_of(arguments.prefill)]) + generated_tokens(arguments)


if __name__ == "__main__":
    answer_requests(EngineSteps)
