"""OpenAI's client library gets the engine's outputs from the server."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from support.engine_models import greedy, prompt
from support.letters import Letters

from flashlatte.engine import SamplingParams

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello"}]
# By the template of ``support.letters``.
HELLO_TEXT = "uHello;a"


@pytest.fixture(scope="module")
def expected(serving):
    """The engine's output for a text."""
    from support import api_server

    alone = api_server.engine()

    def generate(text: str | list[int], params: SamplingParams) -> Any:
        tokens = Letters().encode(text) if isinstance(text, str) else text
        return alone.generate([tokens], params)[0].outputs

    return generate


def test_completions_of_text_and_of_tokens(client, expected):
    for text in ("Hello", Letters().encode("Hello"), [Letters().encode("Hello")], ["Hello"]):
        answer = client.completions.create(model=MODEL, prompt=text, temperature=0)
        (output,) = expected("Hello", greedy(16))
        assert [choice.text for choice in answer.choices] == [output.text]
        assert answer.choices[0].finish_reason == "length"
        assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", MODEL, "cmpl-")
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 16, 21)


def test_several_prompts_with_several_outputs(client, expected):
    answer = client.completions.create(model=MODEL, prompt=["Hello", "Bye"], n=3, max_tokens=7, seed=5, temperature=2)
    params = SamplingParams(n=3, max_tokens=7, seed=5, temperature=2)
    texts = [output.text for text in ("Hello", "Bye") for output in expected(text, params)]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    assert len(set(texts)) > 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 42)


def test_several_prompts_as_a_stream(client, expected):
    options: dict[str, Any] = {"prompt": ["Hello", "Bye"], "n": 2, "max_tokens": 7, "seed": 5, "temperature": 2}
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    with client.completions.create(model=MODEL, stream=True, **options) as stream:
        for part in stream:
            (choice,) = part.choices
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons.setdefault(choice.index, []).append(choice.finish_reason)
    params = SamplingParams(n=2, max_tokens=7, seed=5, temperature=2)
    outputs = [output.text for text in ("Hello", "Bye") for output in expected(text, params)]
    assert texts == dict(enumerate(outputs))
    # Each choice ends once.
    assert all(found[-1] == "length" and set(found[:-1]) <= {None} for found in reasons.values())


def test_chat_by_the_template(client, expected):
    messages = [
        {"role": "developer", "content": "Be"},
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "Bye", "name": "x"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=9, temperature=0)
    (output,) = expected("sBe;uHello;aa\nb;uBye;a".replace("\n", " "), greedy(9))
    message = answer.choices[0].message
    assert (message.role, message.content, message.refusal, message.tool_calls) == (
        "assistant",
        output.text,
        None,
        None,
    )
    assert (answer.object, answer.id[:9], answer.usage.prompt_tokens) == ("chat.completion", "chatcmpl-", 22)
    # A response message can be sent back unchanged.
    again = [*messages, message.model_dump(), *HELLO]
    assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=1).choices


def test_chat_runs_to_the_end_of_the_context_by_default(serving, openai):
    from support import api_server

    with (
        serving(api_server.engine(num_pages=4)) as server,
        openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.usage.total_tokens == 4 * 16 + 1
        assert answer.choices[0].finish_reason == "length"
        assert client.models.retrieve(MODEL).max_model_len == 65


def test_a_chat_that_continues_the_last_message(client, expected):
    messages = [*HELLO, {"role": "assistant", "content": "I say"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=5, temperature=0, extra_body={"continue_final_message": True}
    )
    assert answer.choices[0].message.content == expected("uHello;aI say", greedy(5))[0].text


def test_a_stream_of_chat_ends_with_its_usage(client, expected):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected(HELLO_TEXT, greedy(8))[0].text
    assert [part.choices[0].delta.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
    assert [part.choices[0].finish_reason for part in parts] == [*[None] * (len(parts) - 1), "length"]
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 8, 8)
    assert all(part.usage is None for part in parts)
    assert len({part.id for part in (*parts, last)}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_not_in_the_text(client, expected, stream):
    text = expected("Hello", greedy(16))[0].text
    stop = text[6:9]
    end = text.index(stop)
    answer = client.completions.create(
        model=MODEL, prompt="Hello", temperature=0, stop=["nowhere", stop], stream=stream
    )
    parts = [part.choices[0] for part in answer] if stream else answer.choices
    assert "".join(part.text for part in parts) == text[:end]
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == ("stop", stop)


def test_fields_of_vllm_reach_the_sampling(client, expected):
    tokens = expected("Hello", greedy(16))[0].token_ids
    body = {"stop_token_ids": [tokens[5]], "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.0, "ignore_eos": True}
    answer = client.completions.create(model=MODEL, prompt="Hello", temperature=0, extra_body=body)
    count = tokens.index(tokens[5]) + 1
    assert answer.choices[0].text == Letters().decode(tokens[: count - 1])
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", tokens[5])
    assert answer.usage.completion_tokens == count
    biased = client.completions.create(model=MODEL, prompt="Hello", temperature=0, logit_bias={"40": 100}, max_tokens=3)
    assert biased.choices[0].text == Letters().decode([40] * 3)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions(client, expected, stream):
    (output,) = expected("Hello", greedy(6, logprobs=2))
    answer = client.completions.create(
        model=MODEL, prompt="Hello", temperature=0, max_tokens=6, logprobs=2, stream=stream
    )
    found = [part.choices[0].logprobs for part in answer] if stream else [answer.choices[0].logprobs]
    tokens = [token for one in found for token in one.tokens]
    assert "".join(tokens) == output.text
    assert [offset for one in found for offset in one.text_offset] == list(range(6))
    chosen = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs or [], strict=True)]
    assert [value for one in found for value in one.token_logprobs] == pytest.approx(chosen, abs=1e-4)
    top = [entry for one in found for entry in one.top_logprobs]
    assert [set(entry) for entry in top] == [
        {one.decoded_token for one in entry.values()} for entry in output.logprobs or []
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_scores_the_prompt(client, stream):
    answer = client.completions.create(
        model=MODEL, prompt="Hello", temperature=0, max_tokens=3, logprobs=0, echo=True, stream=stream
    )
    parts = [part.choices[0] for part in answer] if stream else answer.choices
    text, found = "".join(part.text for part in parts), [part.logprobs for part in parts]
    values = [value for one in found for value in one.token_logprobs]
    assert text.startswith("Hello")
    assert len(text) == len(values) == 8
    assert values[0] is None
    assert all(value < 0 for value in values[1:])
    assert [offset for one in found for offset in one.text_offset] == list(range(8))


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_one_token_has_no_score(client, stream):
    answer = client.completions.create(
        model=MODEL, prompt="H", max_tokens=1, n=3, logprobs=0, echo=True, stream=stream, seed=1
    )
    parts = [part.choices[0] for part in answer] if stream else answer.choices
    assert sorted(part.index for part in parts) == [0, 1, 2]
    for part in parts:
        assert (part.text[0], part.logprobs.tokens[0], part.logprobs.token_logprobs[0]) == ("H", "H", None)
        assert len(part.logprobs.tokens) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chat(client, expected, stream):
    (output,) = expected(HELLO_TEXT, SamplingParams(max_tokens=6, logprobs=3, seed=1))
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, seed=1, logprobs=True, top_logprobs=3, stream=stream
    )
    parts = [part.choices[0] for part in answer] if stream else answer.choices
    content = [entry for part in parts for entry in part.logprobs.content]
    assert "".join(entry.token for entry in content) == output.text
    for entry, token, logprobs in zip(content, output.token_ids, output.logprobs or [], strict=True):
        assert entry.logprob == pytest.approx(logprobs[token].logprob, abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
        ranked = sorted(logprobs.values(), key=lambda one: one.rank)[:3]
        assert [one.token for one in entry.top_logprobs] == [one.decoded_token for one in ranked]


def test_characters_of_several_tokens(serving, openai):
    """With a byte tokenizer, most outputs of a random model are invalid UTF-8, and some have multi-byte characters."""
    import tokenizers
    import transformers
    from support.engine_models import model

    from flashlatte.engine import Engine

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    of_bytes = tokenizers.Tokenizer(tokenizers.models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=of_bytes)
    served = Engine(model(vocab_size=256), num_pages=128, page_size=16, tokenizer=tokenizer)
    emoji = tokenizer.encode("🙂")
    options: dict[str, Any] = {"model": MODEL, "prompt": "é語🙂", "seed": 3, "n": 4, "max_tokens": 60, "logprobs": 2}
    options["extra_body"] = {"allowed_token_ids": [*emoji, *tokenizer.encode("é a")]}
    with (
        serving(served) as server,
        openai.OpenAI(base_url=server.url, api_key="unused", max_retries=0) as client,
    ):
        whole = client.completions.create(**options).choices
        parts = [part.choices[0] for part in client.completions.create(stream=True, **options)]
        assert "\N{REPLACEMENT CHARACTER}" in "".join(choice.text for choice in whole)
        for choice in whole:
            mine = [part for part in parts if part.index == choice.index]
            assert "".join(part.text for part in mine) == choice.text
            assert sum(len(part.logprobs.tokens) for part in mine) == len(choice.logprobs.tokens) == 60


def test_models(client):
    (listed,) = client.models.list()
    assert (listed.id, listed.object, listed.max_model_len) == (MODEL, "model", 4096)
    assert client.models.retrieve(MODEL) == listed


def test_64_streams_at_once_get_their_own_tokens(openai, server):
    """32 run at a time, and a third of the clients disconnects early."""
    prompts = [prompt(3 + number % 11, number) for number in range(64)]
    texts = [""] * 64

    async def read(client: Any, number: int, begun: asyncio.Event) -> None:
        options = {"prompt": prompts[number], "max_tokens": 24, "temperature": 0, "stream": True}
        try:
            async with await client.completions.create(model=MODEL, **options) as parts:
                async for part in parts:
                    texts[number] += part.choices[0].text
                    if len(texts[number]) > 4:
                        begun.set()
        finally:
            begun.set()

    async def stream(client: Any, number: int) -> None:
        begun = asyncio.Event()
        reading = asyncio.create_task(read(client, number, begun))
        if number % 3 == 0:
            await begun.wait()
            # Leaving the loop instead would leave the client's nested generators to the garbage collector.
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        else:
            await reading

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="unused", max_retries=0, timeout=120) as client:
            await asyncio.gather(*(stream(client, number) for number in range(64)))

    asyncio.run(main())
    server.wait_idle()
    from support import api_server

    for number, output in enumerate(api_server.engine().generate(prompts, greedy(24))):
        assert output.outputs[0].text.startswith(texts[number])
        assert len(texts[number]) == 24 or (number % 3 == 0 and len(texts[number]) > 4)
