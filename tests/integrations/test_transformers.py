"""An enabled model compared with stock attention: generation and forward passes."""

import copy
import warnings

import pytest
import torch
from support.marks import mostly_full
from support.transformers_pairs import assert_same_tokens, generate, pair

from flashlatte.integrations.transformers import enable
from flashlatte.ops.dense_prefill import dense_prefill
from flashlatte.runtime import gradients

pytest.importorskip("transformers")

from transformers import DynamicCache

from flashlatte.integrations.transformers.calls import CACHE

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.3},
    "top_p": {"do_sample": True, "top_p": 0.9, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled_beams": {"do_sample": True, "num_beams": 2},
    "several_sequences": {"do_sample": True, "num_return_sequences": 3},
    "several_beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "prefill_by_chunks": {"do_sample": False, "prefill_chunk_size": 16},
    "prefill_by_long_chunks": {"do_sample": False, "prefill_chunk_size": 40},
    "no_cache": {"do_sample": False, "use_cache": False},
    "repetition_penalty": {"do_sample": False, "repetition_penalty": 1.3},
}


def assert_same_logits(got, expected):
    assert not got.isnan().any()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "mode", mostly_full(MODES, "greedy", "top_p", "several_beams", "prefill_by_chunks", "repetition_penalty")
)
@pytest.mark.parametrize("pads", [(0,), pytest.param((5, 0, 66), marks=pytest.mark.full)])
def test_generate_gives_the_tokens_of_stock_attention(make_model, prompts, mode, pads):
    stock, enabled = pair(make_model())
    assert_same_tokens(stock, enabled, prompts(pads), **MODES[mode])


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"q_lora_rank": None},
        {"attention_bias": True},
        {"rope_interleave": False},
        {"rope_parameters": YARN},
        {"kv_lora_rank": 32, "qk_rope_head_dim": 16},
        {"kv_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 40},
        {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16},
        {"attn_implementation": "eager"},
    ],
    ids=lambda options: ",".join(options),
)
def test_generate_of_other_models(make_model, prompts, options):
    stock, enabled = pair(make_model(**options))
    assert_same_tokens(stock, enabled, prompts((3, 0)), do_sample=False)


@pytest.mark.parametrize(
    "page_size", [pytest.param(1, marks=pytest.mark.full), 3, pytest.param(128, marks=pytest.mark.full)]
)
def test_generate_with_other_page_sizes(make_model, prompts, page_size):
    stock, enabled = pair(make_model(), page_size=page_size)
    assert_same_tokens(stock, enabled, prompts((0, 7)), do_sample=False)


def test_decode_is_dense_decode_and_prefill_is_not(make_model, prompts, calls):
    model = enable(make_model())
    generate(model, prompts((0,)), max_new_tokens=1)
    assert calls == {"dense_decode": 0, "sparse_decode": 0}
    generate(model, prompts((4, 0)), max_new_tokens=8)
    layers = 2
    assert calls == {"dense_decode": 7 * layers, "sparse_decode": 0}


@pytest.mark.parametrize(
    ("options", "generation", "expected"),
    [
        ({}, {}, 2),
        # Chunks of 40 and 30 tokens, the second over the first.
        ({}, {"prefill_chunk_size": 40}, 2 + 2 * 2),
        ({"attn_implementation": "eager"}, {}, 0),
    ],
    ids=["whole", "chunks", "chosen"],
)
def test_prefill_is_dense_prefill(make_model, prompts, monkeypatch, options, generation, expected):
    calls = []

    def counting(*args, **kwargs):
        calls.append(args)
        return dense_prefill(*args, **kwargs)

    monkeypatch.setattr("flashlatte.layers.prefill.dense_prefill", counting)
    generate(enable(make_model(**options)), prompts((4, 0)), max_new_tokens=3, **generation)
    assert len(calls) == expected


@pytest.mark.parametrize(("cache_format", "kv_lora_rank"), [("v32", 512), ("model1", 448)])
def test_decode_of_tiled_formats_is_sparse_decode(make_model, prompts, calls, cache_format, kv_lora_rank):
    model = enable(make_model(kv_lora_rank=kv_lora_rank), cache_format)
    generate(model, prompts((4, 0)), max_new_tokens=8)
    assert calls == {"dense_decode": 0, "sparse_decode": 14}


@pytest.mark.full
def test_several_calls_with_growing_and_shrinking_batches(make_model, prompts):
    stock, enabled = pair(make_model())
    for seed, pads in enumerate([(0,), (9, 0), (1, 2, 0, 30), (2,)]):
        assert_same_tokens(stock, enabled, prompts(pads, length=40 + seed), do_sample=True, seed=seed)


def test_a_sequence_that_ends_early(make_model, prompts):
    stock, enabled = pair(make_model())
    inputs = prompts((0, 6, 2))
    end = generate(stock, inputs, do_sample=False)[1, 75].item()
    expected = generate(stock, inputs, do_sample=False, eos_token_id=end)
    ended = (expected[:, 70:] == end).cumsum(dim=1).bool().sum(dim=1)
    assert ended.unique().numel() > 1
    torch.testing.assert_close(generate(enabled, inputs, do_sample=False, eos_token_id=end), expected)


@pytest.mark.parametrize("pads", [pytest.param((0,), marks=pytest.mark.full), (5, 0)])
def test_right_padded_prompts(make_model, prompts, pads):
    stock, enabled = pair(make_model())
    assert_same_tokens(stock, enabled, prompts(pads, side="right"), do_sample=False)


def test_prompt_lookup_and_assistant(make_model, prompts, calls):
    stock, enabled = pair(make_model())
    inputs = prompts((0,), length=20)
    inputs = {name: value.repeat(1, 3) for name, value in inputs.items()}
    assert_same_tokens(stock, enabled, inputs, do_sample=False, prompt_lookup_num_tokens=4)
    assert calls["dense_decode"] > 0
    # The draft model has two other layers, so that some of its candidates are rejected.
    assistant = copy.deepcopy(stock)
    with torch.no_grad():
        assistant.lm_head.weight += 0.1 * torch.randn_like(assistant.lm_head.weight)
    expected = generate(stock, inputs, do_sample=False)
    for helper in (assistant, enable(copy.deepcopy(assistant))):
        torch.testing.assert_close(generate(enabled, inputs, do_sample=False, assistant_model=helper), expected)
    torch.testing.assert_close(generate(enabled, inputs, do_sample=False, assistant_early_exit=1), expected)


def test_generate_from_embeddings(make_model, prompts):
    stock, enabled = pair(make_model())
    inputs = prompts((2, 0))
    embeds = stock.model.embed_tokens(inputs["input_ids"]).detach()
    options = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"], "do_sample": False}
    torch.testing.assert_close(generate(enabled, options), generate(stock, options))


@pytest.mark.parametrize("pads", [pytest.param((0,), marks=pytest.mark.full), (6, 0, 1)])
def test_generate_continues_with_the_cache_of_an_earlier_call(make_model, prompts, pads):
    stock, enabled = pair(make_model())
    sequences = []
    for model in (stock, enabled):
        inputs, cache = prompts(pads), None
        for turn in range(3):
            out = generate(model, inputs, **{CACHE: cache}, return_dict_in_generate=True, do_sample=True, seed=turn)
            new = prompts([0] * len(pads), length=5 + 20 * turn)["input_ids"]
            cache = out.past_key_values
            ids = torch.cat((out.sequences, new), dim=1)
            grown = torch.ones(len(pads), ids.shape[1] - inputs["attention_mask"].shape[1], dtype=torch.long)
            inputs = {"input_ids": ids, "attention_mask": torch.cat((inputs["attention_mask"], grown), dim=1)}
        sequences.append(ids)
    torch.testing.assert_close(sequences[1], sequences[0])


def test_a_callers_dynamic_cache_becomes_the_paged_one(make_model, prompts):
    stock, enabled = pair(make_model())
    inputs = prompts((0,))
    for cache in (DynamicCache(), DynamicCache(config=stock.config)):
        out = generate(enabled, inputs, seed=0, **{CACHE: cache}, return_dict_in_generate=True, do_sample=False)
        assert out.past_key_values is cache
        assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 23
        torch.testing.assert_close(out.sequences, generate(stock, inputs, do_sample=False))


@pytest.mark.parametrize("side", ["left", "right"])
def test_forward_pass_with_padding(make_model, prompts, side):
    stock, enabled = pair(make_model())
    inputs = prompts((9, 0, 31), side=side)
    for use_cache in (True, False):
        with torch.no_grad():
            expected, got = (model(**inputs, use_cache=use_cache) for model in (stock, enabled))
        assert_same_logits(got.logits, expected.logits)
    assert_same_logits(got.logits, stock(**inputs).logits)


def test_forward_pass_with_positional_arguments_and_loss(make_model, prompts):
    stock, enabled = pair(make_model())
    ids, mask = prompts((2, 0)).values()
    with torch.no_grad():
        assert_same_logits(enabled(ids, mask).logits, stock(ids, mask).logits)
        assert_same_logits(enabled(ids, labels=ids).loss, stock(ids, labels=ids).loss)
        out = enabled.model(ids, mask)
        assert type(out.past_key_values).__name__ == "PagedLatentCache"
        assert_same_logits(out.last_hidden_state, stock.model(ids, mask).last_hidden_state)
        hidden = [model(ids, output_hidden_states=True).hidden_states for model in (stock, enabled)]
    # Not normalized: its elements are up to 20.
    torch.testing.assert_close(torch.stack(hidden[1]), torch.stack(hidden[0]), rtol=1e-4, atol=1e-3)


def test_output_attentions_comes_from_stock_attention(make_model, prompts):
    stock, enabled = pair(make_model(attn_implementation="eager"))
    options = {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 4}
    expected, got = (generate(model, prompts((3, 0)), **options).attentions for model in (stock, enabled))
    for step, step_got in zip(expected, got, strict=True):
        torch.testing.assert_close(torch.stack(step_got), torch.stack(step))


def test_gradients_come_from_stock_attention(make_model, prompts):
    stock, enabled = pair(make_model())
    inputs = prompts((4, 0), length=20)
    for model in (stock, enabled):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    for (name, expected), got in zip(stock.named_parameters(), enabled.parameters(), strict=True):
        if expected.grad is not None:
            assert got.grad is not None, name
            torch.testing.assert_close(got.grad, expected.grad)
    assert_same_tokens(stock, enabled, inputs, do_sample=False)


def test_gradients_after_a_prefill_without(make_model, prompts):
    stock, enabled = pair(make_model())
    ids = prompts((0, 0), length=24)["input_ids"]
    for model in (stock, enabled):
        with torch.no_grad():
            cache = model(ids[:, :20]).past_key_values
        for column in range(20, 24):
            out = model(ids[:, column : column + 1], **{CACHE: cache})
            assert out.past_key_values is cache
        out.logits.square().mean().backward()
    expected, got = (model.model.layers[0].self_attn.kv_b_proj.weight.grad for model in (stock, enabled))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4"])
def test_a_gradient_required_by_a_hook_is_dropped_with_a_warning(make_model, prompts, monkeypatch, family):
    """``enable_input_require_grads`` and similar: no parameter requires a gradient, so stock attention is not used."""
    from support.transformers_v4 import model_of

    monkeypatch.setattr(gradients, "_warned", set())
    model = enable((make_model() if family == "DeepseekV3" else model_of()).requires_grad_(False))
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())
    inputs = prompts((0, 2), length=9)
    with pytest.warns(UserWarning, match=f"^{family}Attention of an enabled model has no backward") as caught:
        model(**inputs, use_cache=True)
    assert sum("has no backward" in str(warning.message) for warning in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**inputs, use_cache=True)
        monkeypatch.setattr(gradients, "_warned", set())
        with torch.no_grad():
            model(**inputs, use_cache=True)
            generate(model, inputs, max_new_tokens=2)


@pytest.mark.parametrize("name", sorted({"past_key_values", CACHE}))
def test_the_decoder_takes_a_cache_by_each_of_its_names(make_model, prompts, name):
    cache = DynamicCache()
    with torch.no_grad():
        out = enable(make_model()).model(**prompts((0,)), **{name: cache})
    assert out[CACHE] is cache
    assert type(cache).__name__ == "PagedLatentCache"


def test_weights_may_change_after_enable(make_model, prompts):
    stock, enabled = pair(make_model())
    torch.manual_seed(3)
    for layer, copied in zip(stock.model.layers, enabled.model.layers, strict=True):
        update = torch.randn_like(layer.self_attn.kv_b_proj.weight)
        layer.self_attn.kv_b_proj.weight.data += update
        copied.self_attn.kv_b_proj.weight = torch.nn.Parameter(copied.self_attn.kv_b_proj.weight + update)
    assert_same_tokens(stock, enabled, prompts((1, 0)), do_sample=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_to_another_dtype_is_stock_attention_s(make_model, prompts, calls, dtype):
    stock, enabled = pair(make_model().to(dtype))
    inputs = prompts((2, 0))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected, got = (generate(model, inputs, do_sample=False) for model in (stock, enabled))
    assert any(calls.values()) == (dtype == torch.bfloat16)
    if dtype != torch.bfloat16:
        assert got.equal(expected)


def test_a_paged_cache_continues_under_autocast(make_model, prompts):
    stock, enabled = pair(make_model())
    ids = prompts((0, 0), length=24)["input_ids"]
    logits = []
    for model in (stock, enabled):
        with torch.inference_mode():
            cache = model(ids[:, :20]).past_key_values
            with torch.autocast("cpu", torch.bfloat16):
                logits.append(model(ids[:, 20:], **{CACHE: cache}).logits)
    torch.testing.assert_close(*logits, rtol=0.1, atol=0.1)


def test_inference_mode_then_no_grad(make_model, prompts):
    stock, enabled = pair(make_model())
    ids = prompts((0,))["input_ids"]
    with torch.inference_mode():
        cache = enabled(ids[:, :-1]).past_key_values
    with torch.no_grad():
        cache.reorder_cache(torch.zeros(1, dtype=torch.int64))
        got = enabled(ids[:, -1:], **{CACHE: cache}).logits
        assert_same_logits(got, stock(ids).logits[:, -1:])
