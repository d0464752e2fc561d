"""vLLM's offline engine on a CPU, greedy, with logprobs."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.vllm_counts import CountsCalls

NEW_TOKENS = 16
MIXED = (5, 17, 1, 64, 130, 33, 250, 16)


@dataclasses.dataclass
class Generated:
    """The output of one prompt."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached: int = 0


def prompts(lengths: Sequence[int], shared: int = 0, vocabulary: int = 256) -> list[list[int]]:
    """Random prompts of these lengths with the same first ``shared`` tokens."""
    draw = random.Random(0)
    prefix = [draw.randrange(vocabulary) for _ in range(shared)]
    return [prefix + [draw.randrange(vocabulary) for _ in range(length - shared)] for length in lengths]


class Engine:
    def __init__(self, model: Path, **options: Any) -> None:
        from vllm import LLM

        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            # vLLM's rotary operation for CPUs uses the wrong stride for 3-D queries.
            "compilation_config": {"custom_ops": ["none"]},
            "worker_extension_cls": f"{CountsCalls.__module__}.{CountsCalls.__qualname__}",
        }
        self.llm = LLM(model=str(model), **defaults | options)
        self.llm.collective_rpc("count_calls")

    def generate(self, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[Generated]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, logprobs=5, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [
            Generated(
                list(output.outputs[0].token_ids),
                [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs],
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def calls(self) -> list[dict[str, int]]:
        """Number of calls of FlashLatte's operations in each worker."""
        return self.llm.collective_rpc("calls")

    def metric(self, name: str) -> int:
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}")


@contextlib.contextmanager
def engine(model: Path, **options: Any) -> Iterator[Engine]:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    made = Engine(model, **options)
    try:
        yield made
    finally:
        made.llm.llm_engine.engine_core.shutdown()
        del made.llm
        cleanup_dist_env_and_memory()


def largest_difference(ours: Sequence[Generated], theirs: Sequence[Generated]) -> float:
    """Largest difference of a token's logprob, up to the first different token."""
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        for step, (a, b) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            largest = max([largest, *(abs(a[token] - b[token]) for token in a.keys() & b.keys())])
            if one.tokens[step] != other.tokens[step]:
                break
    return largest
