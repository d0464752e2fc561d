"""The engine compared with transformers' ``generate``, in float32, token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.engine_models import (
    VOCABULARY,
    check,
    chosen_logprobs,
    engine,
    generated_by_transformers,
    greedy,
    model,
    prompt,
)
from support.marks import mostly_full

from flashlatte.engine import Engine, Model

FAMILIES = (
    "DeepseekV3",
    "DeepseekV2",
    "Glm4MoeLite",
    "Youtu",
    "AXK1",
    "DeepseekV32",
    "GlmMoeDsa",
    "AXK2",
    "HYV4",
    "Dots3Note",
    "Mistral4",
    "SarvamMLA",
    "KimiLinear",
    "BailingHybrid",
    "Glm5Next",
    "HYV4VL",
    "LongcatFlash",
    "MiniCPM3",
    "MistralLarge4",
)
# ``test_a_small_pool_preempts_requests`` generates from the same prompts of seven others.
QUICK = ("DeepseekV3", "Glm4MoeLite", "AXK2", "MiniCPM3")


@pytest.mark.parametrize("family", mostly_full(FAMILIES, *QUICK))
def test_mixed_lengths(family):
    check(engine(family), family)


@pytest.mark.parametrize(
    "max_num_batched_tokens", [5, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 64))]
)
def test_every_chunk_size(max_num_batched_tokens):
    check(engine(max_num_batched_tokens=max_num_batched_tokens))


@pytest.mark.parametrize(
    ("family", "swap_space"),
    [
        ("DeepseekV3", 0),
        pytest.param("DeepseekV3", 12, marks=pytest.mark.full),
        pytest.param("GlmMoeDsa", 0, marks=pytest.mark.full),
        ("GlmMoeDsa", 12),
        ("HYV4", 0),
        ("Dots3Note", 12),
        ("Glm5Next", 0),
        pytest.param("Glm5Next", 12, marks=pytest.mark.full),
        pytest.param("HYV4VL", 12, marks=pytest.mark.full),
        ("LongcatFlash", 0),
        pytest.param("MistralLarge4", 0, marks=pytest.mark.full),
        pytest.param("MistralLarge4", 12, marks=pytest.mark.full),
        pytest.param("AXK2", 0, marks=pytest.mark.full),
    ],
)
def test_a_small_pool_preempts_requests(family, swap_space):
    small = engine(family, num_pages=7, swap_space=swap_space, enable_prefix_caching=False)
    check(small, family)
    statistics = small.statistics()
    assert statistics["swapped" if swap_space else "recomputed"] > 0


@pytest.mark.parametrize(
    ("family", "num_speculative_tokens"),
    [
        ("DeepseekV3", 4),
        pytest.param("DeepseekV3", 1, marks=pytest.mark.full),
        ("DeepseekV32", 3),
        pytest.param("Dots3Note", 3, marks=pytest.mark.full),
        pytest.param("LongcatFlash", 3, marks=pytest.mark.full),
        pytest.param("MistralLarge4", 3, marks=pytest.mark.full),
    ],
)
def test_drafts_change_no_token(family, num_speculative_tokens):
    speculating = engine(family, num_speculative_tokens=num_speculative_tokens)
    repeated = prompt(4) * 6
    (output,) = speculating.generate([repeated], greedy(24))
    assert output.outputs[0].token_ids == generated_by_transformers(family, repeated, 24)
    statistics = speculating.statistics()
    assert statistics["generated_tokens"] == 24
    assert statistics["draft_tokens"] >= statistics["accepted_tokens"] > 0
    check(speculating, family)


@pytest.mark.parametrize(
    "family",
    ["DeepseekV3", "GlmMoeDsa", "HYV4", "AXK2", "Dots3Note", "Glm5Next", "LongcatFlash", "MistralLarge4"],
)
def test_a_prefix_is_computed_once(family):
    shared = prompt(40)
    served = engine(family)
    first, second = served.generate([[*shared, 1], [*shared, 2]], greedy(3))
    later = served.generate([[*shared, 3]], greedy(3))[0]
    assert later.num_cached_tokens == 40
    for output in (first, second, later):
        assert output.outputs[0].token_ids == generated_by_transformers(family, output.prompt_token_ids, 3)
    assert served.statistics()["cached_tokens"] >= 40


def test_arrivals_and_aborts_do_not_change_other_requests():
    served = engine(max_num_batched_tokens=16)
    expected = {served.add(prompt(20, seed), greedy(6)): prompt(20, seed) for seed in range(3)}
    gone = served.add(prompt(30, 9), greedy(6))
    done = {}
    for number in range(60):
        if number == 2:
            assert served.abort(gone).outputs[0].finish_reason == "abort"
            expected[served.add(prompt(11, 5), greedy(6))] = prompt(11, 5)
        done |= {
            output.request_id: output.outputs[0].token_ids
            for output in served.step()
            if output.outputs[0].finish_reason == "length"
        }
    assert done == {name: generated_by_transformers("DeepseekV3", tokens, 6) for name, tokens in expected.items()}
    assert served.pool.in_use == 0


@pytest.mark.parametrize("in_flight", [False, True], ids=["ended", "under way"])
@pytest.mark.parametrize("family", ["DeepseekV3", "DeepseekV4"])
def test_changed_weights_and_earlier_pages(family, in_flight):
    """A running request seals pages computed with the old weights also after the reset."""
    changed = copy.deepcopy(model(family))
    served = engine(changed)
    text, params = prompt(40), greedy(6, logprobs=0)
    served.add(text, params)
    while served.unfinished and not (in_flight and served.statistics()["generated_tokens"]):
        served.step()
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(1.25)
    served.reset_prefix_cache()
    while served.unfinished:
        served.step()
    (fresh,) = engine(changed).generate([text], params)
    (output,) = served.generate([text], params)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert torch.allclose(torch.tensor(chosen_logprobs(output)), torch.tensor(chosen_logprobs(fresh)), atol=1e-5)
    assert served.generate([text], params)[0].num_cached_tokens > 0


@pytest.mark.parametrize("options", [{}, {"num_pages": 12, "swap_space": 8, "enable_prefix_caching": False}])
def test_batch_invariance_changes_no_token(options):
    settings: dict[str, Any] = {"page_size": 8, "num_pages": 64, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    check(Engine(Model(model(), batch_invariant=True), **settings | options))


@pytest.mark.parametrize(
    ("earlier", "beside", "options"),
    [
        ([], [prompt(5, 1)], {}),
        ([], [prompt(20, 2), prompt(9, 3), prompt(31, 4)], {}),
        ([], [prompt(20, 2), prompt(9, 3), prompt(31, 4)], {"num_pages": 11, "enable_prefix_caching": False}),
        ([prompt(37)[:26], prompt(37)], [prompt(8, 4)], {}),
    ],
    ids=["one other", "three others", "computed again", "a prefix that is there"],
)
def test_batch_invariant_bits_do_not_depend_on_other_requests(earlier, beside, options):
    """With a model without experts: on a CPU an expert's product has one row per token routed to it."""
    sampling = greedy(12, logprobs=0)

    def generated(earlier: list[list[int]], beside: list[list[int]], **options: Any) -> Any:
        settings: dict[str, Any] = {"page_size": 8, "num_pages": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4}
        served = Engine(Model(model("Youtu"), batch_invariant=True), **settings | options)
        for one in earlier:
            served.generate([one], sampling)
        output = served.generate([*beside, prompt(37)], sampling)[-1]
        assert (served.statistics()["recomputed"] > 0) == ("num_pages" in options)
        assert output.num_cached_tokens == (32 if earlier else 0)
        return output.outputs[0].token_ids, chosen_logprobs(output)

    assert generated(earlier, beside, **options) == generated([], [])


def test_batch_invariance_is_true_or_false():
    with pytest.raises(TypeError, match=r"^batch_invariant must be True or False, got 'no'$"):
        Model(model(), batch_invariant="no")  # pyright: ignore[reportArgumentType]


def test_batch_invariance_takes_no_drafts():
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be 0 for a batch_invariant model, got 2"):
        Engine(Model(model(), batch_invariant=True), num_speculative_tokens=2)


def test_stop_tokens_end_a_request():
    expected = generated_by_transformers("DeepseekV3", prompt(5), 8)
    (output,) = engine().generate([prompt(5)], greedy(8, stop_token_ids=(expected[3],)))
    assert output.outputs[0].token_ids == expected[: expected.index(expected[3]) + 1]
    assert output.outputs[0].finish_reason == "stop"


class Decoder:
    """A tokenizer with one letter per token that does not encode text."""

    def decode(self, tokens: list[int], **_: bool) -> str:
        return "".join(chr(token + 30) for token in tokens)


class Letters(Decoder):
    """A tokenizer with one letter per token."""

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) - 30 for letter in text]


def test_string_prompts_and_stop_strings():
    served = engine(tokenizer=Letters())
    expected = generated_by_transformers("DeepseekV3", Letters().encode("Hello"), 8)
    stop = Letters().decode(expected[2:4])
    (output,) = served.generate(["Hello"], greedy(8, stop=(stop,)))
    assert output.outputs[0].token_ids == expected[:4]
    assert output.outputs[0].text == Letters().decode(expected[:2])
    assert served.generate(["Hello"], greedy(8, stop=stop))[0].outputs[0].token_ids == output.outputs[0].token_ids
    (output,) = served.generate(["Hello"], greedy(8, stop_token_ids=(expected[5],)))
    assert output.outputs[0].text == Letters().decode(expected[: expected.index(expected[5])])
    (output,) = served.generate(["Hello"], greedy(8))
    assert output.outputs[0].text == Letters().decode(expected)


def test_stream_yields_tokens_when_they_are_generated():
    assert list(engine().stream(prompt(6), greedy(5))) == generated_by_transformers("DeepseekV3", prompt(6), 5)


def test_a_repetition_penalty_is_transformers():
    params = greedy(12, repetition_penalty=1.7)
    expected = generated_by_transformers("DeepseekV3", prompt(9), 12, repetition_penalty=1.7)
    for num_speculative_tokens in (0, 3):
        assert (
            engine(num_speculative_tokens=num_speculative_tokens).generate([prompt(9)], params)[0].outputs[0].token_ids
            == expected
        )


def test_a_seed_gives_the_same_tokens_in_any_batch_and_with_drafts():
    params = greedy(10, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7)
    alone = engine().generate([prompt(9)], params)[0].outputs[0].token_ids
    together = (
        engine().generate([prompt(9), *(prompt(7, seed) for seed in range(1, 4))], params)[0].outputs[0].token_ids
    )
    speculated = (
        engine(num_speculative_tokens=3, max_num_batched_tokens=7).generate([prompt(9)], params)[0].outputs[0].token_ids
    )
    assert alone == together == speculated
    assert alone != engine().generate([prompt(9)], greedy(10))[0].outputs[0].token_ids


@pytest.mark.parametrize("family", ["DeepseekV3", "MistralLarge4"], ids=["plain", "softcapping"])
def test_logprobs_are_the_models(family):
    (output,) = engine(family).generate([prompt(5)], greedy(4, logprobs=0))
    with torch.no_grad():
        tokens = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
        logits = model(family).forward(tokens).logits[0, 4:-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(output.outputs[0].token_ids)[:, None]).squeeze(-1)
    assert torch.allclose(torch.tensor(chosen_logprobs(output)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt of request 'a' must have at least one token"),
        ({"prompt": [VOCABULARY]}, "prompt must hold tokens from 0 to 96, got 97"),
        ({"prompt": [1] * 600}, "must not pass the model's 512 positions"),
        ({"prompt": [1] * 100, "sampling_params": greedy(400)}, "it holds 128"),
        ({"prompt": [1], "sampling_params": greedy(stop=("x",))}, "stop needs an engine with a tokenizer"),
        ({"prompt": [1.5]}, "prompt must hold ints, got 1.5"),
        ({"prompt": [[1, 2]]}, r"prompt must hold ints, got \[1, 2\]"),
        ({"prompt": 5}, "prompt must be a sequence of ints, got 5"),
        ({"prompt": {2, 1}}, "prompt must hold its tokens in order, got {1, 2}"),
        ({"prompt": {7: 1}}, "prompt must hold its tokens in order, got {7: 1}"),
        (
            {"prompt": [1], "sampling_params": {"temperature": 1.0}},
            "sampling_params must be SamplingParams or None, got dict",
        ),
        ({"prompt": [1], "request_id": 5}, "request_id must be a string, got 5"),
        ({"prompt": [1], "cache_salt": None}, "cache_salt must be a string, got None"),
        ({"prompt": [1], "priority": 0.5}, "priority must be an int, got float"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    served = engine(num_pages=16)
    with pytest.raises((TypeError, ValueError), match=message):
        served.add(**{"request_id": "a"} | arguments)
    assert served.unfinished == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_format": "v32"}, r"^cache_format must be bf16, fp16, fp32 or fp8 for rows of 32 \+ 8, got 'v32'$"),
        ({"cache_format": "index_fp8"}, r"fp32 or fp8 for rows of 32 \+ 8, got 'index_fp8'$"),
        ({"cache_format": ""}, "^cache_format must be bf16, fp16, .*, got ''$"),
        ({"starvation_limit": 1.5}, "starvation_limit must be an int, got float"),
        ({"tokenizer": "checkpoint"}, "^tokenizer must have decode, .* got 'checkpoint'$"),
        ({"tokenizer": 5}, "^tokenizer must have decode, .* got int$"),
        ({"enable_prefix_caching": 2}, "enable_prefix_caching must be True or False, got 2"),
        ({"cuda_graphs": "no"}, "cuda_graphs must be True or False, got 'no'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        engine(**options)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, "greedy"])
def test_sampling_that_is_neither_parameters_nor_a_list_of_them(sampling):
    with pytest.raises(
        TypeError,
        match=f"^sampling_params must be SamplingParams, a list of them or None, got {type(sampling).__name__}$",
    ):
        engine().generate([[1], [2]], sampling)


def test_a_string_is_not_a_list_of_prompts():
    with pytest.raises(TypeError, match="prompts must be a sequence of prompts, got 'Hello'"):
        engine(tokenizer=Letters()).generate("Hello")


def test_a_tokenizer_without_encode_supports_stop_strings_only():
    expected = generated_by_transformers("DeepseekV3", prompt(5), 3)
    served, last = engine(tokenizer=Decoder()), Decoder().decode(expected[-1:])
    (output,) = served.generate([prompt(5)], greedy(6, stop=(last,)))
    assert output.outputs[0].text == Decoder().decode(expected).partition(last)[0]
    with pytest.raises(
        TypeError, match="prompt must be tokens for an engine without a tokenizer that encodes, got a str"
    ):
        served.add("Hello")


def test_a_prompt_may_be_a_tensor():
    (output,) = engine().generate([torch.tensor(prompt(5))], greedy(2))
    assert output.outputs[0].token_ids == generated_by_transformers("DeepseekV3", prompt(5), 2)
    with pytest.raises(ValueError, match="text needs an engine with a tokenizer"):
        _ = output.outputs[0].text


def test_a_duplicate_id_is_rejected_and_its_request_continues():
    served = engine()
    served.add(prompt(3), greedy(2), request_id="a")
    with pytest.raises(ValueError, match="got 'a' again"):
        served.add([1], request_id="a")
    while served.unfinished:
        served.step()
    with pytest.raises(ValueError, match="unfinished request, got 'a'"):
        served.abort("a")
    with pytest.raises(TypeError, match="request_id must be of type str, got list"):
        served.abort(["a"])  # type: ignore[arg-type]
