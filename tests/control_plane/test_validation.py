"""Every limit at its value and one beyond, and every number out of its range."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from harness import MODEL

from control_plane.errors import ErrorKind, InvalidRequestError
from control_plane.generation import ChatMessage, ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from control_plane.model_info import SamplingDefaults
from control_plane.validation import Limits, check_prompt_len, check_request, check_token_ids, sampling_params

LIMITS = Limits(
    max_prompt_bytes=100,
    max_chat_messages=3,
    max_chat_role_len=8,
    max_stop_token_ids=4,
    max_temperature=2.0,
    max_request_id_len=10,
    max_cache_salt_len=6,
    max_timeout_s=60.0,
)
PLAIN = GenerationRequest(TokenPrompt((1, 2, 3)))


def chat(count=1, role="user", content="hi"):
    return ChatPrompt((ChatMessage(role, content),) * count)


# For each client-driven size: requests at the limit, and just beyond it.
AT_AND_BEYOND = {
    "max_prompt_bytes": ({"prompt": TextPrompt("é" * 50)}, {"prompt": TextPrompt("é" * 50 + "x")}),
    "max_prompt_bytes, chat": ({"prompt": chat(2, "user", "x" * 46)}, {"prompt": chat(2, "user", "x" * 47)}),
    "max_chat_messages": ({"prompt": chat(3)}, {"prompt": chat(4)}),
    "max_chat_role_len": ({"prompt": chat(role="r" * 8)}, {"prompt": chat(role="r" * 9)}),
    "max_stop_token_ids": ({"stop_token_ids": (5,) * 4}, {"stop_token_ids": (5,) * 5}),
    "max_temperature": ({"temperature": 2.0}, {"temperature": 2.0001}),
    "max_request_id_len": ({"request_id": "i" * 10}, {"request_id": "i" * 11}),
    "max_cache_salt_len": ({"cache_salt": "s" * 6}, {"cache_salt": "s" * 7}),
    "max_timeout_s": ({"timeout_s": 60.0}, {"timeout_s": 60.1}),
}


@pytest.mark.parametrize("limit", AT_AND_BEYOND)
def test_a_size_at_its_limit_passes_and_one_beyond_does_not(limit):
    at, beyond = AT_AND_BEYOND[limit]
    check_request(replace(PLAIN, **at), LIMITS, MODEL)
    with pytest.raises(InvalidRequestError):
        check_request(replace(PLAIN, **beyond), LIMITS, MODEL)


def test_every_limit_says_what_it_bounds():
    for each in fields(Limits):
        assert each.metadata["option"]["help"].endswith(".")


NAN, INFINITY = float("nan"), float("inf")
WRONG = [
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INFINITY),
    ("top_p", 0.0),
    ("top_p", 1.0001),
    ("top_p", -1.0),
    ("top_p", NAN),
    ("top_k", -2),
    ("seed", -1),
    ("seed", 2**63),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("stop_token_ids", (256,)),
    ("stop_token_ids", (-1,)),
    ("timeout_s", 0.0),
    ("timeout_s", -1.0),
    ("timeout_s", NAN),
    ("timeout_s", INFINITY),
    ("request_id", ""),
    ("request_id", "a/b"),
    ("request_id", "a\n"),
    ("request_id", "../x"),
    ("request_id", "ü"),
    ("cache_salt", "a\0b"),
    ("cache_salt", "ü"),
    ("cache_salt", "a\n"),
    ("prompt", chat(0)),
    ("prompt", chat(role="")),
    ("prompt", TextPrompt("\ud800")),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_values_are_refused_and_named(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        check_request(replace(PLAIN, **{field: value}), LIMITS, MODEL)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    named = {"prompt": ("chat", "text")}.get(field, (field,))
    assert caught.value.field.startswith(named)


RIGHT = [
    ("temperature", 0.0),
    ("temperature", 1e-9),
    ("top_p", 1.0),
    ("top_p", 1e-9),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 10**7),
    ("seed", 0),
    ("seed", 2**63 - 1),
    ("stop_token_ids", (0, 255)),
    ("cache_salt", "a / b"),
    ("request_id", "A.z_0:-"),
]


@pytest.mark.parametrize(("field", "value"), RIGHT)
def test_extreme_values_that_mean_something_pass(field, value):
    check_request(replace(PLAIN, **{field: value}), LIMITS, MODEL)


@pytest.mark.parametrize(("length", "right"), [(0, False), (1, True), (99, True), (100, False), (1000, False)])
def test_prompts_leave_room_for_one_token(length, right):
    if right:
        check_prompt_len(length, 100)
        assert sampling_params(PLAIN, length, 100, MODEL, 0).max_tokens == 100 - length
    else:
        with pytest.raises(InvalidRequestError):
            check_prompt_len(length, 100)
        with pytest.raises(InvalidRequestError):
            sampling_params(PLAIN, length, 100, MODEL, 0)


def test_max_tokens_up_to_the_context():
    assert sampling_params(replace(PLAIN, max_tokens=97), 3, 100, MODEL, 0).max_tokens == 97
    for too_many in (98, 2**31, 2**62):
        with pytest.raises(InvalidRequestError, match="at most 97"):
            sampling_params(replace(PLAIN, max_tokens=too_many), 3, 100, MODEL, 0)


def test_token_ids_are_within_the_vocabulary():
    check_token_ids("prompt", (0, 255), 256)
    check_token_ids("prompt", (), 256)
    for wrong in ((256,), (3, -1), (2**32 - 1,)):
        with pytest.raises(InvalidRequestError, match="0 to 255"):
            check_token_ids("prompt", wrong, 256)


def test_defaults_come_from_the_model_and_requests_win():
    model = replace(MODEL, sampling_defaults=SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9))
    params = sampling_params(PLAIN, 3, 100, model, seed=42)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.6, 20, 0.9, 42)
    assert params.stop_token_ids == (2,)
    own = replace(PLAIN, temperature=0.0, top_k=0, top_p=1.0, seed=0, stop_token_ids=(7, 2), ignore_eos=True)
    params = sampling_params(own, 3, 100, model, seed=42)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 0, 1.0, 0)
    assert params.stop_token_ids == (7, 2)


def test_documented_clamps():
    params = sampling_params(replace(PLAIN, temperature=1e-9, top_k=10**7), 3, 100, MODEL, 0)
    assert (params.temperature, params.top_k) == (0.0, 0)
    assert sampling_params(replace(PLAIN, top_k=-1), 3, 100, MODEL, 0).top_k == 0
    assert sampling_params(replace(PLAIN, top_k=255), 3, 100, MODEL, 0).top_k == 255
