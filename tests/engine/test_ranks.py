"""The engine on 2 and 4 processes compared with transformers' ``generate``, in float32, token by token."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support import fp8_linears, rank_engine_jobs
from support.engine_models import generated_by_transformers, greedy, model, prompt
from support.ranks import Ranks

from flashlatte.engine import Engine, SamplingParams

NEW = 8
# The second and later ones are added when the first has ended. Two share its prefix.
PROMPTS = [prompt(40), [*prompt(40)[:37], 5, 6], prompt(3, 1), prompt(26, 2), [*prompt(40), *[9] * 20]]
GREEDY = greedy(NEW, logprobs=0)
# Tensors that are divided in half over two ranks.
_ATTENTION = ("q_b_proj", "kv_b_proj", "o_proj", "sinks", "o_a_proj", "o_b_proj")
HALVED = (*(f"self_attn.{name}" for name in _ATTENTION), "mlp.experts.", "mlp.shared_experts.")


def check(results, family):
    """Check that rank 0's outputs are transformers'; returns its statistics."""
    outputs, statistics = results[0]
    for tokens, (got, logprobs, _) in zip(PROMPTS, outputs, strict=True):
        assert got == generated_by_transformers(family, tokens, NEW)
        with torch.no_grad():
            logits = model(family).forward(torch.tensor([[*tokens, *got]])).logits[0, len(tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(got)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-4)
    return statistics


@pytest.mark.parametrize(
    "family", ["DeepseekV3", *(pytest.param(name, marks=pytest.mark.full) for name in ("GlmMoeDsa", "AXK1"))]
)
def test_heads_over_two_and_keys_over_two(four, family):
    """Four ranks have one head each, and groups of two share the keys. Later requests reuse tokens within a page."""
    results = four.run(rank_engine_jobs.generate, family, PROMPTS, GREEDY, context_parallel=2)
    check(results, family)
    cached = [cached for _, _, cached in results[0][0]]
    # A page is 4 tokens on each of two ranks.
    assert cached == [0, 32, 0, 0, 40]
    whole = {name: weight.numel() for name, weight in model(family).model.layers[-1].named_parameters()}
    for weights, page in results[1:]:
        assert page == 4 * 40
        for part in ("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj", "mlp.shared_experts.up_proj"):
            assert weights[f"{part}.weight"] * 4 == whole[f"{part}.weight"]
        assert weights["mlp.experts.down_proj"] * 4 == whole["mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("DeepseekV3", {}),
        ("DeepseekV32", {"context_parallel": 2, "max_num_batched_tokens": 20}),
        ("DeepseekV3", {"context_parallel": 2, "num_speculative_tokens": 3, "cache_format": "fp32"}),
        ("Youtu", {"context_parallel": 2}),
        ("Mistral4", {"context_parallel": 2}),
        ("HYV4", {}),
        pytest.param("AXK2", {"context_parallel": 2}, marks=pytest.mark.full),
    ],
)
def test_two_ranks(two, family, options):
    check(two.run(rank_engine_jobs.generate, family, PROMPTS, GREEDY, **options), family)


def test_three_ranks_divide_unevenly(tmp_path):
    """4 heads are divided into 1, 1 and 2, and an expert's 32 inner dims into 8, 8 and 16: PyTorch does not support
    rows of 10 or 11."""
    three = Ranks(3)
    try:
        check(three.run(rank_engine_jobs.generate, "DeepseekV3", PROMPTS, GREEDY), "DeepseekV3")
        model("DeepseekV3").save_pretrained(tmp_path)
        check(three.run(rank_engine_jobs.generate, tmp_path, PROMPTS, GREEDY), "DeepseekV3")
    finally:
        three.close()


@pytest.mark.parametrize("swap_space", [0, 16])
def test_requests_are_preempted_on_all_ranks(two, swap_space):
    options = {"context_parallel": 2, "num_pages": 11, "swap_space": swap_space, "enable_prefix_caching": False}
    statistics = check(two.run(rank_engine_jobs.generate, "DeepseekV3", PROMPTS, GREEDY, **options), "DeepseekV3")
    assert statistics["swapped" if swap_space else "recomputed"] > 0


def test_draws_equal_those_of_one_process(two):
    """Rank 0 samples, and gets logits of prompt tokens from the other ranks too."""
    drawn = SamplingParams(
        max_tokens=NEW,
        temperature=0.9,
        top_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logit_bias={5: 1.0},
        prompt_logprobs=1,
        seed=3,
    )
    outputs, _ = two.run(rank_engine_jobs.generate, "DeepseekV3", PROMPTS, drawn)[0]
    alone = Engine(model("DeepseekV3"), **rank_engine_jobs.SIZES).generate(PROMPTS, drawn)
    assert [tokens for tokens, _, _ in outputs] == [output.outputs[0].token_ids for output in alone]


def test_a_request_with_nan_logits_ends_and_the_others_continue(two):
    healthy = [PROMPTS[2], prompt(22, 1)]
    assert all(rank_engine_jobs.POISON not in tokens for tokens in healthy)
    poisoned = [*prompt(21, 9), rank_engine_jobs.POISON]
    outputs, _ = two.run(rank_engine_jobs.generate_poisoned, [healthy[0], poisoned, healthy[1]], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    for tokens, output in zip(healthy, outputs[::2], strict=True):
        assert output.outputs[0].token_ids == generated_by_transformers("DeepseekV3", tokens, NEW)


def test_a_checkpoint_is_divided(two, tmp_path):
    model("DeepseekV3").save_pretrained(tmp_path)
    check(two.run(rank_engine_jobs.generate, tmp_path, PROMPTS, GREEDY), "DeepseekV3")
    # Texts end where the checkpoint says, as on one rank.
    whole = generated_by_transformers("DeepseekV3", PROMPTS[2], NEW)
    config = json.loads((tmp_path / "generation_config.json").read_text()) | {"eos_token_id": [96, whole[2]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    (output, *_), _ = two.run(rank_engine_jobs.generate, tmp_path, PROMPTS[2:3], GREEDY)[0]
    assert output[0] == whole[: whole.index(whole[2]) + 1]


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({}, ["cached_tokens"]),
        (
            {"num_speculative_tokens": 2, "num_pages": 12, "swap_space": 12, "max_num_batched_tokens": 12},
            ["cached_tokens", "accepted_tokens", "swapped"],
        ),
    ],
    ids=["plain", "drafts and few pages"],
)
def test_deepseek_v4s_groups_of_heads_over_two(two, options, counted):
    family = "DeepseekV4"
    results = two.run(rank_engine_jobs.generate, family, PROMPTS, GREEDY, page_size=8, **options)
    statistics = check(results, family)
    assert all(statistics[name] > 0 for name in counted)
    numbers, _ = results[1]
    for name, weight in model(family).model.layers[-1].named_parameters():
        assert numbers[name] == weight.numel() // (2 if any(part in name for part in HALVED) else 1), name


@pytest.mark.parametrize(
    ("family", "sizes"), [("DeepseekV3", fp8_linears.SIZES), ("DeepseekV4", {"moe_intermediate_size": 32})]
)
def test_a_float8_checkpoint_is_divided(two, family, sizes, tmp_path, monkeypatch):
    fp8_linears.save(model(family, **sizes), tmp_path)
    ran = two.run(rank_engine_jobs.generate_in_float8, tmp_path, PROMPTS, GREEDY, page_size=8)
    (outputs, _), (numbers, _) = ran
    fp8_linears.install(monkeypatch)
    fp8_linears.keep_quantized(monkeypatch)
    settings: dict[str, Any] = rank_engine_jobs.SIZES | {"page_size": 8}
    alone = Engine(tmp_path, **settings)
    assert [tokens for tokens, _, _ in outputs] == [
        output.outputs[0].token_ids for output in alone.generate(PROMPTS, GREEDY)
    ]
    layer = alone.model._body.layers[-1]
    assert layer.mlp.experts.down_proj.dtype == layer.self_attn.q_b_proj.weight.dtype == torch.float8_e4m3fn
    for name, weight in layer.named_parameters():
        assert numbers[name] == weight.numel() // (2 if any(part in name for part in HALVED) else 1), name
