"""Loads one rank's weights of a model, and settles whether its embedding serves as lm_head too."""

from __future__ import annotations

import logging

import torch

from autosearch.specs import ModelSpec
from worker.models.parameters import EMBEDDING_TENSOR, LM_HEAD_TENSOR, model_parameters
from worker.sharding import Shard
from worker.weights import Progress, SafetensorsSource, TensorPart, TensorSource, load_parameters

log = logging.getLogger(__name__)


def load_weights(
    spec: ModelSpec,
    shard: Shard,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda what, share: None,
) -> dict[str, torch.Tensor]:
    """Parameters by the names of worker.models.parameters. Raises ModelLoadError."""
    tied = spec.tie_embeddings
    redundant_head = False
    if tied and isinstance(source, SafetensorsSource) and LM_HEAD_TENSOR in source.names:
        redundant_head = tied = _head_is_embedding(spec, source)
        if not tied:
            log.warning("config.json ties the embeddings, but %s differs from them and is used", LM_HEAD_TENSOR)
    parameters = model_parameters(spec, shard, tied)
    if isinstance(source, SafetensorsSource):
        for name in source.unused(part for parts in parameters.values() for part in parts):
            if not (redundant_head and name == LM_HEAD_TENSOR):
                log.warning("%s: tensor %s is not part of the model and is left out", source.folder, name)
    return load_parameters(parameters, source, dtype, device, progress)


def _head_is_embedding(spec: ModelSpec, source: SafetensorsSource) -> bool:
    shape = (spec.vocab_size, spec.hidden_size)
    head, embedding = TensorPart(LM_HEAD_TENSOR, shape), TensorPart(EMBEDDING_TENSOR, shape)
    source.check((head, embedding))
    return torch.equal(source.read(head, 0, spec.vocab_size), source.read(embedding, 0, spec.vocab_size))
