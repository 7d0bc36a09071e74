"""Fixtures of the control plane's tests: small tokenizers and a trained model's folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from control_plane.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # for harness and fake_instance, which tests import


@pytest.fixture(scope="session")
def stories_folder() -> Path:
    """A trained model's folder, from NANOFLOW_SHARED or the folder `shared` beside the repository's."""
    shared = Path(os.environ.get("NANOFLOW_SHARED", Path(__file__).resolve().parents[3] / "shared"))
    folder = shared / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Token i is byte i: any output that splits a character tests incremental decoding."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that this alphabet writes as themselves
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}
    raw = RawTokenizer(models.BPE(vocab=letters, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return Tokenizer(raw, {})
