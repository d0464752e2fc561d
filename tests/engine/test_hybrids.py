"""Models with layers of linear attention: states stay with their request under any scheduling."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from distributed.model.test_checkpoint import ranks
from support import engine_models
from support.engine_models import chosen_logprobs, greedy, model, prompt
from support.marks import mostly_full

from flashlatte.engine import Engine, Model
from flashlatte.engine.linear_attention import token_groups
from flashlatte.integrations.transformers import enable

# Other sizes than those of ``OPTIONS``: one layer of MLA first or last, and convolutions of other widths.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi-linear": ("KimiLinear", {}),
    "kimi-linear-three-layers": (
        "KimiLinear",
        {
            "num_hidden_layers": 3,
            "layer_types": ("full_attention", "linear_attention", "linear_attention"),
            "mlp_layer_types": ("sparse", "dense", "dense"),
            "q_lora_rank": 24,
            "linear_head_dim": 8,
            "linear_num_heads": 5,
            "linear_conv_kernel_dim": 2,
            "qk_rope_head_dim": 4,
        },
    ),
    "ling3": ("BailingHybrid", {}),
    "ling3-two-layers": (
        "BailingHybrid",
        {
            "num_hidden_layers": 2,
            "layer_types": ("linear_attention", "full_attention"),
            "mlp_layer_types": ("dense", "sparse"),
            "q_lora_rank": None,
            "head_dim": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "kv_lora_rank": 16,
            "short_conv_kernel_size": 3,
            "kda_safe_gate": False,
        },
    ),
}
LENGTHS = (3, 17, 40, 1, 26, 16)
QUICK = ("kimi-linear", "ling3")


def served_model(name: str) -> Any:
    family, changes = SIZES[name]
    return model(family, **changes)


def engine(name: str | torch.nn.Module = "kimi-linear", **options: Any) -> Engine:
    return engine_models.engine(served_model(name) if isinstance(name, str) else name, **options)


def stock_tokens(name: str, tokens: list[int], count: int) -> list[int]:
    return _stock_tokens(name, tuple(tokens), count)


@functools.cache
def _stock_tokens(name: str, tokens: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([tokens])
    mask = torch.ones_like(ids)
    found = served_model(name).generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return found[0, len(tokens) :].tolist()


def check(engine: Engine, name: str, prompts: list[list[int]], new: int = 9) -> list[Any]:
    outputs = engine.generate(prompts, greedy(new))
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == stock_tokens(name, tokens, new)
    check_free(engine)
    return outputs


def check_free(engine: Engine) -> None:
    assert engine.pool.in_use == engine.scheduler.states.in_use == 0  # type: ignore[attr-defined]


PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("max_num_batched_tokens", mostly_full((32, 5, 150), 5))
@pytest.mark.parametrize("name", mostly_full(SIZES, *QUICK))
def test_mixed_lengths_and_chunks(name, max_num_batched_tokens):
    check(engine(name, max_num_batched_tokens=max_num_batched_tokens), name, PROMPTS)


@pytest.mark.parametrize(
    "options",
    [pytest.param({"swap_space": 0}, marks=pytest.mark.full), {"swap_space": 12}, {"enable_prefix_caching": True}],
    ids=str,
)
@pytest.mark.parametrize("name", mostly_full(SIZES, *QUICK))
def test_preempted_requests_get_their_states_back(name, options):
    small = engine(name, **{"num_pages": 7, "enable_prefix_caching": False} | options)
    check(small, name, PROMPTS)
    statistics = small.statistics()
    assert statistics["swapped" if options.get("swap_space") else "recomputed"] > 0


@pytest.mark.parametrize("name", mostly_full(SIZES, *QUICK))
def test_a_prefix_continues_from_a_snapshot(name):
    """There is a snapshot after 40 tokens of the first prompt; using it does not remove it."""
    served, shared = engine(name), prompt(43)
    check(served, name, [shared], 3)
    longer = [[*shared[:42], token, *prompt(9, token)] for token in (1, 2, 3)]
    assert [output.num_cached_tokens for output in check(served, name, longer, 3)] == [40, 40, 40]
    # There is a snapshot where the first two diverge, from when they were computed.
    parting = [[*shared[:20], token, 5, 6] for token in (1, 2, 3)]
    assert [check(served, name, [one], 3)[0].num_cached_tokens for one in parting] == [0, 16, 16]


@pytest.mark.full
@pytest.mark.parametrize("name", QUICK)
def test_a_conversation_continues_from_its_last_answer(name):
    served, said = engine(name), prompt(21)
    for turn, cached in enumerate((0, 32, 48)):
        (output,) = check(served, name, [said], 14)
        assert output.num_cached_tokens == cached
        said = [*said, *output.outputs[0].token_ids, *prompt(5, turn)]


@pytest.mark.full
def test_few_snapshots_are_evicted_and_change_no_token():
    served = engine(max_num_seqs=1)
    for seed in (0, 1, 0, 2, 0):
        check(served, "kimi-linear", [prompt(20, seed)], 12)


def test_without_a_prefix_cache_no_snapshot_is_taken():
    served = engine(enable_prefix_caching=False)
    assert served.runner.states[0].shape[0] == 1 + 4
    assert check(served, "kimi-linear", [prompt(43)] * 2)[1].num_cached_tokens == 0


@pytest.mark.parametrize("family", ["KimiLinear", "BailingHybrid", "Glm5Next"])
def test_a_model_in_bf16(family):
    """Log-probabilities are as close to float32 as those of transformers in bf16."""
    stock = copy.deepcopy(model(family)).bfloat16()
    exact = copy.deepcopy(stock).float()
    served = engine(stock, max_num_batched_tokens=16)
    (output,) = served.generate([prompt(26)], greedy(6, logprobs=0))
    tokens = output.outputs[0].token_ids

    def logprobs(of: Any) -> torch.Tensor:
        with torch.no_grad():
            logits = of(torch.tensor([[*prompt(26), *tokens]])).logits[0, 25:-1].float()
        return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)

    expected = logprobs(exact)
    error, error_of_stock = (
        (found - expected).abs().max() for found in (torch.tensor(chosen_logprobs(output)), logprobs(stock))
    )
    assert error <= 2 * error_of_stock
    states = [state.dtype for state in served.runner.states]
    assert set(states) == {torch.bfloat16, torch.float32}


def test_forks_and_aborts_free_their_slots():
    served = engine(max_num_batched_tokens=16)
    forked = served.add(prompt(20), greedy(6, n=3, temperature=1.0, top_k=1))
    gone = served.add(prompt(30, 9), greedy(6))
    done = {}
    for number in range(60):
        if number == 2:
            served.abort(gone)
        done |= {output.request_id: output for output in served.step() if output.finished}
    assert [one.token_ids for one in done[forked].outputs] == [stock_tokens("kimi-linear", prompt(20), 6)] * 3
    check_free(served)


def test_a_request_with_nan_logits_leaves_no_snapshot():
    poisoned = copy.deepcopy(served_model("kimi-linear"))
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[96] = float("nan")
    served = engine(poisoned)
    bad = [*(token for token in prompt(20) if token != 96), 96, *prompt(20, 2)]
    good, wrong = served.generate([bad[:19], bad], greedy(4))
    assert wrong.outputs[0].finish_reason == "error"
    assert good.outputs[0].token_ids == stock_tokens("kimi-linear", bad[:19], 4)
    (again,) = served.generate([[*bad[:19], 3, 4]], greedy(4))
    assert again.outputs[0].token_ids == stock_tokens("kimi-linear", [*bad[:19], 3, 4], 4)
    slots = [*served.scheduler.states._snapshots.values()]  # type: ignore[attr-defined]
    assert slots
    assert not any(state[slots].isnan().any() for state in served.runner.states)
    check_free(served)


def test_changed_weights_invalidate_snapshots():
    changed = copy.deepcopy(served_model("kimi-linear"))
    served, params = engine(changed), greedy(6, logprobs=0)
    served.generate([prompt(40)], params)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.25)
    served.reset_prefix_cache()
    (output,) = served.generate([prompt(40)], params)
    (fresh,) = engine(changed).generate([prompt(40)], params)
    assert output.num_cached_tokens == 0
    assert chosen_logprobs(output) == pytest.approx(chosen_logprobs(fresh), abs=1e-5)


@pytest.mark.parametrize("name", QUICK)
def test_an_enabled_model_is_supported(name):
    (output,) = engine(enable(copy.deepcopy(served_model(name)))).generate([prompt(5)], greedy(3))
    assert output.outputs[0].token_ids == stock_tokens(name, prompt(5), 3)


def test_hooks_on_linear_attention_run_and_others_are_refused():
    hooked, calls = copy.deepcopy(served_model("kimi-linear")), []
    hooked.model.layers[0].self_attn.register_forward_hook(lambda *called: calls.append(called[2].shape))
    engine(hooked).generate([prompt(5)], greedy(2))
    assert torch.Size((1, 5, 64)) in calls
    hooked.model.layers[1].self_attn.register_forward_hook(lambda *called: called[2])
    with pytest.raises(TypeError, match="layer 1 of the model must have no hooks"):
        engine(hooked)


def test_options_unsupported_with_states_are_rejected_by_name():
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be 0 for a kimi_linear, .* got 2"):
        engine(num_speculative_tokens=2)
    with pytest.raises(ValueError, match="batch_invariant must be False for a kimi_linear"):
        Model(served_model("kimi-linear"), batch_invariant=True)
    only = {"num_hidden_layers": 1, "layer_types": ("linear_attention",), "mlp_layer_types": ("dense",)}
    with pytest.raises(ValueError, match="layer_types of a kimi_linear must have a layer of MLA"):
        engine(model("KimiLinear", **only))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("KimiLinear", "kimi_linear, whose layers of linear attention are not divided"),
        ("Glm5Next", "glm5_next_text, whose layers of linear attention are not divided"),
        ("HYV4VL", "hy_v4_vl_text, which is a part of another model"),
        ("LongcatFlash", "longcat_flash, whose decoder layers have two attentions"),
        ("MistralLarge4", "mistral_large4_text, whose layers share latents"),
    ],
)
def test_several_ranks_are_refused_by_name(family, reason):
    with pytest.raises(ValueError, match=f"^tensor_parallel must be 1 for a {reason}, got 2$"):
        Model(model(family), ranks=ranks(0, 2))


def test_requests_with_as_many_tokens_are_one_group():
    """One call of a layer for all generating requests, and one for each part of a chunk with a snapshot."""
    served, groups = engine(max_num_batched_tokens=64), []
    plan = served.runner._plan

    def recorded(batch: Any, pad_to: int | None) -> Any:
        groups.append([tuple(group.rows.shape) for group in token_groups(batch, torch.device("cpu"))])
        return plan(batch, pad_to)

    served.runner._plan = recorded
    served.generate([prompt(20), prompt(20, 1), prompt(7, 2)], greedy(2))
    assert groups == [[(1, 7), (2, 16), (2, 4)], [(3, 1)]]
