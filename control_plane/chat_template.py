"""Renders chats with the model's template, in a process of its own that is killed when it takes too long.

A template is a program that came with the model and that a user's messages drive; in this process it could block
every other request. Knows nothing of tokens. `chat_template_worker` is the other end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from control_plane.errors import ApiError, ErrorKind, InvalidRequestError
from control_plane.generation import ChatPrompt
from control_plane.tokenizer import TokenizerError, read_config, special_token

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # a cold import on a slow disk
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_template(folder: str | Path) -> str | None:
    """The chat template of a model folder: chat_template.jinja, or the key in tokenizer_config.json.

    None when it has none. Raises TokenizerError.
    """
    path = Path(folder) / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_config(folder).get("chat_template")
    if isinstance(template, list):  # an older form: several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{folder}/tokenizer_config.json: chat_template must be text")
    return template


class ChatRenderer:
    """Renders one chat at a time."""

    def __init__(self, folder: str | Path, template: str, timeout_s: float, max_bytes: int) -> None:
        """max_bytes bounds the rendered text in UTF-8."""
        config = read_config(folder)
        tokens = {key: special_token(config, key) for key in SPECIAL_TOKENS}
        self._setup = {
            "tokenizer_file": str(Path(folder).resolve() / "tokenizer.json"),
            "chat_template": template,
            "special_tokens": {key: token for key, token in tokens.items() if token is not None},
            "timeout_s": timeout_s,
            "max_bytes": max_bytes,
        }
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._turns: set[asyncio.Task[dict[str, Any]]] = set()  # keeps them from being collected

    async def start(self) -> None:
        """Start the process, so that the first chat need not wait for it. Raises TokenizerError."""
        async with self._turn:
            await self._start()

    async def render(self, prompt: ChatPrompt) -> str:
        """The text to tokenize. Raises InvalidRequestError when the template refuses the messages or is too slow."""
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        question = {"messages": messages, "add_generation_prompt": prompt.add_generation_prompt}
        # A client that goes away must not leave its answer in the pipe for the next one.
        turn = asyncio.create_task(self._take_turn(question))
        self._turns.add(turn)
        turn.add_done_callback(self._turns.discard)
        answer = await asyncio.shield(turn)
        if "refusal" in answer:
            raise InvalidRequestError("chat", str(answer["refusal"]))
        return str(answer["text"])

    async def _take_turn(self, question: dict[str, Any]) -> dict[str, Any]:
        async with self._turn:
            try:
                if self._process is None:
                    await self._start()
                return await self._ask(question, self._timeout_s)
            except TimeoutError:
                await self._kill()
                return {"refusal": f"the model's template needed more than {self._timeout_s:g} s for these messages"}
            except (EOFError, OSError, TokenizerError) as error:
                log.warning("the chat template's process ended: %s", type(error).__name__)
                await self._kill()
                raise ApiError(ErrorKind.INTERNAL, "the model's chat template failed") from None

    async def close(self) -> None:
        """End the process. Idempotent."""
        async with self._turn:
            await self._kill()

    async def _start(self) -> None:
        command = (sys.executable, "-m", "control_plane.chat_template_worker")
        pipe = asyncio.subprocess.PIPE
        # In a session of its own, or a terminal's Ctrl-C would end it in the middle of the server's drain.
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        try:
            await self._ask(self._setup, START_TIMEOUT_S)
        except (TimeoutError, EOFError, OSError):
            await self._kill()
            raise TokenizerError("the chat template cannot be used; the reason is in the log above") from None
        except BaseException:
            await self._kill()
            raise

    async def _ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One frame there, one back: four bytes of length, then JSON."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        frame = json.dumps(question).encode()
        async with asyncio.timeout(timeout_s):
            self._process.stdin.write(len(frame).to_bytes(4, "big") + frame)
            await self._process.stdin.drain()
            size = int.from_bytes(await self._process.stdout.readexactly(4), "big")
            answer: dict[str, Any] = json.loads(await self._process.stdout.readexactly(size))
        return answer

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
