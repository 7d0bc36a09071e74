"""`make demo`: start a server as a user would, ask it one question by gRPC, stream the answer, shut down.

Everything goes through the public ways in: the `nanoflow serve` command, its ready line, the gRPC API and
SIGTERM. Knows nothing of the inside.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc

from control_plane.pb import generation_pb2, generation_pb2_grpc

PROMPT = "In two sentences: why does a GPU answer many people at once faster than one after the other?"
READY = re.compile(r"^ready: gRPC (?P<grpc>\S+), metrics (?P<metrics>\S+)$")


def start_server(model: Path, *flags: str) -> tuple[subprocess.Popen[str], str, str]:
    """`nanoflow serve` on free ports; the process, its gRPC address and its metrics URL, once it is ready.

    Raises RuntimeError when it ends before that; what it says goes to our stderr as it comes.
    """
    command = [sys.executable, "-m", "control_plane.main", "serve", str(model), "--port", "0", "--metrics-port", "0"]
    # In a process group of its own: Ctrl-C ends it by our SIGTERM, once.
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None
    for line in process.stdout:
        if ready := READY.match(line.strip()):
            return process, ready["grpc"], ready["metrics"]
        print(line, end="", file=sys.stderr)
    raise RuntimeError(f"the server ended with exit code {process.wait()} before it was ready; see above")


def ask(address: str, prompt: str, max_tokens: int) -> generation_pb2.Final:
    """Stream one chat answer to the terminal."""
    request = generation_pb2.GenerateRequest(
        chat=generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content=prompt)]),
        sampling=generation_pb2.SamplingParams(temperature=0),
        stopping=generation_pb2.StoppingParams(max_tokens=max_tokens),
    )
    final: generation_pb2.Final | None = None
    with grpc.insecure_channel(address) as channel:
        for response in generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=120):
            if response.HasField("delta"):
                print(response.delta.text, end="", flush=True)
            else:
                final = response.final
    print()
    if final is None:
        raise RuntimeError("the stream ended without a final message")
    return final


def main() -> None:
    """Run the demo; exit code 0 when everything worked, the server's end included."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()

    print(f"== Starting a server for {args.model.name}: Ray, one instance, gRPC")
    began = time.monotonic()
    process, address, metrics = start_server(args.model)
    try:
        print(f"== Ready after {time.monotonic() - began:.1f} s: gRPC on {address}, metrics on {metrics}")
        print(f"\n> {PROMPT}\n")
        final = ask(address, PROMPT, args.max_tokens)
        rate = final.completion_tokens / max(final.total_s, 1e-9)
        print(
            f"\n== {final.prompt_tokens} prompt and {final.completion_tokens} output tokens in {final.total_s:.1f} s: "
            f"first token after {final.ttft_s:.2f} s, {rate:.1f} tokens/s"
        )
        print(f"== Metrics were on {metrics} for Prometheus; start a server that stays with")
        print(f"   .venv/bin/nanoflow serve {args.model}")
    finally:
        print("== Shutting down")
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    if code != 0:
        sys.exit(f"the server ended with exit code {code}")


if __name__ == "__main__":
    main()
