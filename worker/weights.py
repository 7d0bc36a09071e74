"""Reads a model's parameters: from safetensors files, or dummy ones from the shapes alone.

A model declares each of its parameters as parts of tensors in the checkpoint; this module checks that all of them
are there and puts the parts together. Knows nothing of any architecture. Never unpickles and never runs code
from a model folder.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, in [0, 1]."""

DUMMY_SCALE = 1e-3  # dummy weights are uniform in +-DUMMY_SCALE
MOST_MAPPED_BYTES = 64 * 2**20  # or a model would be in memory twice while it loads
# Buffers that old checkpoints carry and that are recomputed from config.json.
_RECOMPUTED = ("rotary_emb.inv_freq", ".attention.bias", ".masked_bias")


class ModelLoadError(ValueError):
    """A model folder that cannot be served; the message says what is wrong and how to mend it."""


class MissingTensorsError(ModelLoadError):
    """The checkpoint lacks tensors that the model needs."""

    def __init__(self, folder: str | Path, names: Iterable[str], hint: str = "") -> None:
        self.names = tuple(sorted(names))
        self._arguments = (folder, self.names, hint)
        super().__init__(f"{folder} lacks {len(self.names)} tensor(s): {', '.join(self.names)}{hint}")

    def __reduce__(self) -> tuple[type[MissingTensorsError], tuple[str | Path, tuple[str, ...], str]]:
        # Exceptions are pickled as their message, which is not what __init__ takes; actors send them home.
        return type(self), self._arguments


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Slices of one checkpoint tensor along one of its dimensions."""

    name: str  # as in the checkpoint
    shape: tuple[int, ...]  # of the whole tensor
    dim: int = 0  # the dimension that is cut
    ranges: tuple[tuple[int, int], ...] | None = None  # [start, stop) slices of dim, joined in this order; None: all
    length: int | None = None  # of dim afterwards: zeros are added behind; None: as many as the ranges hold

    @property
    def num_taken(self) -> int:
        """Entries of dim that come from the checkpoint."""
        return self.shape[self.dim] if self.ranges is None else sum(stop - start for start, stop in self.ranges)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape after cutting and padding."""
        length = self.num_taken if self.length is None else self.length
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])


Parameter = tuple[TensorPart, ...]
"""A parameter of the model: its parts, joined along dimension 0."""


class TensorSource(Protocol):
    """Where tensors come from, by their name in the checkpoint."""

    def check(self, parts: Iterable[TensorPart]) -> None:
        """Raise ModelLoadError unless all parts can be read."""

    def read(self, part: TensorPart, start: int, stop: int) -> torch.Tensor:
        """Entries [start, stop) of the part's dimension."""


class SafetensorsSource:
    """The safetensors files of a Hugging Face folder: model.safetensors, or the shards that an index names."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file_of = _tensor_files(self.folder)
        self._open: dict[Path, Any] = {}
        self._mapped_bytes = 0  # read from the open files: the pages of them that count as our memory

    @property
    def names(self) -> frozenset[str]:
        """All tensors there are."""
        return frozenset(self._file_of)

    def check(self, parts: Iterable[TensorPart]) -> None:
        wanted = {part.name: part for part in parts}
        missing = wanted.keys() - self._file_of.keys()
        if missing:
            raise MissingTensorsError(self.folder, missing)
        for part in wanted.values():
            shape = tuple(self._slice(part.name).get_shape())
            if shape != part.shape:
                raise ModelLoadError(
                    f"{self.folder}: {part.name} has shape {list(shape)}, config.json makes it {list(part.shape)}"
                )

    def unused(self, parts: Iterable[TensorPart]) -> tuple[str, ...]:
        """Tensors that none of the parts reads, and that are not just recomputed."""
        names = self.names - {part.name for part in parts}
        return tuple(sorted(name for name in names if not name.endswith(_RECOMPUTED)))

    def read(self, part: TensorPart, start: int, stop: int) -> torch.Tensor:
        if self._mapped_bytes > MOST_MAPPED_BYTES:
            self._open.clear()
            self._mapped_bytes = 0
        index = (*[slice(None)] * part.dim, slice(start, stop))
        tensor: torch.Tensor = self._slice(part.name)[index]
        self._mapped_bytes += tensor.nbytes
        return tensor

    def _slice(self, name: str) -> Any:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_slice(name)


class DummySource:
    """Uniform random tensors of the right shapes; the same for the same seed, however the model is cut."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._last: tuple[str, torch.Tensor] | None = None  # parts of one tensor are read one after the other

    def check(self, parts: Iterable[TensorPart]) -> None:
        """Any tensor can be made."""

    def read(self, part: TensorPart, start: int, stop: int) -> torch.Tensor:
        if self._last is None or self._last[0] != part.name:
            # The generator reads 32 bits of its seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {part.name}".encode()))
            values = torch.empty(part.shape).uniform_(-DUMMY_SCALE, DUMMY_SCALE, generator=generator)
            self._last = (part.name, values)
        return self._last[1].narrow(part.dim, start, stop - start)


def load_parameters(
    parameters: Mapping[str, Parameter],
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda what, share: None,
) -> dict[str, torch.Tensor]:
    """All parameters as tensors of `dtype` on `device`. Raises ModelLoadError before anything is read."""
    source.check(part for parts in parameters.values() for part in parts)
    loaded = {}
    for number, (name, parts) in enumerate(parameters.items()):
        loaded[name] = _assemble(parts, source, dtype, device)
        progress("loading weights", (number + 1) / len(parameters))
    return loaded


def _assemble(parts: Parameter, source: TensorSource, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    shapes = [part.part_shape for part in parts]
    tensor = torch.zeros((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=device)
    row = 0
    for part, shape in zip(parts, shapes):
        target = tensor[row : row + shape[0]]
        position = 0
        for start, stop in part.ranges if part.ranges is not None else ((0, part.shape[part.dim]),):
            target.narrow(part.dim, position, stop - start).copy_(source.read(part, start, stop))
            position += stop - start
        row += shape[0]
    return tensor


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The file behind each tensor name. Raises ModelLoadError where files are missing or of another kind."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict.fromkeys(_names_in(single), single)
    if index.is_file():
        return _shard_files(folder, index)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelLoadError(
            f"{folder} has its weights as pickled files only: those can run code and are never read. "
            "Save them as safetensors (in transformers: model.save_pretrained(folder))"
        )
    raise ModelLoadError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def _shard_files(folder: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): folder / Path(str(file)).name for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not a safetensors index: {error!r}") from None
    absent = sorted({path for path in files.values() if not path.is_file()})
    if absent:
        lost = [name for name, path in files.items() if path in absent]
        raise MissingTensorsError(folder, lost, f" (the shards {', '.join(p.name for p in absent)} are not there)")
    present = {path: _names_in(path) for path in sorted(set(files.values()))}
    return {name: path for name, path in files.items() if name in present[path]}


def _names_in(path: Path) -> frozenset[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return frozenset(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{path} cannot be read as safetensors: {error}") from None
