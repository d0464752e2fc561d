"""Training steps of layers and of enabled transformers models on a GPU, in bf16, compared with float32 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.harness import DEVICE
from support.training_calls import relative_errors

from flashlatte.layers import IndexerConfig, MLAConfig, V4Config, V4IndexerConfig

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 16, "q_lora_rank": 256}
INDEXER = IndexerConfig(num_heads=16, topk=128)
LENGTHS = (300, 1, 150)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("config", "dense"),
    [
        pytest.param(MLAConfig(**SIZES), True, id="v3"),
        pytest.param(MLAConfig(**SIZES, indexer=INDEXER), False, id="v32"),
        pytest.param(MLAConfig(**SIZES, indexer=INDEXER), True, id="v32, warm-up"),
        pytest.param(MLAConfig(**SIZES, indexer=INDEXER, output_gate="channel", attn_sink=True), False, id="hy4"),
        pytest.param(MLAConfig(**SIZES, window=100, output_gate="head"), True, id="dots3, window"),
        pytest.param(V4Config(**SIZES, indexer=V4IndexerConfig(16, topk=32)), False, id="v4"),
        pytest.param(V4Config(**SIZES, indexer=V4IndexerConfig(16, topk=32)), True, id="v4, warm-up"),
    ],
)
def test_gradients_are_close_to_float32(config: MLAConfig | V4Config, dense: bool, autocast: bool) -> None:
    errors = relative_errors(config, LENGTHS, dense=dense, device=DEVICE, autocast=autocast)
    # An indexer's are of prediction - target, close numbers of which bf16 leaves less.
    for name, error in errors.items():
        assert error < (0.1 if "indexer." in name else 0.02), errors


def make(family: str, **options: Any) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    from flashlatte.integrations.transformers import enable

    sizes = {
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes | options)
    return enable(getattr(transformers, f"{family}ForCausalLM")(config)).to(DEVICE).train()


def train(model: Any, steps: int, name: str) -> list[float]:
    """The output ``name`` of each of several optimizer steps that minimize it for one batch."""
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=2e-3)
    tokens = torch.randint(64, (2, 200), device=DEVICE)
    found = []
    for _ in range(steps):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            outputs = model(tokens, labels=tokens)
        outputs[name].backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(outputs[name].item())
    return found


@pytest.mark.parametrize("indexer", [{}, {"index_n_heads": 16, "index_topk": 64}], ids=["v3", "v32"])
def test_a_model_learns_a_sequence_by_heart(indexer: dict[str, int]) -> None:
    losses = train(make("DeepseekV32" if indexer else "DeepseekV3", **indexer), 30, "loss")
    assert losses[-1] < 0.7 * losses[0], losses


def test_indexers_learn_to_select_the_attended_tokens() -> None:
    model = make("DeepseekV32", index_n_heads=16, index_topk=64, initializer_range=0.1)
    for name, weight in model.named_parameters():
        weight.requires_grad_(".indexer." in name)
    losses = train(model, 30, "indexer_loss")
    assert losses[-1] < 0.7 * losses[0], losses
