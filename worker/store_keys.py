"""What a KV page's bytes depend on, as a key for the store: the model, how it is split and laid out, and the tokens.

The scheduler's digest stands for salt and tokens; a rank adds the rest. Two engines share pages exactly if all of it
is the same, in whatever process and after whatever restart. Knows nothing of what a store does with keys.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autosearch.specs import ModelSpec
from kvstore.keys import KVKey, checked_key
from worker.config import AUTO_DTYPES, WorkerConfig
from worker.kv_cache import KVCacheShape
from worker.sharding import shard

LAYOUT = 1  # of a page's bytes (worker.store_pages): another layout is another number
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class PageIdentity:
    """Everything that a page's bytes depend on beside the tokens before and in it."""

    model: bytes  # fingerprint()
    dtype: str
    shape: KVCacheShape  # num_pages does not count
    rank: int
    num_ranks: int

    def key(self, digest: bytes) -> KVKey:
        """Of a page with this digest of the scheduler's chain."""
        return checked_key(self.prefix + digest)

    @cached_property
    def prefix(self) -> bytes:
        """16 bytes that stand for all of it."""
        shape = self.shape
        layout = [LAYOUT, shape.num_layers, shape.num_kv_heads, shape.page_size, shape.head_dim]
        facts = [self.model.hex(), self.dtype, layout, self.rank, self.num_ranks]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).digest()


def page_identities(config: WorkerConfig) -> list[PageIdentity]:
    """What the KV pages of each rank are. Raises UnsupportedModelError or ShardingError."""
    spec = ModelSpec.from_folder(config.model_dir)
    model = fingerprint(config.model_dir, config.seed if config.load_format == "dummy" else None)
    dtype = AUTO_DTYPES[config.device] if config.dtype == "auto" else config.dtype
    num_ranks = config.tensor_parallel_size
    heads = [shard(spec, num_ranks, rank).num_kv_heads for rank in range(num_ranks)]
    shapes = [KVCacheShape(spec.num_layers, 1, num, config.page_size, spec.head_dim) for num in heads]
    return [PageIdentity(model, dtype, shape, rank, num_ranks) for rank, shape in enumerate(shapes)]


def fingerprint(folder: Path, dummy_seed: int | None = None) -> bytes:
    """32 bytes that tell models apart: config.json, and every tensor's name, place and first, middle and last bytes.

    So fine-tunes of one model differ, and a large one is not read whole. dummy_seed: of weights that are made up.
    """
    found = hashlib.sha256((folder / "config.json").read_bytes())
    found.update(f"dummy {dummy_seed}".encode())
    if dummy_seed is None:
        for path in sorted(folder.glob("*.safetensors")):
            _add_file(found, path)
    return found.digest()


def _add_file(found: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        raw = file.read(int.from_bytes(file.read(8), "little"))
        found.update(path.name.encode() + raw)
        for name, facts in sorted(json.loads(raw).items()):
            if name == "__metadata__":
                continue
            begin, end = (8 + len(raw) + offset for offset in facts["data_offsets"])
            for place in (begin, (begin + end) // 2, end - _SAMPLE_BYTES):
                place = min(max(place, begin), end)
                file.seek(place)
                found.update(file.read(min(_SAMPLE_BYTES, end - place)))
