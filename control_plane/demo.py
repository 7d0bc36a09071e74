"""`make demo`: start a server as a user would, ask it one question by gRPC, stream the answer, shut down.

Everything goes through the public ways in: the `nanoflow serve` command, its ready line, the gRPC API and
SIGTERM. Ctrl-C or SIGTERM at any moment ends the server too. Knows nothing of the inside.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from control_plane.interrupts import held_back

if TYPE_CHECKING:
    from control_plane.pb import generation_pb2

PROMPT = "In two sentences: why does a GPU answer many people at once faster than one after the other?"
READY = re.compile(r"^ready: gRPC (?P<grpc>\S+), metrics (?P<metrics>\S+)$")
FLAGS = ("--kv-cache-memory-bytes", str(256 * 2**20))  # thousands of tokens, in a server that fits small machines
END_TIMEOUT_S = 45.0  # for a whole drain
HURRIED_END_TIMEOUT_S = 2.0


class DemoError(RuntimeError):
    """The demo did not work; the message says what went wrong."""


def start_server(model: Path, *flags: str) -> tuple[subprocess.Popen[str], str, str]:
    """`nanoflow serve` on free ports; the process, its gRPC address and its metrics URL, once it is ready.

    Raises DemoError when it ends before that; what it says goes to our stderr as it comes.
    """
    command = [sys.executable, "-m", "control_plane.main", "serve", str(model), "--port", "0", "--metrics-port", "0"]
    process: subprocess.Popen[str] | None = None
    try:
        with held_back():  # or a signal now would leave a process that nobody knows
            # In a process group of its own: Ctrl-C ends it by our SIGTERM, once.
            process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, process_group=0)
        assert process.stdout is not None
        for line in process.stdout:
            if ready := READY.match(line.strip()):
                return process, ready["grpc"], ready["metrics"]
            print(line, end="", file=sys.stderr)
        raise DemoError(f"the server ended with exit code {process.wait()} before it was ready; see above")
    except BaseException:
        if process is not None:
            end_server(process, HURRIED_END_TIMEOUT_S)
        raise


def end_server(process: subprocess.Popen[str], timeout_s: float) -> int:
    """SIGTERM, and after timeout_s SIGKILL, which takes the server's Ray along too; its exit code."""
    process.terminate()
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def ask(address: str, prompt: str, max_tokens: int) -> generation_pb2.Final:
    """Stream one chat answer to the terminal. Raises DemoError."""
    import grpc  # slow to import, and a signal meanwhile must be caught

    from control_plane.pb import generation_pb2, generation_pb2_grpc

    request = generation_pb2.GenerateRequest(
        chat=generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content=prompt)]),
        sampling=generation_pb2.SamplingParams(temperature=0),
        stopping=generation_pb2.StoppingParams(max_tokens=max_tokens),
    )
    final: generation_pb2.Final | None = None
    try:
        with grpc.insecure_channel(address) as channel:
            for response in generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=120):
                if response.HasField("delta"):
                    print(response.delta.text, end="", flush=True)
                else:
                    final = response.final
    except grpc.RpcError as error:
        raise DemoError(f"the answer failed: {error.code().name}: {error.details()}") from None
    print()
    if final is None:
        raise DemoError("the stream ended without a final message")
    return final


def run(model: Path, max_tokens: int) -> None:
    """The demo itself. Raises DemoError; a signal's SystemExit passes through once the server is down."""
    print(f"== Starting a server for {model.name}: Ray, one instance, gRPC")
    began = time.monotonic()
    process, address, metrics = start_server(model, *FLAGS)
    timeout_s = HURRIED_END_TIMEOUT_S
    try:
        print(f"== Ready after {time.monotonic() - began:.1f} s: gRPC on {address}, metrics on {metrics}")
        print(f"\n> {PROMPT}\n")
        final = ask(address, PROMPT, max_tokens)
        rate = final.completion_tokens / max(final.total_s, 1e-9)
        print(
            f"\n== {final.prompt_tokens} prompt and {final.completion_tokens} output tokens in {final.total_s:.1f} s: "
            f"first token after {final.ttft_s:.2f} s, {rate:.1f} tokens/s"
        )
        print(f"== Metrics were on {metrics} for Prometheus; start a server that stays with")
        print(f"   .venv/bin/nanoflow serve {model}")
        timeout_s = END_TIMEOUT_S
    finally:
        print("== Shutting down")
        code = end_server(process, timeout_s)
    if code != 0:
        raise DemoError(f"the server ended with exit code {code}")


def main() -> None:
    """Run the demo; exit code 0 when everything worked, the server's end included, 130 or 143 after a signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    try:
        run(args.model, args.max_tokens)
    except DemoError as error:
        sys.exit(f"demo: {error}")


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # on the way out already, which takes seconds at most
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
