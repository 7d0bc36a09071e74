"""Chats are rendered by the model's template, in a process that neither hangs nor takes others along."""

from __future__ import annotations

import asyncio
import json

import pytest
from harness import running_frontend

from control_plane.chat_template import ChatRenderer, read_template
from control_plane.errors import InvalidRequestError
from control_plane.generation import ChatMessage, ChatPrompt, GenerationRequest, TokenPrompt
from control_plane.tokenizer import TokenizerError

CHATML = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# One template for all cases, chosen by the role: a process takes seconds to start.
CASES = """
{%- set role = messages[0].role -%}
{%- if role == "refused" %}{{ raise_exception("roles must alternate") }}
{%- elif role == "escape" %}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif role == "change" %}{{ messages.append("x") }}
{%- elif role == "huge" %}{% for i in range(100000) %}{{ "0123456789" * 100 }}{% endfor %}
{%- elif role == "memory" %}{{ "x" * 10000000000 }}
{%- elif role == "wrong" %}{{ 1 / 0 }}
{%- elif role == "endless" %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- else %}{{ messages[0].content }}
{%- endif %}"""


@pytest.fixture
def folder(tmp_path, byte_tokenizer):
    byte_tokenizer._tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    return tmp_path


def chat(*messages, add_generation_prompt=True):
    return ChatPrompt(tuple(ChatMessage(*message) for message in messages), add_generation_prompt)


async def test_messages_are_rendered_with_special_tokens(folder):
    renderer = ChatRenderer(folder, CHATML, timeout_s=5, max_bytes=1000)
    try:
        await renderer.start()
        text = await renderer.render(chat(("system", "be kind"), ("user", "hi 日本\n")))
        assert text == "<s><system>be kind</system><user>hi 日本\n</user><assistant>"
        assert await renderer.render(chat(("user", "a"), add_generation_prompt=False)) == "<s><user>a</user>"
    finally:
        await renderer.close()


async def test_bad_templates_and_messages_end_in_a_refusal_and_the_next_chat_works(folder, byte_tokenizer):
    renderer = ChatRenderer(folder, CASES, timeout_s=1.0, max_bytes=1000)
    async with running_frontend(renderer=renderer, tokenizer=byte_tokenizer) as (frontend, _, _):
        await renderer.start()
        refusals = {
            "refused": "roles must alternate",
            "escape": "refused|cannot render",
            "change": "refused|cannot render",
            "wrong": "ZeroDivisionError",
            "memory": "MemoryError",
            "huge": "more than 1000 bytes",
        }
        for role, message in refusals.items():
            with pytest.raises(InvalidRequestError, match=message):
                await renderer.render(chat((role, "x")))
        assert await renderer.render(chat(("user", "still here"))) == "still here"

        endless = asyncio.create_task(frontend.submit(GenerationRequest(chat(("endless", "x")))))
        await asyncio.sleep(0.1)
        await frontend.submit(GenerationRequest(TokenPrompt((20,))))
        assert not endless.done()  # meanwhile others are served
        with pytest.raises(InvalidRequestError, match="more than 1 s"):
            await endless
        assert await renderer.render(chat(("user", "back again"))) == "back again"


async def test_a_client_that_leaves_while_its_chat_is_rendered_confuses_nobody(folder):
    renderer = ChatRenderer(folder, "{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}", 5, 1000)
    try:
        await renderer.start()
        leaving = asyncio.create_task(renderer.render(chat(("user", "first"))))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await renderer.render(chat(("user", "second"))) == "second"
    finally:
        await renderer.close()


async def test_a_template_that_is_no_template_is_found_at_the_first_chat(folder):
    renderer = ChatRenderer(folder, "{% for %}", timeout_s=5, max_bytes=1000)
    try:
        with pytest.raises(InvalidRequestError, match="template"):
            await renderer.render(chat(("user", "x")))
    finally:
        await renderer.close()


def test_where_templates_are_found(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    assert read_template(tmp_path) is None
    config.write_text(json.dumps({"chat_template": "old"}))
    assert read_template(tmp_path) == "old"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert read_template(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert read_template(tmp_path) == "new"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(TokenizerError):
        read_template(tmp_path)
