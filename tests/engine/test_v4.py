"""DeepSeek-V4 in the engine: greedy tokens are those of transformers for any division of prompts into steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

from support.engine_models import chosen_logprobs, generated_by_transformers, greedy, model, prompt, prompt_logprobs
from support.marks import mostly_full

from flashlatte.engine import Engine
from flashlatte.engine.prompt_lookup import PromptLookup
from flashlatte.engine.v4 import V4Model
from flashlatte.layers.v4.builder import V4Metadata
from flashlatte.layers.v4.workspace import WorkspaceLimits
from flashlatte.ops.sparse_prefill import sparse_prefill

FAMILY, LENGTHS = "DeepseekV4", (1, 5, 31, 19)


def engine(**options: Any) -> Engine:
    sizes: dict[str, Any] = {"num_pages": 24, "page_size": 8, "max_num_batched_tokens": 12}
    return Engine(model(FAMILY), **sizes | options)


def check(served, lengths=LENGTHS, new=9):
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    outputs = served.generate(prompts, greedy(new))
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == generated_by_transformers(FAMILY, tokens, new)
    assert served.pool.in_use == 0


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 5, "page_size": 16, "num_pages": 12}], ids=["12", "5"]
)
def test_mixed_lengths(options):
    check(engine(**options))


def test_a_small_pool_preempts_and_recomputes_requests():
    small = engine(num_pages=7, max_num_seqs=3)
    check(small)
    assert small.statistics()["recomputed"] > 0


@pytest.mark.full
def test_more_requests_than_run_at_a_time():
    """Later requests reuse the state slots of finished ones."""
    check(engine(max_num_seqs=2, max_num_batched_tokens=30), lengths=(9, 21, 4, 13, 7), new=4)


def replayed(served: Engine) -> Engine:
    """Makes decode steps behave like graphs: the metadata of the first step of a batch size is reused."""
    runner, first, buffers = served.runner, {}, []

    def padded(size: int, metadata: V4Metadata) -> torch.Tensor:
        if not any(metadata.buffers is known for known in buffers):
            first.clear()
            buffers.append(metadata.buffers)
        return runner._logits(first.setdefault(size, metadata), runner._rows[:size])

    runner._padded, runner._use_graphs = padded, True
    return served


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"num_pages": 7, "max_num_seqs": 3}], ids=["at ease", "giving way"])
def test_steps_that_generate_as_graphs(options):
    check(replayed(engine(**options)))


def test_a_prompt_over_a_workspace(monkeypatch):
    over_workspaces = []

    def counted(q, *args, **kwargs):
        over_workspaces.append(len(q))
        return sparse_prefill(q, *args, **kwargs)

    monkeypatch.setattr("flashlatte.layers.v4.cache_attention.sparse_prefill", counted)
    monkeypatch.setattr(V4Model, "workspaces", WorkspaceLimits(min_queries=141))
    check(engine(max_num_batched_tokens=150, num_pages=40), lengths=(141, 6), new=3)
    assert over_workspaces == [141] * 3


@pytest.mark.parametrize("max_num_batched_tokens", mostly_full((1, 5, 64), 5))
def test_requests_with_a_common_prefix_share_pages(max_num_batched_tokens):
    """After a shared page the last group is recomputed, in any chunks, without changing other requests' rows."""
    served = replayed(engine(max_num_batched_tokens=max_num_batched_tokens))
    alike, asked = prompt(26), greedy(4)
    prompts = [[*alike, *rest] for rest in ([], [1, 2, 3], [2], [2, 4, 4])]
    for tokens in prompts:
        (output,) = served.generate([tokens], asked)
        assert output.outputs[0].token_ids == generated_by_transformers(FAMILY, tokens, 4)
    assert served.statistics()["cached_tokens"] == 3 * (24 - 4)
    before = [cache.clone() for cache in served.runner.caches]
    # The first request ends last, while the others read the same pages.
    for tokens, output in zip(prompts[::-1], served.generate(prompts[::-1], asked), strict=True):
        assert output.outputs[0].token_ids == generated_by_transformers(FAMILY, tokens, 4)
    pages = served.pool.match(alike)
    assert len(pages) == 3
    for cache, old in zip(served.runner.caches, before, strict=True):
        assert cache[pages].equal(old[pages])


@pytest.mark.full
def test_a_shared_prefix_of_preempted_requests():
    small = engine(num_pages=9, max_num_seqs=4, max_num_batched_tokens=9)
    alike = prompt(17)
    prompts = [[*alike, *prompt(length, length)] for length in (3, 9, 1, 14)]
    for tokens, output in zip(prompts, small.generate(prompts, greedy(9)), strict=True):
        assert output.outputs[0].token_ids == generated_by_transformers(FAMILY, tokens, 9)
    statistics = small.statistics()
    assert statistics["recomputed"] > 0
    assert statistics["cached_tokens"] > 0


@pytest.mark.full
def test_a_small_pool_swaps_requests():
    """States stay on the device while pages are swapped to the host."""
    small = engine(num_pages=7, max_num_seqs=3, swap_space=20)
    check(small)
    assert small.statistics()["swapped"] > 0


@pytest.mark.parametrize("num_speculative_tokens", mostly_full((1, 6), 6))
def test_rejected_drafts(num_speculative_tokens, monkeypatch):
    """Drafts complete groups, which are recomputed after rejection: all accepted, all rejected, or only the first
    accepted."""
    lengths, new = (3, 13, 22), 20
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    texts = [tokens + generated_by_transformers(FAMILY, tokens, new) for tokens in prompts]

    def guesses(lookup, tokens, count):
        text = next(text for text in texts if text[:3] == tokens[:3])
        right = len(tokens) * 7 % (count + 2)
        return [token if i < right else 96 - token for i, token in enumerate(text[len(tokens) :][:count])]

    monkeypatch.setattr(PromptLookup, "propose", guesses)
    served = engine(num_speculative_tokens=num_speculative_tokens)
    for text, output in zip(texts, served.generate(prompts, greedy(new)), strict=True):
        assert output.prompt_token_ids + output.outputs[0].token_ids == text
    assert served.statistics()["computed_tokens"] > sum(lengths) + len(lengths) * new


def test_a_checkpoint_in_bf16_whose_norms_transformers_keeps_in_float32(tmp_path):
    source = copy.deepcopy(model(FAMILY)).bfloat16()
    source.save_pretrained(tmp_path)
    served = Engine(tmp_path, num_pages=24, page_size=8)
    assert served.runner.model._body.norm.weight.dtype == torch.float32
    asked = [prompt(31), prompt(5, 1)]
    sampling = greedy(1, logprobs=0)
    expected = Engine(source.float(), num_pages=24, page_size=8).generate(asked, sampling)
    for output, exact in zip(served.generate(asked, sampling), expected, strict=True):
        assert output.outputs[0].token_ids == exact.outputs[0].token_ids
        assert chosen_logprobs(output) == pytest.approx(chosen_logprobs(exact), abs=0.05)


@pytest.mark.full
@pytest.mark.parametrize("cache_format", ["model1", "v41"])
def test_quantized_caches(cache_format):
    """With prompts in chunks and requests that are recomputed; all experts are chosen by the token."""
    sizes = {"head_dim": 512, "partial_rotary_factor": 0.125, "index_head_dim": 64, "index_topk": 60}
    source = model(FAMILY, **sizes, mlp_layer_types=("hash_moe",) * 3)
    prompts = [prompt(length, seed) for seed, length in enumerate((19, 21, 12))]
    sampling = greedy(9, prompt_logprobs=0)
    options: dict[str, Any] = {"page_size": 8, "num_pages": 6, "max_num_batched_tokens": 12}
    exact = Engine(source, **options).generate(prompts, sampling)
    served = Engine(source, **options, cache_format=cache_format)
    errors = prompt_logprobs(served.generate(prompts, sampling)) - prompt_logprobs(exact)
    assert served.statistics()["recomputed"] > 0
    assert 1e-4 < errors.abs().mean() < 0.1


def test_a_format_of_other_rows():
    """``v32_no_rope`` has rows of 512 too, but none of their elements is rotated."""
    with pytest.raises(ValueError, match=r"^cache_format must be fp32, model1, v41 or v41_fp4 for rows of 512 "):
        Engine(model(FAMILY, head_dim=512, partial_rotary_factor=0.125, index_head_dim=64), cache_format="v32_no_rope")


def test_the_default_page_size_has_64_groups():
    served = Engine(model(FAMILY), num_pages=2)
    assert served.pool.page_size == 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 12}, "^page_size must be a multiple of 8, so that groups end with it, got 12$"),
        ({"tensor_parallel": 2, "context_parallel": 2}, "^context_parallel must be 1 for deepseek_v4, got 2$"),
        ({"cache_format": "model1"}, "^cache_format must be fp32 for rows of 32 of a model in float32, got 'model1'$"),
        ({"cache_format": "bf16"}, "^cache_format must be fp32 for rows of 32 of a model in float32, got 'bf16'$"),
        ({"cache_format": "fp8"}, "^cache_format must be fp32 for rows of 32 of a model in float32, got 'fp8'$"),
        ({"cache_format": "index_fp32"}, "^cache_format must be fp32 for rows of 32 .*, got 'index_fp32'$"),
        ({"cache_format": "v32_no_rope"}, "^cache_format must be fp32 for rows of 32 .*, got 'v32_no_rope'$"),
    ],
)
def test_unsupported_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        engine(**options)


def test_a_checkpoint_takes_a_dtype_and_a_device(tmp_path):
    model(FAMILY).save_pretrained(tmp_path)
    served = V4Model(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert (served.dtype, served.device) == (torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^dtype must be None for a model that is loaded, .* got torch\.bfloat16$"):
        V4Model(model(FAMILY), dtype=torch.bfloat16)
