"""Encoding with special tokens, and incremental decoding, against whole decoding."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, processors

from control_plane.tokenizer import MAX_HELD_TOKENS, Tokenizer, TokenizerError

TEXT = "Once upon a time — naïve 日本語 🎉👩‍👩‍👧 tabs\tand\nlines ﷽ done."


def llama_like(**config) -> Tokenizer:
    """Bytes as fallback, spaces as ▁, a leading one stripped: as LLaMA-2's. <0xNN> has id 3 + NN."""
    words = ["▁", "▁a", "a", "b", "▁the", "t", "h", "e"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + index for index, word in enumerate(words)}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(raw, {"bos_token": "<s>", **config})


def stream(tokenizer: Tokenizer, prompt, output) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push(token) for token in output), detokenizer.finish()]


@pytest.mark.parametrize("kind", ["bytes", "llama"])
@given(prompt=st.text(max_size=20), output=st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_pieces_of_text_make_the_whole(byte_tokenizer, kind, prompt, output):
    tokenizer = byte_tokenizer if kind == "bytes" else llama_like()
    before = tokenizer.encode(prompt + "b")
    ids = tokenizer.encode(prompt + "b" + output)[len(before) :]
    pieces = stream(tokenizer, before, ids)
    assert "".join(pieces) == tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]


@pytest.mark.parametrize("kind", ["bytes", "llama"])
def test_no_character_is_sent_in_parts(byte_tokenizer, kind):
    tokenizer = byte_tokenizer if kind == "bytes" else llama_like()
    pieces = stream(tokenizer, tokenizer.encode("b"), tokenizer.encode("b" + TEXT)[len(tokenizer.encode("b")) :])
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["bytes", "llama"])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_tokens_give_valid_text_in_time(byte_tokenizer, kind, data):
    """Also bytes that are no text: nothing raises, nothing is held for long, and good text after them is intact."""
    tokenizer = byte_tokenizer if kind == "bytes" else llama_like()
    size = 256 if kind == "bytes" else 267
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=60))
    detokenizer = tokenizer.detokenizer([5])
    held = 0
    for token in ids:
        piece = detokenizer.push(token)
        piece.encode()  # raises on a lone surrogate
        held = 0 if piece else held + 1
        assert len(detokenizer._held) < MAX_HELD_TOKENS
    detokenizer.finish()
    letters = [ord("t"), ord("h")] if kind == "bytes" else [3 + 256 + 5, 3 + 256 + 6]
    assert "".join(detokenizer.push(token) for token in letters).endswith("th")


def test_an_incomplete_character_comes_out_when_the_output_ends(byte_tokenizer):
    ids = list("é".encode()[:1])
    assert stream(byte_tokenizer, [65], ids) == ["", "\ufffd"]


def test_leading_spaces_of_output_are_kept():
    tokenizer = llama_like()
    the = 3 + 256 + 4
    assert stream(tokenizer, tokenizer.encode("b"), [the, the]) == [" the", " the", ""]


def test_special_tokens_have_no_text():
    tokenizer = llama_like()
    pieces = stream(tokenizer, tokenizer.encode("b"), [1, 3 + ord("x"), 2, 2])
    assert "".join(pieces) == "x"


@pytest.mark.parametrize(("add_bos_token", "expected"), [(None, False), (False, False), (True, True)])
def test_bos_is_added_as_the_config_says(add_bos_token, expected):
    config = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    tokenizer = llama_like(**config)
    assert (tokenizer.encode("a")[0] == 1) is expected
    assert (tokenizer.encode("")[:1] == [1]) is expected
    assert tokenizer.encode_rendered("<s>a").count(1) == 1

    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert tokenizer.encode("a").count(1) == (0 if add_bos_token is False else 1)


def test_broken_and_missing_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_like_transformers_on_a_trained_model(stories_folder):
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer.from_folder(stories_folder)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(stories_folder / "tokenizer.json"))
    for text in ("", " ", "Once upon a time", TEXT):
        assert tokenizer.encode(text) == reference(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(reference(text)["input_ids"], True)
    story = tokenizer.encode("Once upon a time, there was a little girl.")
    pieces = stream(tokenizer, story[:4], story[4:])
    assert "".join(pieces) == tokenizer.decode(story)[len(tokenizer.decode(story[:4])) :]
    noise = [random.Random(1).randrange(512) for _ in range(2000)]
    "".join(stream(tokenizer, story, noise)).encode()


@pytest.mark.parametrize("method", ["encode", "encode_rendered"])
async def test_a_long_text_does_not_stop_other_threads(byte_tokenizer, method):
    encoding = asyncio.create_task(asyncio.to_thread(getattr(byte_tokenizer, method), "ab" * 2**20))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert len(await encoding) == 2**21
    assert num_turns > 20
