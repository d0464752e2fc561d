"""Configuration of models with their own attention layers in vLLM, before weights load."""

import json

import pytest

V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "head_dim": 512,
    "compress_ratios": [0, 4, 128],
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}


@pytest.fixture
def v4(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(V4))
    return tmp_path


def configured(model, **options):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(model), skip_tokenizer_init=True, max_model_len=1024, **options).create_engine_config()


def test_deepseek_v4_is_refused_by_name(v4):
    with pytest.raises(ValueError, match="CUSTOM is FlashLatte: DeepSeek-V4 is supported on CUDA only"):
        configured(v4, attention_backend="CUSTOM")


def test_deepseek_v4_has_vllms_own_pages(v4):
    """Also on FlashLatte's CPU platform."""
    assert configured(v4).cache_config.block_size == 256
