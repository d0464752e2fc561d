"""Stateful test: for any sequence of calls to two engines, each request gets transformers' tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.choosing import choose
from support.engine_models import VOCABULARY, chosen_logprobs, greedy, model, prompt
from support.letters import Pieces

from flashlatte.engine import Engine, Model, RequestOutput, SamplingParams

pytestmark = pytest.mark.full
pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

INVARIANT = "Youtu, batch_invariant"
FAMILIES = (
    "DeepseekV3",
    "DeepseekV32",
    "GlmMoeDsa",
    "DeepseekV4",
    "KimiLinear",
    "Glm5Next",
    "MistralLarge4",
    INVARIANT,
)
# Some have common prefixes, for any page size, and some repeat themselves, for draft tokens.
ALIKE, OTHER, REPEATED = prompt(30, 1), prompt(30, 2), prompt(3, 3) * 12
PROMPTS = tuple(
    map(
        tuple,
        (ALIKE, ALIKE[:7], ALIKE[:16], [*ALIKE[:23], 5], [*ALIKE[:29], 6, 6], OTHER, OTHER[:12], REPEATED[:28], [9]),
    )
)
SAMPLINGS = (
    greedy(1),
    greedy(10, logprobs=0),
    greedy(10, repetition_penalty=1.4, suppress_tokens=range(20)),  # type: ignore[arg-type]
    greedy(9, temperature=0.9, top_p=0.8, seed=2, logprobs=0),
    greedy(10, stop_token_ids=tuple(range(0, VOCABULARY, 9)), logprobs=0),
    greedy(10, stop=("ba", "cd", "addd")),
    greedy(
        10, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={3: 1.0}, min_tokens=5, stop_token_ids=range(50)
    ),
    SamplingParams(max_tokens=9, seed=3, frequency_penalty=1.0, allowed_token_ids=tuple(range(40)), logprobs=2),
)
MOST_TOKENS = max(map(len, PROMPTS)) + 10


@functools.cache
def logits_of(family: str, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return model(family)(torch.tensor([tokens]), use_cache=False).logits[0, -1]


@functools.cache
def expected(family: str, tokens: tuple[int, ...], sampling: SamplingParams) -> tuple[list[int], list[float], str]:
    """Tokens, log-probabilities and finish reason."""
    new: list[int] = []
    logprobs: list[float] = []
    while len(new) < sampling.max_tokens:
        known = (*tokens, *new)
        logits = logits_of(family, known)[None]
        token = int(choose(logits, [sampling], prompt=tokens, output=new))
        new.append(token)
        logprobs.append(float(logits.log_softmax(-1)[0, token]))
        if token in sampling.all_stop_token_ids or any(stop in Pieces().decode(new) for stop in sampling.stop or ()):
            return new, logprobs, "stop"
    return new, logprobs, "length"


class Requests(RuleBasedStateMachine):
    @initialize(
        family=st.sampled_from(FAMILIES),
        page_size=st.sampled_from([1, 2, 8]),
        more_pages=st.sampled_from([0, 1, 4, 40]),
        swap_space=st.sampled_from([0, 4, 40]),
        num_speculative_tokens=st.sampled_from([0, 1, 4]),
        limits=st.fixed_dictionaries(
            {
                "max_num_batched_tokens": st.sampled_from([1, 2, 5, 16, 64]),
                "max_num_seqs": st.integers(1, 5),
                "starvation_limit": st.sampled_from([1, 64]),
                "enable_prefix_caching": st.booleans(),
            }
        ),
    )
    def start(self, family, page_size, more_pages, swap_space, num_speculative_tokens, limits):
        self.family = family.split(",")[0]
        served: Any = model(self.family)
        if family == INVARIANT:
            served, num_speculative_tokens = Model(served, batch_invariant=True), 0
        if family == "DeepseekV4":
            page_size = 8
        if family in ("KimiLinear", "Glm5Next"):
            num_speculative_tokens = 0
        pages = {"page_size": page_size, "num_pages": -(-MOST_TOKENS // page_size) + more_pages}
        options = (
            pages
            | limits
            | {"swap_space": swap_space, "num_speculative_tokens": num_speculative_tokens, "tokenizer": Pieces()}
        )
        self.engines = [Engine(served, **options) for _ in range(2)]
        self.asked: dict[tuple[int, str], tuple[Any, SamplingParams]] = {}
        self.streams: list[tuple[Iterator[int], list[int], Any]] = []
        self.count = 0

    engines_of = st.sampled_from([0, 0, 0, 1])
    prompts, samplings = st.sampled_from(PROMPTS), st.sampled_from(SAMPLINGS)

    @rule(
        engine=engines_of,
        prompt=prompts,
        sampling=samplings,
        given=st.sampled_from([list, tuple, torch.tensor]),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from(["", "", "other"]),
    )
    def add(self, engine, prompt, sampling, given, priority, cache_salt):
        self.count += 1
        name = self.engines[engine].add(
            given(prompt), sampling, request_id=f"number {self.count}", priority=priority, cache_salt=cache_salt
        )
        self.asked[engine, name] = prompt, sampling

    @rule(engine=engines_of, times=st.integers(1, 4))
    def step(self, engine, times):
        for _ in range(times):
            for output in self.engines[engine].step():
                if output.outputs[0].finish_reason is not None:
                    self.check(output, *self.asked.pop((engine, output.request_id)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        engine, name = data.draw(st.sampled_from(sorted(self.asked)))
        self.check(self.engines[engine].abort(name), *self.asked.pop((engine, name)))

    @rule(engine=engines_of, prompt=prompts, sampling=samplings)
    def stream(self, engine, prompt, sampling):
        wanted = expected(self.family, prompt, sampling)[0]
        self.streams.append((self.engines[engine].stream(prompt, sampling), [], wanted))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), drops=st.booleans())
    def read_a_stream(self, data, drops):
        tokens, got, wanted = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        got += [token for token in [next(tokens, None)] if token is not None]
        assert got == wanted[: len(got)]
        if len(got) < len(wanted) and not drops:
            self.streams.append((tokens, got, wanted))

    @rule(engine=engines_of, asked=st.lists(st.tuples(prompts, samplings), max_size=3))
    def generate(self, engine, asked):
        given, samplings = [one for one, _ in asked], [one for _, one in asked]
        for output, one in zip(self.engines[engine].generate(given, samplings), asked, strict=True):
            assert output.outputs[0].finish_reason != "abort"
            self.check(output, *one)

    def check(self, output: RequestOutput, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        tokens, logprobs, reason = expected(self.family, prompt, sampling)
        if output.outputs[0].finish_reason == "abort":
            tokens, reason = tokens[: len(output.outputs[0].token_ids)], "abort"
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (tokens, reason)
        if sampling.logprobs is not None:
            assert chosen_logprobs(output) == pytest.approx(logprobs[: len(tokens)], abs=2e-4)

    def teardown(self):
        if not hasattr(self, "engines"):
            return
        for tokens, got, wanted in self.streams:
            assert [*got, *tokens] == wanted
        for number, engine in enumerate(self.engines):
            for _ in range(3000):
                if engine.unfinished == 0:
                    break
                self.step(number, 1)
            assert engine.unfinished == 0
            assert engine.pool.in_use == engine.scheduler.host_pool.in_use == 0
            assert getattr(engine.scheduler.states, "in_use", 0) == 0
        assert not self.asked


TestRequests = Requests.TestCase
# Twenty take a minute.
TestRequests.settings = settings(max_examples=20, stateful_step_count=40)
