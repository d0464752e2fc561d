"""Each sampling parameter compared with a plain Python loop over transformers' logits, for several schedules."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from support.engine_models import VOCABULARY, chosen_logprobs, generated_by_transformers, greedy, model, prompt

from flashlatte.engine import Engine, SamplingParams

NEW = 12
PROMPTS = [prompt(4) * 5, prompt(21, 1), [*prompt(17, 2), 7, 8, 9, 7, 8]]
# The schedule of steps must not change tokens.
PLANS: list[dict[str, Any]] = [
    {},
    {"num_speculative_tokens": 3},
    {"num_pages": 6, "max_num_batched_tokens": 7},
    {"num_pages": 6, "swap_space": 12, "num_speculative_tokens": 2},
]


class Letters:
    """A tokenizer with one letter per token that ignores spaces."""

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) - 30 for letter in text.replace(" ", "")]

    def decode(self, tokens: list[int], **_: bool) -> str:
        return "".join(chr(token + 30) for token in tokens)


def engine(**options: Any) -> Engine:
    settings: dict[str, Any] = {"page_size": 8, "num_pages": 64, "max_num_batched_tokens": 32, "max_num_seqs": 3}
    return Engine(model(), tokenizer=Letters(), **settings | options)


@functools.cache
def logprobs_after(tokens: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        return model()(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1).tolist()


@functools.cache
def logits_after(tokens: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        return model()(torch.tensor([tokens]), use_cache=False).logits[0, -1].tolist()


def processed(tokens: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """The processed logits after a prompt and an output."""
    logits = list(logits_after((*tokens, *output)))
    allowed = range(VOCABULARY) if params.allowed_token_ids is None else params.allowed_token_ids
    excluded = set(range(VOCABULARY)) - set(allowed) | set(params.suppress_tokens or ())
    if len(output) < params.min_tokens:
        excluded |= set(params.stop_token_ids or ())
    for word in params.bad_words or ():
        *prefix, last = Letters().encode(word)
        if output[len(output) - len(prefix) :] == prefix:
            excluded.add(last)
    for token in range(VOCABULARY):
        logit = -math.inf if token in excluded else logits[token] + (params.logit_bias or {}).get(token, 0.0)
        if token in tokens or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logits[token] = logit - params.presence_penalty * (token in output)
    return logits


def expected(tokens: list[int], params: SamplingParams) -> list[int]:
    output: list[int] = []
    while len(output) < params.max_tokens:
        logits = processed(tokens, output, params)
        output.append(logits.index(max(logits)))
        if output[-1] in (params.stop_token_ids or ()):
            break
    return output


@functools.cache
def plain(number: int) -> list[int]:
    return expected(PROMPTS[number], greedy(NEW))


def parameters(number: int) -> list[SamplingParams]:
    """Parameters that change the output of ``plain``."""
    tokens, word = plain(number), Letters().decode
    options: list[dict[str, Any]] = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": -1.0, "presence_penalty": 2.0, "repetition_penalty": 1.3},
        {"logit_bias": {tokens[0]: -4.5, 5: 2.5, 17: 1.0}},
        {"allowed_token_ids": range(10, 40)},
        {"allowed_token_ids": range(30), "suppress_tokens": tokens[:1], "logit_bias": {3: 1.5}},
        {"bad_words": [word(tokens[1:2]), word(tokens[3:5]), word(tokens[5:8])]},
        {"bad_words": [word(tokens[:3])], "presence_penalty": 0.5},
        {"stop_token_ids": tokens[1:3], "min_tokens": 6},
    ]
    return [greedy(NEW, **one) for one in options]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("case", range(len(parameters(0))))
def test_tokens_are_those_of_a_plain_loop(case, plan):
    """With one case for all requests, and with different cases in the same steps."""
    count = len(parameters(0))
    served = engine(**plan)
    params = [parameters(number)[(case + 4 * number * (case % 2)) % count] for number in range(3)]
    for number, output in enumerate(served.generate(PROMPTS, params)):
        assert output.outputs[0].token_ids == expected(PROMPTS[number], params[number])
    assert served.pool.in_use == 0


def test_each_case_changes_the_tokens():
    for case, params in enumerate(parameters(0)):
        assert any(expected(PROMPTS[number], parameters(number)[case]) != plain(number) for number in range(3)), params


def test_biases_and_min_tokens_are_transformers():
    tokens = plain(1)
    expected = generated_by_transformers("DeepseekV3", PROMPTS[1], NEW, sequence_bias={(tokens[0],): -4.5, (5,): 2.5})
    (output,) = engine().generate(PROMPTS[1:2], greedy(NEW, logit_bias={tokens[0]: -4.5, 5: 2.5}))
    assert output.outputs[0].token_ids == expected
    ends = {"eos_token_id": tokens[2], "min_new_tokens": 6, "pad_token_id": 0}
    expected = generated_by_transformers("DeepseekV3", PROMPTS[1], NEW, **ends)
    (output,) = engine().generate(PROMPTS[1:2], greedy(NEW, stop_token_ids=[tokens[2]], min_tokens=6))
    assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_draws_with_penalties_do_not_depend_on_the_steps(plan):
    params = SamplingParams(
        max_tokens=NEW, temperature=0.9, seed=5, frequency_penalty=0.7, bad_words=["Q", "RS"], logit_bias={9: 2.0}
    )
    alone = [engine().generate([tokens], params)[0].outputs[0].token_ids for tokens in PROMPTS]
    together = engine(**plan).generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in together] == alone


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("count", [0, 3, -1])
def test_logprobs_are_the_models_before_all_parameters(count, plan):
    params = greedy(NEW, logprobs=count, repetition_penalty=1.4, suppress_tokens=plain(0)[:2])
    for tokens, output in zip(PROMPTS, engine(**plan).generate(PROMPTS, params), strict=True):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        for offset, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            check_logprobs(found, token, logprobs_after((*tokens, *completion.token_ids[:offset])), count)
        assert completion.cumulative_logprob == pytest.approx(sum(chosen_logprobs(output)))


def check_logprobs(found: dict[int, Any], token: int, expected: list[float], count: int) -> None:
    order = sorted(range(VOCABULARY), key=lambda one: -expected[one])
    top = order if count < 0 else order[:count]
    assert set(found) == {token, *top}
    for one, entry in found.items():
        assert entry.logprob == pytest.approx(expected[one], abs=1e-4)
        # The order of nearly equal ones may differ.
        assert expected[order[entry.rank - 1]] == pytest.approx(expected[one], abs=1e-4)
        assert entry.decoded_token == Letters().decode([one])


@pytest.mark.parametrize("plan", [*PLANS, {"max_num_batched_tokens": 1}], ids=str)
def test_prompt_logprobs_are_the_models(plan):
    """For a prompt with pages in the prefix cache, and concurrent requests without prompt_logprobs."""
    served = engine(**plan)
    served.generate([PROMPTS[1]], greedy(1))
    outputs = served.generate(
        [PROMPTS[1], PROMPTS[0], PROMPTS[2]],
        [greedy(NEW, prompt_logprobs=2), greedy(NEW), greedy(3, prompt_logprobs=0)],
    )
    assert [output.outputs[0].token_ids for output in outputs] == [plain(1), plain(0), plain(2)[:3]]
    assert outputs[1].prompt_logprobs is None
    for output, count in ((outputs[0], 2), (outputs[2], 0)):
        tokens, found = output.prompt_token_ids, output.prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert len(found) == len(tokens)
        for position in range(1, len(tokens)):
            check_logprobs(found[position] or {}, tokens[position], logprobs_after(tuple(tokens[:position])), count)
        # Other outputs have no logits of the prompt.
        assert output.outputs[0].logprobs is None


def test_prompt_logprobs_of_one_token_are_none():
    (output,) = engine().generate([[5]], greedy(1, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_n_outputs_are_those_of_n_requests(plan):
    served = engine(**plan)
    params = SamplingParams(n=3, max_tokens=NEW, temperature=0.9, seed=4, logprobs=0, prompt_logprobs=1)
    outputs = served.generate(PROMPTS[:2], params)
    for tokens, output in zip(PROMPTS, outputs, strict=False):
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert output.finished
        assert len(output.prompt_logprobs or []) == len(tokens)
        for index, one in enumerate(output.outputs):
            alone = SamplingParams(max_tokens=NEW, temperature=0.9, seed=4 + index)
            assert one.token_ids == engine().generate([tokens], alone)[0].outputs[0].token_ids
    assert len({tuple(one.token_ids) for one in outputs[0].outputs}) == 3
    assert served.unfinished == served.pool.in_use == 0


def test_outputs_without_a_seed_draw_like_separate_requests():
    several = engine().generate([PROMPTS[0]], SamplingParams(n=2, max_tokens=NEW))[0].outputs
    single = engine().generate([PROMPTS[0]] * 2, SamplingParams(max_tokens=NEW))
    assert [one.token_ids for one in several] == [output.outputs[0].token_ids for output in single]


def test_step_returns_and_abort_ends_all_outputs_of_a_request():
    served = engine()
    params = SamplingParams(n=2, max_tokens=6, seed=1)
    names = [served.add(PROMPTS[0], params), served.add(PROMPTS[1], params, request_id="aborted")]
    with pytest.raises(ValueError, match="must be unique among unfinished requests, got 'aborted' again"):
        served.add([1], request_id="aborted")
    assert served.unfinished == 2
    new: list[list[int]] = [[], []]
    steps = 0
    while served.unfinished:
        for output in served.step():
            assert output.request_id == names[0] or steps < 4
            if output.request_id == names[0]:
                new = [tokens + one.new_token_ids for tokens, one in zip(new, output.outputs, strict=True)]
                assert new == [one.token_ids for one in output.outputs]
        steps += 1
        if steps == 4:
            gone = served.abort("aborted")
            assert [one.finish_reason for one in gone.outputs] == ["abort", "abort"]
    assert [len(tokens) for tokens in new] == [6, 6]
    assert served.pool.in_use == 0
    with pytest.raises(ValueError, match="n must be 1 for stream, got 2"):
        served.stream(PROMPTS[0], params)


def test_stop_reasons_and_stop_texts(monkeypatch):
    tokens, word = plain(1), Letters().decode
    monkeypatch.setattr(model().generation_config, "eos_token_id", tokens[4])

    def ended(**options: Any) -> tuple[str | None, int | str | None, str]:
        (output,) = engine().generate(PROMPTS[1:2], greedy(NEW, **options))
        (one,) = output.outputs
        return one.finish_reason, one.stop_reason, one.text

    stop = word(tokens[1:3])
    before = tokens.index(tokens[4])
    assert ended() == ("stop", None, word(tokens[:before]))
    assert ended(stop_token_ids=[tokens[4]])[:2] == ("stop", tokens[4])
    assert ended(stop=["\0", stop]) == ("stop", stop, word(tokens[:1]))
    assert ended(stop=stop, include_stop_str_in_output=True) == ("stop", stop, word(tokens[:3]))
    assert ended(include_stop_str_in_output=True) == ("stop", None, word(tokens[: before + 1]))
    # It occurs again, at tokens 8 and 9.
    assert tokens[8:10] == tokens[1:3]
    assert ended(stop=stop, ignore_eos=True, min_tokens=4) == ("stop", stop, word(tokens[:8]))
    assert ended(stop=stop, ignore_eos=True, min_tokens=11) == ("length", None, word(tokens))
    assert ended(stop=stop, ignore_eos=True, min_tokens=2)[:2] == ("stop", stop)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias must hold tokens from 0 to 96, got 97"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must hold tokens from 0 to 96, got -1"),
        ({"allowed_token_ids": [1], "suppress_tokens": [1]}, "suppress_tokens must leave a token to choose"),
        ({"allowed_token_ids": [1], "stop_token_ids": [1], "min_tokens": 2}, "min_tokens must leave a token to choose"),
        ({"logprobs": 98}, "logprobs must be at most the vocabulary's 97, got 98"),
    ],
)
def test_parameters_that_do_not_fit_the_model(options, message):
    with pytest.raises(ValueError, match=message):
        engine().add([1], SamplingParams(**options))


def test_bad_words_need_a_tokenizer():
    with pytest.raises(ValueError, match="bad_words needs an engine with a tokenizer that encodes"):
        Engine(model(), num_pages=8).add([1], SamplingParams(bad_words=["a"]))


@pytest.mark.parametrize("family", ["DeepseekV4", "GlmMoeDsa"])
def test_prompt_logprobs_of_models_with_several_caches(family):
    served = Engine(model(family), page_size=8, num_pages=24, max_num_batched_tokens=9, num_speculative_tokens=2)
    params = greedy(4, prompt_logprobs=0, presence_penalty=0.1)
    first, again = served.generate([PROMPTS[1]], params)[0], served.generate([PROMPTS[1]], params)[0]
    with torch.no_grad():
        logprobs = model(family)(torch.tensor(PROMPTS[1:2]), use_cache=False).logits[0].log_softmax(-1)
    for output in (first, again):
        found = [
            (entry or {})[token].logprob
            for entry, token in zip((output.prompt_logprobs or [])[1:], PROMPTS[1][1:], strict=True)
        ]
        expected = logprobs[:-1].gather(-1, torch.tensor(PROMPTS[1][1:])[:, None])[:, 0].tolist()
        assert found == pytest.approx(expected, abs=1e-3)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
