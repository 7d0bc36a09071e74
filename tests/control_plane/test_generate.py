"""`nanoflow generate` as a user runs it, and what --help calls the values of every command of its own."""

import json
import re
import subprocess
import sys

import pytest
from transformers import LlamaConfig

COMMAND = [sys.executable, "-m", "control_plane.entry_point"]
CONFIG = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG |= {"vocab_size": 64, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(architectures=["LlamaForCausalLM"], **CONFIG).save_pretrained(path)
    return path


def run(*args):
    ended = subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=100)
    assert "Traceback" not in ended.stderr
    return ended


def test_an_answer_comes_without_a_servers_messages(folder):
    flags = ["--token-ids", "1,2,3", "--max-tokens", "4", "--ignore-eos", "--json", "--load-format", "dummy"]
    ended = run("generate", folder, *flags)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["completion_tokens"] == 4
    assert "attached" not in ended.stderr
    assert "draining" not in ended.stderr


def test_text_for_a_folder_without_tokenizer_is_told_the_flag(folder):
    ended = run("generate", folder, "--prompt", "x", "--load-format", "dummy")
    assert ended.returncode == 2
    assert re.search(r"no tokenizer\.json: give --token-ids", " ".join(ended.stderr.split()))


@pytest.mark.parametrize("flag", ["num-gpu-blocks-override", "max-num-batched-tokens", "max-num-seqs", "num-threads"])
def test_sizes_beyond_all_reason_are_one_line_that_names_the_flag(folder, flag):
    flags = ["--token-ids", "1", "--load-format", "dummy", f"--{flag}", str(10**13)]
    ended = run("generate", folder, *flags)
    assert ended.returncode == 2
    assert f"--{flag}" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "command",
    ["serve", "generate", "convert-gguf", "doctor", "bench throughput", "bench planning", "bench cpu-reference"],
)
def test_help_names_values_by_what_they_are(command):
    text = run(*command.split(), "--help").stdout
    usage, _, options = text.partition("Options:")
    assert not re.search(r"[{\[][a-z]", usage.replace("[required]", ""))
    assert not re.search(r"^ +--\S+ +<", options, re.MULTILINE)
