"""vLLM's engine with one attention backend in a process of its own, step by step."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from flashlatte.bench.serving.vllm_requests import PREFILLED, prompt, request_names

MARK = "FLASHLATTE "  # marks answers among vLLM's output
CONTEXTS = "flashlatte.bench.serving.vllm_contexts"
RANDOM_CONTEXTS = {"kv_connector": "RandomContexts", "kv_role": "kv_both", "kv_connector_module_path": CONTEXTS}
WARM_STEPS = 3
# vLLM's smallest default of max_num_batched_tokens.
MIN_BATCHED_TOKENS = 2048
# Generated tokens of each request that engines are compared in.
COMPARED_TOKENS = 8


class EngineEnded(Exception):
    """An engine's process ended before it answered."""


class EngineProcess:
    """The process of an engine. It answers requests, which are names of methods of ``EngineSteps`` and arguments.

    The process starts at once and is ready when it has answered for the first time.
    """

    def __init__(self, backend: str, settings: dict[str, Any]) -> None:
        command = [sys.executable, "-m", __name__, json.dumps(settings | {"worker": backend})]
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self.backend = backend
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def answer(self) -> Any:
        """The answer to the oldest request.

        Raises:
            EngineEnded: the process ended.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            print(line, end="", file=sys.stderr)
        raise EngineEnded(f"the engine with {self.backend} ended with {self.process.wait()}")

    def ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended; there is no answer either
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def work(arguments: argparse.Namespace) -> None:
    """The loop of an engine's process: a request per line, an answer per line."""
    engine = EngineSteps(arguments)
    print(MARK + json.dumps(engine.about()), flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(MARK + json.dumps(getattr(engine, name)(*values)), flush=True)


class EngineSteps:
    """vLLM's engine, and the requests that run in it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import importlib

        from vllm import LLM  # pyright: ignore[reportMissingImports]

        # Registers the load format "random".
        importlib.import_module(CONTEXTS)
        cases = parsed(arguments.cases)
        options: dict[str, Any] = json.loads(arguments.options)
        if arguments.random_contexts:
            options["kv_transfer_config"] = RANDOM_CONTEXTS
        llm = LLM(
            model=arguments.model,
            load_format=arguments.load_format,
            dtype=arguments.dtype,
            kv_cache_dtype=arguments.kv_cache_dtype,
            attention_config={"backend": arguments.worker},
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=max(requests for requests, _ in cases),
            max_model_len=longest(cases, arguments, options),
            gpu_memory_utilization=arguments.memory,
            **options,
        )
        self.engine: Any = llm.llm_engine
        config = json.loads((Path(arguments.model) / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = config["vocab_size"]
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
        synchronize()
        began = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.step()
        synchronize()
        return (time.perf_counter() - began) * 1e6

    def time(self, steps: int) -> float:
        """µs of a step. With asynchronous scheduling, a step returns the tokens of an earlier one."""
        synchronize()
        self.generated = 0
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        us = (time.perf_counter() - began) / steps * 1e6
        if self.generated != steps * len(self.running):
            raise SystemExit(f"{steps} steps of {len(self.running)} requests returned {self.generated} tokens")
        return us

    def step(self) -> list[Any]:
        outputs = self.engine.step()
        self.generated += len(outputs)
        return outputs

    def kernels(self, what: str, number: int) -> dict[str, float]:
        """µs of each kernel in a step (``what`` "time", of ``number`` steps), or in a prefill of ``number`` tokens."""
        if not torch.cuda.is_available():
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            getattr(self, what)(number)
        runs = number if what == "time" else 1
        spent = {event.key: event.self_device_time_total / runs for event in profile.key_averages()}
        return {name: us for name, us in spent.items() if us}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def parsed(cases: str) -> list[tuple[int, int]]:
    return [(int(requests), int(context)) for requests, context in (case.split("x") for case in cases.split(","))]


def longest(cases: list[tuple[int, int]], arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    """Tokens of the longest request: the first requests decode in each step in which others are still prefilled."""
    batch = options.get("max_num_batched_tokens", MIN_BATCHED_TOKENS)
    measured = (arguments.rounds + 1) * arguments.steps + 16
    prefill = 0 if arguments.random_contexts else 1
    lengths = [context + prefill * -(-requests * context // max(batch - requests, 1)) for requests, context in cases]
    return max([*lengths, *lengths_of(arguments.prefill)]) + measured


def lengths_of(prefill: str) -> list[int]:
    return [int(length) for length in prefill.split(",") if length]


if __name__ == "__main__":
    work(argparse.Namespace(**json.loads(sys.argv[1])))
