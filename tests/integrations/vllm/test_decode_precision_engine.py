"""``FLASHLATTE_DECODE_PRECISION`` in vLLM's engine on a CPU, where the reference rounds as Hopper's kernel does."""

import pytest
import torch
from support.vllm_engine import engine, largest_difference, prompts

from flashlatte.integrations.decode_precision import VARIABLE


@pytest.fixture
def forget_backends():
    """Clear vLLM's cache of selected backends, since tests select with different environments."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
    yield
    _cached_get_attn_backend.cache_clear()


@pytest.fixture
def registered(monkeypatch, forget_backends):
    """The variable is set, and the plugin registered with it: vLLM registers plugins once in a process."""
    from vllm.model_executor.models import config

    from flashlatte.integrations import vllm

    monkeypatch.setattr(config, "MODELS_CONFIG_MAP", dict(config.MODELS_CONFIG_MAP))
    monkeypatch.setenv(VARIABLE, "fp8")
    vllm.register()


def test_decode_rounds_and_prefill_does_not(checkpoint, monkeypatch, request):
    from flashlatte.integrations.vllm.backends import dense

    # Dense layers only: a near tie between experts is not an error. Prompts of up to 128 tokens may run as decode.
    model, given = checkpoint("v3", first_k_dense_replace=3), prompts((130, 200, 150))
    options = {"kv_cache_dtype": "fp8", "attention_backend": "CUSTOM"}
    with engine(model, **options) as vllm:
        exact = vllm.generate(given, 4)
    request.getfixturevalue("registered")
    told, run = [], dense.dense_decode
    monkeypatch.setattr(dense, "dense_decode", lambda *a, **k: [told.append(k), run(*a, **k)][1])
    with engine(model, **options) as vllm:
        rounded = vllm.generate(given, 4)
    assert {(one["precision"], one["backend"]) for one in told} == {("fp8", None)}
    # The first token is a prefill's.
    assert [one.logprobs[0] for one in rounded] == [one.logprobs[0] for one in exact]
    assert 1e-4 < largest_difference(exact, rounded) < 0.25


@pytest.mark.parametrize(
    ("family", "options", "needs"),
    [
        ("v3", {"kv_cache_dtype": "fp8"}, "--attention-backend CUSTOM"),
        ("v3", {"kv_cache_dtype": "fp8", "attention_backend": "CPU_MLA"}, "--attention-backend CUSTOM"),
        ("v3", {"attention_backend": "CUSTOM"}, "an fp8 cache in e4m3"),
        ("v32", {"kv_cache_dtype": "fp8", "attention_backend": "CUSTOM"}, "a model whose layers all attend to all"),
    ],
)
def test_an_engine_that_would_ignore_it_does_not_start(checkpoint, registered, family, options, needs):
    with pytest.raises(Exception, match=f"{VARIABLE}=fp8 needs {needs}"), engine(checkpoint(family), **options):
        pass


def test_layers_with_sinks(registered, monkeypatch):
    from flashlatte.integrations.vllm.backends import dense

    def initialize(self, *_, **__):
        self.dcp_world_size, self.kv_lora_rank, self.qk_nope_head_dim = 1, 512, 128
        self.qk_rope_head_dim, self.v_head_dim = 64, 128

    monkeypatch.setattr(dense.MLACommonImpl, "__init__", initialize)
    arguments = (16, 576, 0.1, 1, None, None, "fp8", None, "decoder", None)
    assert dense.FlashLatteMLAImpl(*arguments).precision == "fp8"
    with pytest.raises(NotImplementedError, match=f"{VARIABLE}=fp8 needs layers without attention sinks"):
        dense.FlashLatteMLAImpl(*arguments, sinks=torch.zeros(16))
