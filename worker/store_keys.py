"""What a KV page's bytes depend on, as a key for the store: the model, how it is split and laid out, and the tokens.

The scheduler's digest stands for salt and tokens; a rank adds the rest. Two engines share pages exactly if all of it
is the same, in whatever process and after whatever restart. Knows nothing of what a store does with keys.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash

from autosearch.specs import ModelSpec
from kvstore.keys import KVKey, checked_key
from worker.config import AUTO_DTYPES, WorkerConfig
from worker.kv_cache import KVCacheShape
from worker.sharding import shard

LAYOUT = 1  # of a page's bytes (worker.store_pages): another layout is another number
_READ_BYTES, _READERS = 16 << 20, 8


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
    """32 bytes that tell models apart: config.json and all bytes of all weights. dummy_seed: of weights made up.

    A file's digest is kept (`_kept_digest`), so that a large model is read whole for it once only.
    """
    found = hashlib.sha256((folder / "config.json").read_bytes())
    found.update(f"dummy {dummy_seed}".encode())
    if dummy_seed is None:
        paths = sorted(folder.glob("*.safetensors"))
        with ThreadPoolExecutor(_READERS) as readers:
            for path, digest in zip(paths, readers.map(_kept_digest, paths)):
                found.update(path.name.encode() + digest)
    return found.digest()


def _kept_digest(path: Path) -> bytes:
    """Of a file's bytes; kept in the user's cache folder for this very file, size and time of change.

    Not the time of modification, which tools that copy files set back.
    """
    facts = path.stat()
    place = f"{path.resolve()} {facts.st_ino} {facts.st_size} {facts.st_ctime_ns}"
    kept = _cache_folder() / hashlib.sha256(place.encode()).hexdigest()
    with suppress(OSError):
        digest = kept.read_bytes()
        if len(digest) == 16:
            return digest
    digest = _digest(path)
    with suppress(OSError):  # a machine without a home computes it each time
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_bytes(digest)
        part.replace(kept)
    return digest


def _digest(path: Path) -> bytes:
    """XXH3 of 128 bits: as fast as memory, and models are not chosen to collide."""
    found, buffer = xxhash.xxh3_128(), bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(memoryview(buffer)[:count])
    return found.digest()


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root or os.path.expanduser("~/.cache")) / "nanoflow" / "fingerprints"
