"""The paged KV cache of one rank: memory for keys and values, in pages of a fixed number of tokens.

Per layer, K and V are [num_pages, num_kv_heads, page_size, head_dim] each: one page of one head is contiguous.
Knows nothing of which request owns a page: that is the scheduler's page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """Everything that decides the cache's size."""

    num_layers: int
    num_pages: int
    num_kv_heads: int  # local ones
    page_size: int  # tokens per page
    head_dim: int

    @property
    def elements_per_page(self) -> int:
        """K and V elements of one page over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.page_size * self.head_dim


class KVCache:
    """K and V of all layers. Row-wise access goes through flat indexes that are the same for every layer."""

    def __init__(self, shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        pages = (2, shape.num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        self.layers = tuple(torch.zeros(pages, dtype=dtype, device=device) for _ in range(shape.num_layers))
        # The same memory as rows of one token, and as rows of one page, both of one head.
        self.token_rows = tuple(layer.view(-1, shape.head_dim) for layer in self.layers)
        self.page_rows = tuple(layer.view(-1, shape.page_size * shape.head_dim) for layer in self.layers)

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer, [num_pages, num_kv_heads, page_size, head_dim]."""
        return self.layers[layer][0]

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer, [num_pages, num_kv_heads, page_size, head_dim]."""
        return self.layers[layer][1]

    def token_row_indexes(self, pages: NDArray[np.int32], offsets: NDArray[np.int32]) -> NDArray[np.int64]:
        """Rows of `token_rows` where tokens at (page, offset in page) keep K and V: [tokens, 2 * num_kv_heads]."""
        heads = self._page_head_rows(pages)  # [2, tokens, heads]
        rows = heads * self.shape.page_size + offsets[None, :, None]
        return rows.transpose(1, 0, 2).reshape(len(pages), -1)

    def page_row_indexes(self, pages: NDArray[np.int32]) -> NDArray[np.int64]:
        """Rows of `page_rows` for sequences' pages: [sequences, pages] -> [2, sequences, num_kv_heads, pages]."""
        heads = self._page_head_rows(pages.reshape(-1)).reshape(2, *pages.shape, self.shape.num_kv_heads)
        return heads.transpose(0, 1, 3, 2)

    def _page_head_rows(self, pages: NDArray[np.int32]) -> NDArray[np.int64]:
        """[pages] -> [2 (K, V), pages, heads], as rows of (page, head)."""
        sides = np.arange(2, dtype=np.int64)[:, None, None] * self.shape.num_pages
        return (sides + pages[None, :, None]) * self.shape.num_kv_heads + np.arange(self.shape.num_kv_heads)
