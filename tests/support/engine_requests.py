"""Requests with tokens from transformers, and engines for them with small chunks and few places in a step."""

from __future__ import annotations

import functools
from typing import Any

from support import engine_models
from support.engine_models import generated_by_transformers, prompt

from flashlatte.engine import Engine

NEW = 6
PROMPTS = [prompt(length, seed) for seed, length in enumerate((3, 20, 33, 1, 14))]


def engine(**options: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 3}
    return engine_models.engine("DeepseekV3", **settings | options)


@functools.cache
def expected(number: int) -> list[int]:
    """The tokens that transformers generates after a prompt of ``PROMPTS``."""
    return generated_by_transformers("DeepseekV3", PROMPTS[number], NEW)


def finished(engine: Engine) -> dict[str, list[int]]:
    """Make steps until all requests have ended; returns their tokens in the order in which they ended."""
    done = {}
    while engine.unfinished:
        done |= {
            output.request_id: output.outputs[0].token_ids
            for output in engine.step()
            if output.outputs[0].finish_reason is not None
        }
    return done
