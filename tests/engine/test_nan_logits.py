"""A request with NaN logits ends with an error; concurrent requests are not affected."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from support import engine_models, rank_engine_jobs
from support.choosing import choose
from support.engine_models import chosen_logprobs, generated_by_transformers, greedy, prompt

from flashlatte.engine import CompletionOutput, Engine, RequestOutput
from flashlatte.engine.sampling import NO_TOKEN

NEW = 6
POISON = rank_engine_jobs.POISON
HEALTHY = [[token for token in prompt(length, seed) if token != POISON] for seed, length in enumerate((3, 22, 40))]
POISONED = [*(token for token in prompt(21, 9) if token != POISON), POISON]


@functools.cache
def poisoned_model(family: str) -> Any:
    return rank_engine_jobs.poisoned(family)


def engine(family: str = "DeepseekV3", **options: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_batched_tokens": 16}
    return engine_models.engine(poisoned_model(family), **settings | options)


def check(outputs: list[RequestOutput], family: str) -> None:
    """Check ``HEALTHY`` requests with ``POISONED`` after the first of them."""
    failed = outputs.pop(1)
    assert (failed.outputs[0].token_ids, failed.outputs[0].finish_reason) == ([], "error")
    assert failed.outputs[0].error == "no token at position 22 can be chosen: the logits are NaN, or all are -inf"
    for tokens, output in zip(HEALTHY, outputs, strict=True):
        assert output.outputs[0].token_ids == generated_by_transformers(family, tokens, NEW)
        assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("length", None)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("DeepseekV3", {}),
        ("DeepseekV3", {"num_speculative_tokens": 3}),
        ("DeepseekV3", {"num_pages": 8, "swap_space": 8, "enable_prefix_caching": False}),
        ("GlmMoeDsa", {}),
        ("DeepseekV4", {"max_num_seqs": 2}),
    ],
    ids=str,
)
def test_a_request_with_nan_logits_ends_and_the_others_continue(family, options):
    served = engine(family, **options)
    prompts = [HEALTHY[0], POISONED, *HEALTHY[1:]]
    check(served.generate(prompts, greedy(NEW, logprobs=0)), family)
    assert served.unfinished == served.pool.in_use == 0
    # Its keys are not shared, and its state slot is used by another request.
    again = served.generate(prompts, greedy(NEW))
    assert again[1].num_cached_tokens == 0
    check(again, family)


def test_draws_and_penalties():
    sampling = greedy(
        NEW, temperature=0.9, top_p=0.8, min_p=0.01, seed=3, repetition_penalty=1.3, suppress_tokens=(POISON,)
    )
    prompts = [HEALTHY[0], POISONED, HEALTHY[1]]
    outputs = engine(num_speculative_tokens=2).generate(prompts, [sampling, sampling, greedy(NEW)])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[0].outputs[0].token_ids == engine().generate(HEALTHY[:1], sampling)[0].outputs[0].token_ids
    assert outputs[2].outputs[0].token_ids == generated_by_transformers("DeepseekV3", HEALTHY[1], NEW)


def test_a_temporary_fault_leaves_no_wrong_page(monkeypatch):
    """Pages that were shared before the fault are recomputed as well, since they may have caused it."""
    served = engine()
    expected = generated_by_transformers("DeepseekV3", HEALTHY[2], NEW)
    compute = served.runner._compute
    with monkeypatch.context() as patched:
        calls = iter(range(100))
        patched.setattr(served.runner, "_compute", lambda batch: compute(batch) * (math.nan if next(calls) == 5 else 1))
        (output,) = served.generate([HEALTHY[2]], greedy(NEW, logprobs=0))
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == (
        "error",
        expected[: len(output.outputs[0].token_ids)],
    )
    assert 0 < len(output.outputs[0].token_ids) == len(chosen_logprobs(output)) < NEW
    (output,) = served.generate([HEALTHY[2]], greedy(NEW))
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (0, expected)


def test_step_returns_the_error_and_stream_raises_it():
    served = engine()
    served.add(POISONED, greedy(NEW), request_id="poisoned")
    with pytest.raises(RuntimeError, match=r"^request 'request-1' failed: no token at position 22 can be chosen"):
        list(served.stream(POISONED, greedy(NEW)))
    told = served.step()
    assert [
        (output.request_id, output.outputs[0].finish_reason, output.outputs[0].new_token_ids) for output in told
    ] == [("poisoned", "error", [])]
    assert served.unfinished == served.pool.in_use == 0


def test_rejected_drafts_may_have_nan_logits():
    output = CompletionOutput(0, greedy(8), 2)
    assert output.extend([3, 4, NO_TOKEN], [], [3, 9]) is None
    assert output.token_ids == [3, 4]
    assert output.extend([5, NO_TOKEN, 6], [], [5, 6]) == "error"
    assert (output.token_ids, output.error is None) == ([3, 4, 5], False)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 2, "min_p": 0.1}], ids=str)
def test_rows_without_a_token(options):
    logits = torch.tensor(
        [[0.0, 2.0, 1.0], [0.0, math.nan, 1.0], [-math.inf] * 3, [-math.inf, -1.0, -math.inf], [5.0, 1.0, math.nan]]
    )
    params = [greedy(**options, seed=1)] * 4
    tokens = choose(logits, [*params, greedy(suppress_tokens=(2,))]).tolist()
    assert tokens[0] != NO_TOKEN
    assert tokens[1:] == [NO_TOKEN, NO_TOKEN, 1, 0]
