import copy
import functools

import pytest
import torch

from flashlatte.layers import absorbed as absorbed_module

VOCABULARY = 64


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def _built(options):
    transformers = pytest.importorskip("transformers")
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**config | dict(options))).eval()


@pytest.fixture
def make_model():
    """Create a small random float32 DeepseekV3ForCausalLM, which is the same for the same options."""

    def make(**options):
        return copy.deepcopy(_built(tuple(sorted((k, _frozen(v)) for k, v in options.items()))))

    return make


def _frozen(value):
    return _Options(value) if isinstance(value, dict) else value


class _Options(dict):
    def __hash__(self):  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


@pytest.fixture
def prompts():
    """Create token ids [requests, length] and their mask, with padding on the given side."""

    def make(pads, length=70, side="left"):
        generator = torch.Generator().manual_seed(len(pads))
        ids = torch.randint(1, VOCABULARY, (len(pads), length), generator=generator)
        column = torch.arange(length)
        edge = torch.tensor(pads)[:, None]
        mask = (column >= edge if side == "left" else column < length - edge).long()
        return {"input_ids": ids * mask, "attention_mask": mask}

    return make


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the decode operations."""
    counts = {"dense_decode": 0, "sparse_decode": 0}
    for name in counts:
        operation = getattr(absorbed_module, name)

        def counting(*args, _name=name, _operation=operation, **kwargs):
            counts[_name] += 1
            return _operation(*args, **kwargs)

        monkeypatch.setattr(absorbed_module, name, counting)
    return counts
