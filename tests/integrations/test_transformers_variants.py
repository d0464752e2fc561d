"""Families with special features under ``enable``: other sizes, beams, chunks, and windows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.test_transformers_families import DRAWN, SUPPORTED, VISION, generate, logits

from flashlatte.integrations.transformers import enable
from flashlatte.integrations.transformers.calls import CACHE

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 20,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 12,
    "v_head_dim": 24,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
OTHER: dict[str, dict[str, Any]] = {
    "axk2": {"n_group": 2, "topk_group": 1, "index_topk": 5, "num_hidden_layers": 2},
    "hy4": {"hc_mult": 3, "index_topk": 7, "indexer_types": ["full", "shared", "shared"]},
    "dots3": {"sliding_window": 3, "head_dim": 16, "num_hidden_layers": 5, "layer_types": None},
    "glm5-next": {"index_kpool": 2, "index_topk": 6, "qk_rope_head_dim": 0},
    "large4": {"index_topk": 5, "no_rope_layers": [0, 0, 1, 1], "kv_source_layers": [0, 0, 2, 2]},
}


def make(name: str) -> Any:
    family, options = SUPPORTED[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(1)
    text = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = text(**SIZES | {k: v for k, v in options.items() if k not in SIZES} | OTHER[name])
    if hasattr(transformers, f"{family}ForCausalLM"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    else:
        whole = getattr(transformers, f"{family}Config")(text_config=config.to_dict(), vision_config=VISION)
        model = getattr(transformers, f"{family}ForConditionalGeneration")(whole)
    for parameter, weight in model.named_parameters():
        if parameter.endswith(DRAWN):
            weight.data.normal_(1.0 if "norm" in parameter else 0.0, 0.5)
    model.get_input_embeddings().weight.data[0].normal_(0.0, 0.3)
    return model.eval()


@pytest.fixture(params=OTHER)
def stock(request) -> Any:
    return make(request.param)


def test_other_sizes(stock, prompts):
    inputs = prompts((7, 0), length=33)
    enabled = enable(copy.deepcopy(stock), page_size=8)
    assert torch.equal(generate(enabled, inputs), generate(stock, inputs))
    for got, expected in zip(logits(enabled, inputs), logits(stock, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2, "max_new_tokens": 6}, pytest.param({"prefill_chunk_size": 11}, marks=pytest.mark.full)],
    ids=["beams", "chunked prefill"],
)
def test_generate(stock, prompts, options):
    inputs = prompts((0,) if "prefill_chunk_size" in options else (5, 0), length=30)
    enabled = enable(copy.deepcopy(stock), page_size=16)
    assert torch.equal(generate(enabled, inputs, **options), generate(stock, inputs, **options))


@torch.no_grad()
@pytest.mark.parametrize("name", ["dots3", "glm5-next"])
def test_windows_and_pools_count_hidden_columns(name, prompts):
    """A decode step after hidden columns: the window begins later, and a pool's tail repeats a selected pool."""
    stock = make(name)
    enabled = enable(copy.deepcopy(stock), page_size=4)
    ids = prompts((0, 0), length=24)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 1] = mask[0, 20:22] = mask[1, 21] = 0
    found = []
    for model in (stock, enabled):
        cache = model(ids[:, :23], attention_mask=mask[:, :23], use_cache=True).past_key_values
        found.append(model(ids[:, 23:], attention_mask=mask, **{CACHE: cache}).logits)
    assert type(cache).__name__ == "PagedLatentCache"
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-4)


def test_full_attention_between_layers_that_select_is_refused():
    options = SUPPORTED["dots3"][1] | OTHER["dots3"] | {"use_dsa": None}
    if not hasattr(transformers, "Dots3NoteTextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Dots3Note")
    options |= {"layer_types": ["full_attention", "indexed_attention", "sliding_attention"], "num_hidden_layers": 3}
    options |= {"per_layer_config": {}}
    config = transformers.Dots3NoteTextConfig(**SIZES | {k: v for k, v in options.items() if k not in SIZES})
    with pytest.raises(ValueError, match=r"^layer_types must not have both indexed_attention and full_attention"):
        enable(transformers.Dots3NoteForCausalLM(config))
