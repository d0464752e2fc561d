"""Requests do not affect each other's tokens when others are added, fail, are prioritized or are aborted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine_models import VOCABULARY, chosen_logprobs, generated_by_transformers, greedy, model, prompt
from support.engine_requests import NEW, PROMPTS, engine, expected, finished
from support.letters import Letters, Pieces

from flashlatte.engine import SamplingParams, runner
from flashlatte.engine.request import Step


@given(
    events=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["add", "add", "step", "step", "abort"])), max_size=10
    ),
    options=st.fixed_dictionaries(
        {
            "num_pages": st.sampled_from([10, 64]),
            "swap_space": st.sampled_from([0, 8]),
            "num_speculative_tokens": st.integers(0, 2),
        }
    ),
)
def test_arrivals_and_aborts_do_not_change_other_requests(events, options):
    served = engine(page_size=4, **options)
    numbers: dict[str, int] = {}
    done: dict[str, list[int]] = {}
    for number, event in events:
        running = [name for name in numbers if name not in done]
        if event == "add":
            numbers[served.add(PROMPTS[number], greedy(NEW))] = number
        elif event == "step":
            done |= {
                output.request_id: output.outputs[0].token_ids
                for output in served.step()
                if output.outputs[0].finish_reason is not None
            }
        elif running:
            gone = running[number % len(running)]
            got = served.abort(gone).outputs[0].token_ids
            assert got == expected(numbers.pop(gone))[: len(got)]
    done |= finished(served)
    assert done == {name: expected(number) for name, number in numbers.items()}
    assert served.pool.in_use == 0


@functools.cache
def drawn_alone(number: int, sampling: SamplingParams) -> tuple[list[int], list[float], str | None]:
    (output,) = engine().generate([PROMPTS[number]], dataclasses.replace(sampling, stop=()))
    for count in range(1, len(output.outputs[0].token_ids) + 1):
        if any(text in Pieces().decode(output.outputs[0].token_ids[:count]) for text in sampling.stop or ()):
            return output.outputs[0].token_ids[:count], chosen_logprobs(output)[:count], "stop"
    return output.outputs[0].token_ids, chosen_logprobs(output), output.outputs[0].finish_reason


@given(
    samplings=st.tuples(
        *[
            st.builds(
                SamplingParams,
                max_tokens=st.just(NEW),
                temperature=st.sampled_from([0.0, 0.9]),
                repetition_penalty=st.sampled_from([1.0, 1.4]),
                seed=st.integers(0, 1),
                stop_token_ids=st.sampled_from([(), tuple(range(12))]),
                stop=st.sampled_from([(), ("ba", "cd", "addd")]),
                logprobs=st.just(0),
            )
        ]
        * 3
    ),
    options=st.fixed_dictionaries(
        {
            "num_pages": st.sampled_from([10, 12]),
            "swap_space": st.sampled_from([0, 8]),
            "num_speculative_tokens": st.sampled_from([0, 3]),
        }
    ),
)
def test_draws_penalties_stops_and_logprobs_are_those_of_a_request_alone(samplings, options):
    served = engine(page_size=4, max_num_seqs=2, tokenizer=Pieces(), **options)
    outputs = served.generate(PROMPTS[:3], samplings)
    for number, (output, sampling) in enumerate(zip(outputs, samplings, strict=True)):
        tokens, logprobs, reason = drawn_alone(number, sampling)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (tokens, reason)
        assert chosen_logprobs(output) == pytest.approx(logprobs, abs=1e-4)


def test_other_salts_share_no_page():
    served = engine()
    for cache_salt, cached in (("a", 0), ("b", 0), ("a", 16), ("", 0)):
        served.add(PROMPTS[1], greedy(NEW), request_id="one", cache_salt=cache_salt)
        output = None
        while served.unfinished:
            (output,) = served.step() or [output]
        assert output is not None
        assert (output.num_cached_tokens, output.outputs[0].token_ids) == (cached, expected(1))


def test_pages_of_a_shared_prefix_are_counted_once():
    served = engine(max_num_batched_tokens=64)
    shared = prompt(40, 9)
    served.generate([shared], greedy(1))
    for last in range(3):
        served.add([*shared, last], greedy(4))
    served.step()
    # Five pages of the prefix, and one separate page for each request.
    assert served.pool.in_use == 5 + 3
    finished(served)


def test_a_request_with_priority_overtakes_an_earlier_one():
    served = engine(max_num_seqs=1)
    served.add(PROMPTS[0], greedy(NEW), request_id="running")
    served.step()
    served.add(PROMPTS[1], greedy(NEW), request_id="usual")
    served.add(PROMPTS[2], greedy(NEW), request_id="urgent", priority=-1)
    assert list(finished(served)) == ["running", "urgent", "usual"]


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ([], ValueError),
        ([VOCABULARY], ValueError),
        ([1] * 600, ValueError),
        ("a text", TypeError),
    ],
)
def test_prompts_with_an_error_are_all_rejected_and_others_continue(mistake, error):
    served = engine()
    served.add(PROMPTS[1], greedy(NEW), request_id="other")
    served.step()
    with pytest.raises(error):
        served.generate([PROMPTS[0], mistake], greedy(NEW))
    assert served.unfinished == 1
    assert finished(served) == {"other": expected(1)}


def test_an_interrupted_batch_leaves_no_requests(monkeypatch):
    served = engine()
    run, calls = served.runner.run, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(served.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        served.generate([PROMPTS[1], PROMPTS[2]], greedy(NEW))
    assert served.unfinished == served.pool.in_use == 0


@pytest.mark.parametrize("raises_in", ["run", "wait"])
@pytest.mark.parametrize("swap_space", [0, 8])
def test_a_failed_step_ends_all_requests_and_leaves_no_wrong_page(raises_in, swap_space, monkeypatch):
    """Their first pages were allocated but not computed: a request with the same prefix must not reuse them."""
    served = engine(page_size=4, swap_space=swap_space, max_num_batched_tokens=8)
    names = [served.add(PROMPTS[number], greedy(NEW)) for number in (1, 2)]
    served.step()
    outputs = served._live.outputs()

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(*((served.runner, "_compute") if raises_in == "run" else (runner.StepResult, "wait")), failing)
        with pytest.raises(RuntimeError, match="no memory left"):
            served.step()
    assert [output.request_id for output in outputs] == names
    assert all(output.outputs[0].finish_reason == "abort" for output in outputs)
    assert served.unfinished == served.pool.in_use == 0
    assert [output.outputs[0].token_ids for output in served.generate(PROMPTS, greedy(NEW))] == [
        expected(number) for number in range(len(PROMPTS))
    ]


def test_prompts_and_parameters_may_be_iterators():
    def broken():
        yield PROMPTS[0]
        raise OSError("no more lines")

    served = engine()
    outputs = served.generate(iter(PROMPTS[:2]), (greedy(count) for count in (2, 3)))
    assert [output.outputs[0].token_ids for output in outputs] == [expected(0)[:2], expected(1)[:3]]
    with pytest.raises(OSError, match="no more lines"):
        served.generate(broken())
    assert served.unfinished == 0


def test_an_id_may_be_used_again_when_its_request_has_ended():
    served = engine()
    for number in (0, 1):
        served.add(PROMPTS[number], greedy(NEW), request_id="again")
        assert finished(served) == {"again": expected(number)}


def test_generated_ids_differ_from_ids_of_the_user():
    served = engine()
    served.add(PROMPTS[1], greedy(NEW), request_id="request-0")
    assert served.generate([PROMPTS[0]], greedy(NEW))[0].outputs[0].token_ids == expected(0)
    assert finished(served) == {"request-0": expected(1)}


def test_suppressed_tokens_are_transformers():
    suppressed = (*expected(0)[:2], 5)
    wanted = generated_by_transformers("DeepseekV3", PROMPTS[0], NEW, suppress_tokens=list(suppressed))
    with_others = engine().generate([PROMPTS[0], PROMPTS[1]], [greedy(NEW, suppress_tokens=suppressed), greedy(NEW)])
    assert [output.outputs[0].token_ids for output in with_others] == [wanted, expected(1)]


@pytest.mark.parametrize("as_list", [False, True])
def test_a_text_ends_where_transformers_ends_it(as_list, monkeypatch):
    ends = [96, expected(1)[2]] if as_list else expected(1)[2]
    monkeypatch.setattr(model().generation_config, "eos_token_id", ends)
    wanted = [generated_by_transformers("DeepseekV3", PROMPTS[number], NEW, eos_token_id=ends) for number in (0, 1)]
    ended, going_on = engine().generate([PROMPTS[1]] * 2, [greedy(NEW), greedy(NEW, ignore_eos=True)])
    assert (ended.outputs[0].token_ids, ended.outputs[0].finish_reason) == (wanted[1], "stop")
    assert (going_on.outputs[0].token_ids, going_on.outputs[0].finish_reason) == (expected(1), "length")
    assert engine().generate([PROMPTS[0]], greedy(NEW))[0].outputs[0].token_ids == wanted[0]


def test_requests_without_a_seed_draw_differently_and_repeatably():
    drawn = [
        [output.outputs[0].token_ids for output in engine().generate([PROMPTS[0]] * 3, greedy(NEW, temperature=2.0))]
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(map(tuple, drawn[0]))) == 3


def test_a_refused_request_does_not_change_later_draws():
    undisturbed, served, sampling = engine(), engine(), greedy(NEW, temperature=2.0)
    for one in (undisturbed, served):
        one.add(PROMPTS[1], sampling, request_id="a")
    for mistake in ({"prompt": []}, {"prompt": [VOCABULARY]}, {"prompt": [1], "request_id": "a"}):
        with pytest.raises(ValueError, match="got"):
            served.add(**mistake)  # type: ignore[arg-type]
    assert served.add(PROMPTS[0], sampling) == undisturbed.add(PROMPTS[0], sampling) == "request-1"
    assert finished(served) == finished(undisturbed)


@pytest.mark.parametrize(
    ("suppressed", "message"),
    [
        ((VOCABULARY,), "suppress_tokens must hold tokens from 0 to 96, got 97"),
        (tuple(range(VOCABULARY)), "suppress_tokens must leave a token to choose"),
    ],
)
def test_suppressed_tokens_are_in_the_vocabulary_and_leave_one(suppressed, message):
    with pytest.raises(ValueError, match=message):
        engine().add([1], greedy(suppress_tokens=suppressed))


def test_page_lists_are_copied_to_the_device_once_for_all_layers(monkeypatch):
    swapped = []
    swap_blocks = runner.swap_blocks
    monkeypatch.setattr(runner, "swap_blocks", lambda *args: [swapped.append(args), swap_blocks(*args)])
    served = engine(page_size=4, num_pages=12, swap_space=12, enable_prefix_caching=False)
    served.generate(PROMPTS, greedy(12))
    layers = len(served.runner.caches)
    assert len(swapped) > layers > 1
    for first in range(0, len(swapped), layers):
        lists = [pages for call in swapped[first : first + layers] for pages in call[2:]]
        assert all(isinstance(pages, torch.Tensor) for pages in lists)
        assert len({pages.data_ptr() for pages in lists}) == 2


def test_a_step_may_move_pages_and_compute_nothing():
    served = engine(swap_space=2)
    served.runner.caches[0][3].fill_(7.0)
    served.runner.run(Step(swap_out=[(3, 1)])).wait()
    assert served.runner.host_caches is not None
    assert (served.runner.host_caches[0][1] == 7.0).all()


@pytest.mark.parametrize("name", ["num_pages", "swap_space"])
def test_error_for_a_cache_that_does_not_fit_suggests_changes(name):
    with pytest.raises(
        ValueError, match=rf"{name} must fit the host's free memory: of 10000000000000 pages .* about \d+ do"
    ):
        engine(**{name: 10**13})


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs"])
def test_error_for_a_step_that_does_not_fit_names_its_sizes(name):
    with pytest.raises(ValueError, match=rf"{name}.* must be of a step that fits the memory, got .*{10**14}"):
        engine(**{name: 10**14})


@pytest.mark.parametrize(("name", "prompt"), [("prompt", "a\ud800"), ("bad_words", "a")])
def test_text_that_tokenizers_cannot_encode_is_refused_by_name(name, prompt):
    params = SamplingParams(bad_words=["a", "b\udfff"]) if name == "bad_words" else None
    served = engine(tokenizer=Letters())
    with pytest.raises(ValueError, match=rf"{name} must be a string without lone surrogates, got '.*\\ud"):
        served.add(prompt, params)
    assert served.unfinished == 0
