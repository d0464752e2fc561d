"""SGLang's model runner with one attention backend in a process of its own, step by step."""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch

from flashlatte.bench.serving.engine_process import SteppedEngine, answer_requests
from flashlatte.bench.serving.random_model import fill_weights, prompt, vocabulary
from flashlatte.bench.serving.sglang_contexts import random_batch
from flashlatte.bench.serving.step_cases import COMPARED_TOKENS, WARM_STEPS, generated_tokens, lengths_of, parsed
from flashlatte.bench.timing import microseconds

# The largest page of the backends.
PAGE = 64


class RunnerSteps(SteppedEngine):
    """SGLang's model runner, and the requests that run in it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from sgl_kernel import elementwise
        from sglang.benchmark import one_batch
        from sglang.srt.model_loader import loader
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import PortArgs, ServerArgs

        loader.initialize_dummy_weights = fill_model
        one_batch.get_tokenizer = no_tokenizer
        # sgl-kernel replaces its RMSNorm by FlashInfer's, which FlashInfer compiles at run time.
        elementwise._has_flashinfer = False
        load_plugins()
        self.vocabulary = vocabulary(arguments.model)
        self.chunk = arguments.chunk
        self.args: Any = ServerArgs(**server_options(arguments))
        one_batch._set_envs_and_config(self.args)
        one_batch.initialize_moe_config(self.args)
        one_batch.initialize_fp8_gemm_config(self.args)
        one_batch.initialize_fp4_gemm_config(self.args)
        self.one_batch: Any = one_batch
        self.runner: Any
        self.runner, _ = one_batch.load_model(self.args, PortArgs.init_new(self.args), 0, 0)
        # Of the last step or prefill: its batch, the logits and the chosen tokens.
        self.batch: Any = None
        self.logits: Any = None
        self.next_tokens: Any = None

    def about(self) -> dict[str, Any]:
        import sglang

        runner = self.runner.torch_runner
        decode, prefill = runner.decode_attention_backend_str, runner.prefill_attention_backend_str
        if self.args.dsa_decode_backend is not None:
            decode, prefill = self.args.dsa_decode_backend, self.args.dsa_prefill_backend
        return {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "sglang": sglang.__version__,
            "torch": torch.__version__,
            "page_size": self.args.page_size,
            "cache": str(runner.kv_cache_dtype).removeprefix("torch."),
            "decode_backend": decode,
            "prefill_backend": prefill,
            "cuda_graphs": self.args.cuda_graph_config.decode.backend,
            "chunk": self.chunk,
        }

    def start(self, requests: int, context: int) -> int:
        """Replace the running requests by new ones with random contexts, and make a few steps."""
        self.begin(requests, context)
        self.time(WARM_STEPS)
        return requests

    def begin(self, requests: int, context: int) -> None:
        # The first decode step writes the row of the last token.
        prompts = self.prompts(requests, context)
        begun = self.requests([tokens[:-1] for tokens in prompts])
        self.batch = random_batch(self.one_batch, self.runner.torch_runner, begun)
        self.next_tokens = torch.tensor([tokens[-1] for tokens in prompts], device=self.batch.device)

    def prompts(self, requests: int, context: int) -> list[list[int]]:
        draw = random.Random(0)
        return [prompt(draw, self.vocabulary, context) for _ in range(requests)]

    def requests(self, prompts: list[list[int]]) -> list[Any]:
        """New requests in place of all earlier ones."""
        self.runner.clear()
        return self.one_batch.prepare_synthetic_inputs_for_latency_test(len(prompts), len(prompts[0]), prompts)

    def tokens(self, requests: int, context: int, kind: str = "") -> list[list[tuple[int, float]]]:
        """The first generated tokens of new requests, each with its log-probability.

        Args:
            kind: ``PREFILLED``, or empty for random contexts.
        """
        if kind:
            self.prefill_requests(self.requests(self.prompts(requests, context)))
            results = [[best] for best in self.best()]
        else:
            self.begin(requests, context)
            results = [[] for _ in range(requests)]
        while len(results[0]) < COMPARED_TOKENS:
            self.step()
            for result, best in zip(results, self.best(), strict=True):
                result.append(best)
        return results

    def best(self) -> list[tuple[int, float]]:
        """Each request's most probable token and its log-probability. The next step overwrites the logits."""
        probabilities, tokens = self.logits.float().log_softmax(-1).max(-1)
        if not probabilities.isfinite().all():
            raise SystemExit("a log-probability is not finite")
        return list(zip(tokens.tolist(), probabilities.tolist(), strict=True))

    def prefill(self, context: int) -> float:
        """µs from a request of ``context`` tokens to its first token, in chunks of ``--chunk`` tokens."""
        begun = self.requests(self.prompts(1, context))
        return microseconds(lambda: self.prefill_requests(begun))

    def prefill_requests(self, begun: list[Any]) -> None:
        slots = self.runner.torch_runner.req_to_token_pool.req_to_token
        context = len(begun[0].origin_input_ids)
        for first in range(0, context, self.chunk):
            for request in begun:
                if first:
                    row = slots[request.req_pool_idx, :first]
                    request.prefix_indices = row.to(request.prefix_indices.dtype)
                request.set_extend_range(first, min(first + self.chunk, context))
            self.next_tokens, self.logits, self.batch = self.runner.extend(begun)

    def step(self) -> None:
        self.next_tokens, self.logits = self.runner.decode(self.next_tokens, self.batch)

    def time(self, steps: int) -> float:
        """µs of a step: SGLang's preparation of the batch, the model's CUDA graph and sampling."""
        return microseconds(lambda: [self.step() for _ in range(steps)]) / steps


def server_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of SGLang's ``ServerArgs``."""
    cases = parsed(arguments.cases)
    generated = generated_tokens(arguments)
    lengths = [(requests, context + generated) for requests, context in cases]
    lengths += [(1, context + generated) for context in lengths_of(arguments.prefill)]
    batches = sorted({requests for requests, _ in lengths})
    return {
        "model_path": arguments.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "dtype": "bfloat16",
        "context_length": max(length for _, length in lengths),
        "max_running_requests": max(batches),
        "max_total_tokens": max(requests * (-(-length // PAGE) + 1) * PAGE for requests, length in lengths),
        "chunked_prefill_size": arguments.chunk,
        "cuda_graph_bs_decode": batches,
        "disable_prefill_cuda_graph": True,
        "mem_fraction_static": arguments.memory,
        "random_seed": 0,
        "log_level": "warning",
        **arguments.server,
        **json.loads(arguments.options),
    }


def fill_model(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """In place of SGLang's ``initialize_dummy_weights``."""
    fill_weights(model.named_parameters())


def no_tokenizer(*_: Any, **__: Any) -> None:
    """In place of ``get_tokenizer``: the model has no tokenizer, and requests are tokens."""


if __name__ == "__main__":
    answer_requests(RunnerSteps)
