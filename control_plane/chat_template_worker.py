"""The process that renders chats: `python -m control_plane.chat_template_worker`, started by `chat_template`.

Frames of four bytes of length and JSON on stdin and stdout. Templates run in the sandbox of transformers, with
bounds on memory and time. Ends when stdin does.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any, BinaryIO

MEMORY_BYTES = 2 * 2**30  # address space, the interpreter's own included


def main() -> None:
    """Serve frames until stdin ends."""
    frames_in, frames_out = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a library prints must not get between the frames
    setup = _read(frames_in)
    if setup is None:
        return
    from jinja2.exceptions import TemplateError
    from transformers import PreTrainedTokenizerFast

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=setup["tokenizer_file"], chat_template=setup["chat_template"], **setup["special_tokens"]
    )
    _write(frames_out, {})
    while (question := _read(frames_in)) is not None:
        # Kills this process even when the parent no longer can.
        signal.setitimer(signal.ITIMER_REAL, setup["timeout_s"] + 1)
        try:
            text = tokenizer.apply_chat_template(
                question["messages"], tokenize=False, add_generation_prompt=question["add_generation_prompt"]
            )
            if len(text.encode()) > setup["max_bytes"]:
                answer = {"refusal": f"rendered, the chat has more than {setup['max_bytes']} bytes"}
            else:
                answer = {"text": text}
        except TemplateError as error:  # also what templates raise on purpose, for example on a wrong role
            answer = {"refusal": f"the model's template refused it: {str(error)[:200]}"}
        except Exception as error:
            answer = {"refusal": f"the model's template cannot render it ({type(error).__name__})"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(frames_out, answer)


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    header = stream.read(4)
    if len(header) < 4:
        return None
    frame: dict[str, Any] = json.loads(stream.read(int.from_bytes(header, "big")))
    return frame


def _write(stream: BinaryIO, answer: dict[str, str]) -> None:
    frame = json.dumps(answer).encode()
    stream.write(len(frame).to_bytes(4, "big") + frame)
    stream.flush()


if __name__ == "__main__":
    main()
