"""Tiny random models, and a small planner that drives a worker without the scheduler."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from scheduler.plan import IterationPlan, SlotStart

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside the tests, which they import

torch.set_num_threads(1)

REPOSITORY = Path(__file__).parents[2]
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}


def save_random_model(folder, family="llama", seed=0, shard_size="5GB", **changes):
    """A random model of transformers' own, saved as safetensors; wide weights, so that no two tokens nearly tie."""
    config_class, model_class = FAMILIES[family]
    shapes = {
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 101,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    if family == "mixtral":
        shapes["num_local_experts"] = 4
    torch.manual_seed(seed)
    model = model_class(config_class(**{**shapes, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(std=0.5)
            else:
                # Experts are one tensor and all differ; their fan-in is the last dimension.
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """random_model(family, **config changes) -> a model folder; the same one for the same arguments."""
    made = {}

    def make(family="llama", **changes):
        key = (family, repr(sorted(changes.items())))
        if key not in made:
            made[key] = save_random_model(tmp_path_factory.mktemp(family), family, **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference():
    """reference(folder) -> transformers' model of the folder in fp32; reference(folder)(token_ids) are its logits."""
    loaded = {}

    def load(folder):
        if folder not in loaded:
            loaded[folder] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        model = loaded[folder]

        def logits(token_ids):
            with torch.inference_mode():
                return model(torch.tensor([token_ids])).logits[0]

        return logits

    return load


@pytest.fixture(scope="session")
def stories_model():
    """A trained LLaMA of 260 k parameters."""
    shared = Path(os.environ.get("NANOFLOW_SHARED", REPOSITORY.parent / "shared"))
    folder = shared / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; NANOFLOW_SHARED names the folder with models/stories260K")
    return folder


@pytest.fixture(scope="session")
def smollm2_model():
    """The embedded default model, converted."""
    default = REPOSITORY / ".cache" / "models" / "SmolLM2-135M-Instruct"
    folder = Path(os.environ.get("NANOFLOW_SMOLLM2", default))
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} is not there; `make test` converts it, NANOFLOW_SMOLLM2 names another place")
    return folder


@dataclass
class Ask:
    """A request as the test planner sees it."""

    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    output: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose KV is there
    slot: int = -1

    @property
    def known(self):
        return len(self.prompt) + len(self.output)


def int32(values):
    return np.array(list(values), np.int32)


class Planner:
    """Runs requests together: decodes first, then prefill chunks that fill the batch. Pages in random order."""

    def __init__(self, worker, seed=0):
        self.worker = worker
        self.step = 0
        self.pages = np.random.default_rng(seed).permutation(worker.capacity.num_pages).tolist()
        self.page_table = {}
        self.faults = {}

    def run(self, asks, batch_tokens=None, max_chunk=10**9, cached=0, slots=None):
        """Fill each ask's output; returns the outputs. `cached`: leading prompt tokens that lie in shared pages."""
        budget = batch_tokens or self.worker.capacity.max_batch_tokens
        for number, ask in enumerate(asks):
            ask.slot, ask.computed = (slots or range(len(asks)))[number], cached
        started = []
        while any(len(ask.output) < ask.max_tokens for ask in asks):
            self._step(asks, started, budget, max_chunk, cached)
        return [ask.output for ask in asks]

    def _step(self, asks, started, budget, max_chunk, cached):
        running = [ask for ask in asks if len(ask.output) < ask.max_tokens]
        rows = [(ask, 1) for ask in running if ask.output][:budget]
        num_decodes, room = len(rows), budget - len(rows)
        for ask in running:
            count = min(room, max_chunk, len(ask.prompt) - ask.computed)
            if not ask.output and count > 0:
                rows.append((ask, count))
                room -= count
        new = [ask for ask, _ in rows if ask not in started]
        started.extend(new)
        changes = [change for ask in new for change in self._pages_for(ask, cached)]
        plan = IterationPlan(
            step=self.step,
            bucket=next(b.id for b in self.worker.capacity.buckets if b.batch_tokens >= budget - room),
            slot_starts=tuple(
                SlotStart(a.slot, str(a.slot), int32(a.prompt), cached, a.temperature, a.top_k, a.top_p, a.seed)
                for a in new
            ),
            page_slots=int32(change[0] for change in changes),
            page_indexes=int32(change[1] for change in changes),
            page_ids=int32(change[2] for change in changes),
            slots=int32(ask.slot for ask, _ in rows),
            starts=int32(ask.computed for ask, _ in rows),
            counts=int32(count for _, count in rows),
            num_decodes=num_decodes,
            samples=np.array([ask.computed + count == ask.known for ask, count in rows]),
        )
        result = self.worker.execute(plan)
        assert result.step == self.step
        self.step += 1
        self.faults.update({fault.slot: fault.message for fault in result.faults})
        sampled = iter(result.sampled.tolist())
        for ask, count in rows:
            ask.computed += count
            if ask.computed == ask.known:
                ask.output.append(next(sampled))

    def _pages_for(self, ask, cached):
        size = self.worker.capacity.page_size
        shared = cached // size
        table = [
            self.page_table[0][index] if index < shared else self.pages.pop()
            for index in range(-(-(len(ask.prompt) + ask.max_tokens) // size))
        ]
        self.page_table[ask.slot] = table
        return [(ask.slot, index, page) for index, page in enumerate(table)]


@pytest.fixture(scope="session")
def planner():
    """The class, for tests to drive a loaded worker with."""
    return Planner


@pytest.fixture(scope="session")
def ask():
    """The class of the planner's requests."""
    return Ask


@pytest.fixture
def store(tmp_path):
    """A KV store of 16 MiB that is running."""
    from kv_store_process import StoreProcess

    process = StoreProcess(tmp_path)
    yield process
    process.stop()
