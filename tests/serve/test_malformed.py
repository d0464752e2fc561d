"""Any malformed body gets a 4xx error that names the field, and leaves nothing running."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
HELLO = {"role": "user", "content": "Hello"}
CHAT_BASE = {"model": "tiny", "messages": [HELLO], "max_tokens": 4}
HUGE = 10**30


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    server.wait_idle()
    assert server.shared.step_error is None


def refused(server: Any, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    got, answer = server.request("POST", path, body)
    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 1000
    return error


COMMON = [
    ({"model": "other"}, "model", 404),
    ({"model": 3}, "model", 400),
    ({"model": None}, "model", 400),
    ({"n": 0}, "n", 400),
    ({"n": -1}, "n", 400),
    ({"n": HUGE}, "n", 400),
    ({"n": 129}, "n", 400),
    ({"n": 2, "temperature": 0}, "n", 400),
    ({"max_tokens": 0}, "max_tokens", 400),
    ({"max_tokens": -5}, "max_tokens", 400),
    ({"max_tokens": HUGE}, "max_tokens", 400),
    ({"max_tokens": 4096}, "max_tokens", 400),
    ({"max_tokens": 4.5}, "max_tokens", 400),
    ({"max_tokens": True}, "max_tokens", 400),
    ({"max_tokens": "4"}, "max_tokens", 400),
    ({"max_tokens": [4]}, "max_tokens", 400),
    ({"min_tokens": 5}, "min_tokens", 400),
    ({"min_tokens": HUGE}, "min_tokens", 400),
    ({"temperature": -0.1}, "temperature", 400),
    ({"temperature": "hot"}, "temperature", 400),
    ({"temperature": 10**400}, "temperature", 400),
    ({"top_p": 0}, "top_p", 400),
    ({"top_p": 1.5}, "top_p", 400),
    ({"top_k": -2}, "top_k", 400),
    ({"top_k": HUGE}, "top_k", 400),
    ({"min_p": 2}, "min_p", 400),
    ({"presence_penalty": 3}, "presence_penalty", 400),
    ({"frequency_penalty": -2.5}, "frequency_penalty", 400),
    ({"repetition_penalty": 0}, "repetition_penalty", 400),
    ({"seed": -1}, "seed", 400),
    ({"seed": 2**63}, "seed", 400),
    ({"seed": 1.0}, "seed", 400),
    ({"stop": ""}, "stop", 400),
    ({"stop": ["a", ""]}, "stop", 400),
    ({"stop": [1]}, "stop", 400),
    ({"stop": {"a": 1}}, "stop", 400),
    ({"stop": ["a"] * 17}, "stop", 400),
    ({"stop": "a" * 1025}, "stop", 400),
    ({"stop_token_ids": [97]}, "stop_token_ids", 400),
    ({"stop_token_ids": [-1]}, "stop_token_ids", 400),
    ({"stop_token_ids": [HUGE]}, "stop_token_ids", 400),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", 400),
    ({"stop_token_ids": [0] * 1025}, "stop_token_ids", 400),
    ({"allowed_token_ids": []}, "allowed_token_ids", 400),
    ({"allowed_token_ids": [[1]]}, "allowed_token_ids", 400),
    ({"suppress_tokens": list(range(97))}, "suppress_tokens", 400),
    ({"logit_bias": {"a": 1}}, "logit_bias", 400),
    ({"logit_bias": {"-1": 1}}, "logit_bias", 400),
    ({"logit_bias": {"97": 1}}, "logit_bias", 400),
    ({"logit_bias": {"3": 101}}, "logit_bias.3", 400),
    ({"logit_bias": {"3": []}}, "logit_bias.3", 400),
    ({"logit_bias": [3]}, "logit_bias", 400),
    ({"logit_bias": {str(one): 1 for one in range(1025)}}, "logit_bias", 400),
    ({"stream": "yes"}, "stream", 400),
    ({"stream": 1}, "stream", 400),
    ({"stream_options": {"include_usage": True}}, "stream_options", 400),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", 400),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other", 400),
    ({"stream": True, "stream_options": []}, "stream_options", 400),
    ({"stream": True, "temperature": -1}, "temperature", 400),
    ({"ignore_eos": "no"}, "ignore_eos", 400),
    ({"cache_salt": 3}, "cache_salt", 400),
    ({"store": True}, "store", 400),
    ({"no_such_field": 1}, "no_such_field", 400),
    ({"priority": -1000}, "priority", 400),
    ({"guided_json": {}}, "guided_json", 400),
    ({"user": {"a": [1]}, "nested": {"b": 1}}, "nested", 400),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_of_both_endpoints(server, path):
    base = BASE if path == COMPLETIONS else CHAT_BASE
    for change, param, status in COMMON:
        error = refused(server, path, {**base, **change}, status)
        assert error["param"] == param, (change, error)
        assert param.split(".")[0] in error["message"], (change, error)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["Hello", ""]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": ["a", None]}, "prompt[1]"),
        ({"prompt": [[1, 2.0]]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [97]}, "prompt"),
        ({"prompt": [[1], [-1]]}, "prompt"),
        ({"prompt": [HUGE]}, "prompt"),
        ({"prompt": [HUGE], "echo": True}, "prompt"),
        ({"prompt": [[1], [-1]], "echo": True}, "prompt"),
        ({"prompt": "\ud800"}, "prompt[0]"),
        ({"prompt": "a" * 4096}, "prompt"),
        ({"prompt": [[1]] * 161}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"tools": []}, "tools"),
    ],
)
def test_fields_of_completions(server, change, param):
    assert refused(server, COMPLETIONS, {**BASE, **change})["param"] == param


def test_too_many_prompts_are_refused_before_they_are_encoded(server, monkeypatch):
    monkeypatch.setattr(server.engine.tokenizer, "encode", lambda *_, **__: pytest.fail("encoded"))
    error = refused(server, COMPLETIONS, {**BASE, "prompt": ["a"] * 161})
    assert (error["param"], error["message"]) == ("prompt", "prompt must ask for at most 160 outputs, got 161")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
        ({"messages": [HELLO, {"role": "robot", "content": "Hello"}]}, "messages[1].role"),
        ({"messages": [{"role": ["user"], "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "Hello", "tool_call_id": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["Hello"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{**HELLO, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{**HELLO, "extra": 1}]}, "messages[0].extra"),
        ({"messages": [{"role": "user", "content": "a" * 4096}]}, "messages"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": HUGE}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs.eos_token"),
        ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs.a"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": " "}]}, "continue_final_message"),
    ],
)
def test_fields_of_chat(server, change, param):
    assert refused(server, CHAT, {**CHAT_BASE, **change})["param"] == param


FIELDS = sorted({name for change, *_ in COMMON for name in change} | {"messages", "prompt", "logprobs", "top_logprobs"})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 100),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "96", "include_usage"]), inner, max_size=3
        ),
        st.just([HELLO]),
    ),
    max_leaves=6,
)


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    path=st.sampled_from([COMPLETIONS, CHAT]), change=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
)
def test_any_values_are_answered_or_refused(server, path, change):
    base = {**(BASE if path == COMPLETIONS else CHAT_BASE), "max_tokens": 2}
    status, answer = server.request("POST", path, {**base, **change})
    assert status in (200, 400, 404), answer
    assert status == 200 or answer["error"]["param"].split(".")[0].split("[")[0] in {*base, *change}, answer


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"null", "must be a JSON object, got NoneType"),
        (b"[1, 2]", "must be a JSON object, got list"),
        (b"\xff\xfe{}", "can't decode byte"),
        (b'{"model": "tiny", "prompt": "\xc3"}', "can't decode byte"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"model": "tiny", "prompt": "a", "top_p": -Infinity}', "-Infinity is not a JSON number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 50_000, "nested too deeply"),
        (b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 5000 + b"}", "limit"),
    ],
)
def test_bodies_that_are_not_a_json_object(server, body, reason):
    for path in (COMPLETIONS, CHAT):
        error = refused(server, path, body)
        assert (error["code"], error["param"]) == ("invalid_json", None)
        assert reason in error["message"]


def test_a_number_beyond_float_is_refused_by_name(server):
    body = json.dumps(BASE)[:-1].encode() + b', "temperature": 1e999}'
    assert refused(server, COMPLETIONS, body)["param"] == "temperature"


def test_names_with_lone_surrogates_are_refused(server):
    body = json.dumps(BASE)[:-1].encode() + b', "\\ud800": 1}'
    assert "lone surrogates" in refused(server, COMPLETIONS, body)["message"]
    for name in ("chat_template_kwargs", "logit_bias"):
        assert refused(server, CHAT, {**CHAT_BASE, name: {"\ud800": 1}})["param"].startswith(name)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_neutral_values_of_unsupported_fields_pass(server, path):
    neutral = {"store": False, "service_tier": "auto", "user": "me", "metadata": {"a": "b"}, "stop": None, "seed": None}
    if path == COMPLETIONS:
        body = {**BASE, **neutral, "best_of": 1, "suffix": None}
    else:
        body = {**CHAT_BASE, **neutral, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
        body["chat_template_kwargs"] = {"thinking": True, "style": "short"}
    status, answer = server.request("POST", path, body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)


def test_extreme_valid_values_do_not_affect_other_requests(server):
    values = [
        {"temperature": 1e300},
        {"temperature": 1e-320},
        {"repetition_penalty": 1e-300},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-320},
        {"min_p": 1e-320},
        {"logit_bias": {"3": -100, "4": 100}},
        {"n": 128, "max_tokens": 1},
        {"allowed_token_ids": [3], "suppress_tokens": [4]},
        {"bad_words": ["a", " b"]},
        {"cache_salt": "\x00"},
        {"prompt": "\x00\x7f\U0010ffff"},
    ]
    for value in values:
        status, answer = server.request("POST", COMPLETIONS, {**BASE, **value})
        assert status == 200, (value, answer)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (COMPLETIONS, {"n": 100, "max_tokens": 4000, "logprobs": 10}),
        (COMPLETIONS, {"prompt": [[1] * 4000] * 100, "max_tokens": 1, "echo": True, "logprobs": 10}),
        (CHAT, {"n": 100, "max_tokens": 4000, "logprobs": True, "top_logprobs": 10}),
    ],
)
def test_log_probabilities_that_would_fill_the_memory_are_refused(server, path, change):
    error = refused(server, path, {**(BASE if path == COMPLETIONS else CHAT_BASE), **change})
    assert error["param"] == "logprobs"
    assert "logprobs must be at most 4194304 in a request, got 11 for each of 40" in error["message"]


def test_a_tokenizer_without_a_template_refuses_chat(serving):
    from support import api_server

    with serving(api_server.engine(tokenizer=api_server.tokenizer(None))) as server:
        error = refused(server, CHAT, CHAT_BASE)
        assert "messages need a chat template" in error["message"]
        assert server.request("POST", COMPLETIONS, BASE)[0] == 200


def test_errors_of_a_chat_template_are_reported(serving):
    from support import api_server

    template = "{{ raise_exception('roles must alternate') }}"
    with serving(api_server.engine(tokenizer=api_server.tokenizer(template))) as server:
        error = refused(server, CHAT, CHAT_BASE)
        assert error["message"] == "messages must fit the model's chat template: roles must alternate"


def test_paths_and_methods_that_do_not_exist(server):
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/v1/embeddings", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", COMPLETIONS + "/", 404),
    ):
        got, answer = server.request(method, path)
        assert (got, set(answer)) == (status, {"error"})
