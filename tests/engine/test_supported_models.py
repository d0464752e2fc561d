"""Models, wrapper modules and checkpoints that the engine supports, and those that it rejects."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import transformers
from support.engine_models import (
    VISION,
    check,
    engine,
    generated_by_transformers,
    greedy,
    model,
    prompt,
    prompt_logprobs,
)

from flashlatte.engine import Engine, Model
from flashlatte.integrations.transformers import enable


def test_a_model_with_other_layers_is_refused_by_name():
    other: Any = type("Other", (), {"config": type("Config", (), {"model_type": "llama"})})
    with pytest.raises(ValueError, match=r"deepseek_v3.*got 'llama'$"):
        Engine(other)
    other.config.model_type = "deepseek_v41"
    with pytest.raises(ValueError, match=r"got 'deepseek_v41': transformers has no such model, and Engram, .* here$"):
        Engine(other)
    with pytest.raises(TypeError, match=r"^model must be of transformers, or the directory of a checkpoint, got None$"):
        Engine(None)


@pytest.mark.parametrize(("name", "value"), [("dtype", torch.bfloat16), ("device", "cpu")])
def test_a_loaded_model_is_not_changed(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be None for a model that is loaded, .* got {value}$"):
        Model(model(), **{name: value})


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4"])
def test_a_model_without_a_head_is_refused(family):
    with pytest.raises(
        TypeError, match=rf"^model must have decoder layers and a head .*ForCausalLM, got {family}Model$"
    ):
        Engine(model(family).model)


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4"])
def test_hooks_that_collect_hidden_states_are_accepted(family):
    """transformers leaves these hooks on the layers after the first call with output_hidden_states."""
    hooked = copy.deepcopy(model(family))
    hooked(torch.tensor([prompt(5)]), output_hidden_states=True)
    assert hooked.model.layers[1]._forward_hooks
    (output,) = Engine(hooked, num_pages=24, page_size=16).generate([prompt(5)], greedy(3))
    (alone,) = Engine(model(family), num_pages=24, page_size=16).generate([prompt(5)], greedy(3))
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_softmax_scale_that_is_not_that_of_the_config_is_refused():
    changed = copy.deepcopy(model())
    changed.model.layers[1].self_attn.scaling *= 1.1
    with pytest.raises(ValueError, match=r"^scaling of layer 1's attention must be 0\.2041.*, got 0\.2245"):
        Engine(changed, num_pages=24, page_size=16)


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4"])
def test_hooks_that_the_engine_would_skip_are_refused(family):
    hooked = copy.deepcopy(model(family))
    layer = hooked.model.layers[1]
    for name in ("", "self_attn", "self_attn.q_b_proj", "input_layernorm"):
        hook = layer.get_submodule(name).register_forward_hook(lambda *called: called[2])
        with pytest.raises(TypeError, match=f"^layer 1 of the model must have no .*got some on {name or 'the layer'}$"):
            Engine(hooked, num_pages=24, page_size=16)
        hook.remove()
    for name in ("", "self_attn"):
        part = layer.get_submodule(name)
        part.forward = lambda *args, part=part, **kwargs: type(part).forward(part, *args, **kwargs)
        with pytest.raises(TypeError, match=f"^layer 1 .*: got another forward on {name or 'the layer'}$"):
            Engine(hooked, num_pages=24, page_size=16)
        del part.forward
    layer.mlp.register_forward_hook(lambda *called: called[2])
    (output,) = Engine(hooked, num_pages=24, page_size=16).generate([prompt(5)], greedy(3))
    assert output.outputs[0].token_ids == generated_by_transformers(family, prompt(5), 3)


def test_a_checkpoint_of_kimi_k2(tmp_path):
    """Its config names a model type that transformers does not have, and custom code."""
    model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2", "auto_map": code}))
    (output,) = Engine(tmp_path, num_pages=24, page_size=16).generate([prompt(5)], greedy(3))
    assert output.outputs[0].token_ids == generated_by_transformers("DeepseekV3", prompt(5), 3)


@pytest.mark.parametrize(
    ("family", "name", "told"),
    [
        ("DeepseekV3", "model.norm", "the last norm of the model"),
        ("DeepseekV3", "model", "the decoder"),
        ("DeepseekV3", "", "the model"),
        ("HYV4VL", "model.language_model", "the decoder"),
        ("HYV4VL", "model", "the model"),
        ("HYV4VL", "", "the model"),
    ],
)
def test_hooks_around_the_layers_are_refused(family, name, told):
    hooked = copy.deepcopy(model(family))
    hooked.get_submodule(name).register_forward_hook(lambda *called: called[2])
    with pytest.raises(TypeError, match=f"^{told} must have no hooks"):
        Engine(hooked, num_pages=24, page_size=16)


@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4", "Glm5Next", "HYV4VL", "MistralLarge4"])
def test_an_enabled_model_is_supported(family):
    """The hooks of ``enable`` do not affect the engine."""
    enabled = enable(copy.deepcopy(model(family)))
    (output,) = Engine(enabled, num_pages=24, page_size=16).generate([prompt(5)], greedy(3))
    assert output.outputs[0].token_ids == generated_by_transformers(family, prompt(5), 3)


@pytest.mark.parametrize(
    "family", ["Glm5Next", "HYV4VL", "KimiLinear", "BailingHybrid", "LongcatFlash", "MiniCPM3", "MistralLarge4"]
)
def test_a_checkpoint_with_other_layers_or_another_model_around(family, tmp_path):
    model(family).save_pretrained(tmp_path)
    (output,) = Engine(tmp_path, num_pages=24, page_size=16).generate([prompt(5)], greedy(3))
    assert output.outputs[0].token_ids == generated_by_transformers(family, prompt(5), 3)


def test_dots3_note_with_vision_and_audio_accepts_tokens(tmp_path):
    inner = model("Dots3Note")
    vision = VISION | {"adapter_in_dim": 32, "adapter_out_dim": 64, "mlp_layer_types": ["dense"]}
    audio = VISION | {"adapter_input_size": 32, "adapter_out_dim": 64, "downsample_hidden_size": 8, "feature_size": 16}
    parts = {"text_config": inner.config.to_dict(), "vision_config": vision, "audio_config": audio}
    whole = transformers.Dots3NoteForConditionalGeneration(transformers.Dots3NoteConfig(**parts)).eval()
    whole.model.language_model.load_state_dict(inner.model.state_dict())
    whole.lm_head.load_state_dict(inner.lm_head.state_dict())
    check(engine(whole), "Dots3Note", 5)
    whole.save_pretrained(tmp_path)
    (output,) = Engine(tmp_path, num_pages=24, page_size=16).generate([prompt(5)], greedy(3))
    assert output.outputs[0].token_ids == generated_by_transformers("Dots3Note", prompt(5), 3)


@pytest.mark.parametrize(
    "changes",
    [
        # No layer shares latents, but one shares a selection.
        {
            "num_hidden_layers": 3,
            "no_rope_layers": (1, 1, 0),
            "kv_source_layers": (0, 1, 2),
            "indexer_types": ("full", "full", "shared"),
            "final_logit_softcapping": 30.0,
        },
        # One without a rotation is read by two layers, one of which shares its selection too.
        {
            "no_rope_layers": (0, 0, 0, 1),
            "kv_source_layers": (0, 0, 0, 3),
            "indexer_types": ("full", "shared", "full", "full"),
            "index_topk": 5,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "attention_bias": True,
        },
        # Two sources of one kind.
        {
            "num_hidden_layers": 5,
            "no_rope_layers": (1, 1, 1, 1, 1),
            "kv_source_layers": (0, 0, 2, 2, 2),
            "indexer_types": ("full", "shared", "full", "full", "shared"),
        },
    ],
    ids=["own latents", "two readers", "two sources"],
)
def test_mistral_large_4_of_other_sizes(changes):
    served, prompts = model("MistralLarge4", **changes), [prompt(length, length) for length in (3, 30, 17)]
    for output in engine(served, max_num_batched_tokens=24).generate(prompts, greedy(6)):
        ids = torch.tensor([output.prompt_token_ids])
        expected = served.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()


def test_unsupported_configs_of_mistral_large_4():
    rope = {"no_rope_layers": (1, 1, 1, 1), "indexer_types": ("full",) * 4, "kv_source_layers": (0, 1, 0, 1)}
    with pytest.raises(ValueError, match=r"^kv_source_layers must name the last layer before 2 .*, got 0$"):
        Model(model("MistralLarge4", **rope))
    with pytest.raises(ValueError, match=r"^batch_invariant must be False for a model with an indexer, got True$"):
        Model(model("MistralLarge4"), batch_invariant=True)
    with pytest.raises(ValueError, match=r"^cache_format must be bf16, fp16 or fp32 for rows of 32 \+ 8 and an in"):
        engine("MistralLarge4", cache_format="fp8")
    changed = copy.deepcopy(model("MistralLarge4"))
    changed.config.text_config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(ValueError, match=r"^rope_type must be default or yarn, got 'dynamic'$"):
        Model(changed)
    changed = copy.deepcopy(model("MistralLarge4"))
    changed.model.language_model.layers[1].self_attn.v_norm = torch.nn.RMSNorm(12)
    with pytest.raises(TypeError, match=r"^MistralLarge4TextAttention must have no other parts .*, got v_norm$"):
        Model(changed)


def test_an_indexer_of_pools_excludes_formats_and_batch_invariance():
    with pytest.raises(
        ValueError, match=r"^cache_format must be bf16, fp16 or fp32 for rows of 32 \+ 0 and an indexer"
    ):
        engine("Glm5Next", cache_format="fp8")
    dense = model("Glm5Next", layer_types=("deepseek_sparse_attention",) * 4)
    with pytest.raises(ValueError, match=r"batch_invariant must be False for a glm5_next_text: PyTorch .* indexer$"):
        Model(dense, batch_invariant=True)
    assert not Model(dense).has_graphs


def test_pools_over_a_cache_without_rope():
    """``v32_no_rope`` is as wide as ``v41``; all experts are dense."""
    source = model("Glm5Next", kv_lora_rank=512, mlp_layer_types=("dense",) * 4)
    prompts = [prompt(length, seed) for seed, length in enumerate((17, 30))]
    sampling = greedy(1, prompt_logprobs=0)
    quantized, exact = (engine(source, cache_format=name).generate(prompts, sampling) for name in ("v32_no_rope", None))
    errors = prompt_logprobs(quantized) - prompt_logprobs(exact)
    assert 1e-4 < errors.abs().mean() < 0.1


def test_drafts_over_pools_of_tokens():
    """Without linear attention the engine can verify drafts; states of rejected drafts are overwritten."""
    # No two pools of 4 tokens are the same: their scores would be equal, and the selection among them arbitrary.
    dense, repeated = model("Glm5Next", layer_types=("deepseek_sparse_attention",) * 4), prompt(7) * 4
    speculating = engine(dense, num_speculative_tokens=3)
    (output,) = speculating.generate([repeated], greedy(16))
    ids = torch.tensor([repeated])
    expected = dense.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert output.outputs[0].token_ids == expected[0, len(repeated) :].tolist()
    assert speculating.statistics()["draft_tokens"] > 0
