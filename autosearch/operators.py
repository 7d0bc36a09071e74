"""One transformer layer as a graph of named operators over a batch of token rows.

The names and edges are what `worker` runs and what the search orders. Knows nothing of kernels or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from autosearch.specs import ModelSpec


@dataclass(frozen=True, slots=True)
class Operator:
    """A step of a layer that may be split into nano-operations along the token rows."""

    name: str
    inputs: tuple[str, ...]  # operators whose output rows it reads, the same rows
    earlier_rows: tuple[str, ...] = ()  # operators that must have run for all rows before the range's end


def layer_operators(spec: ModelSpec, tensor_parallel: int = 1) -> tuple[Operator, ...]:
    """The layer's operators in sequential order.

    An operator with no inputs reads the previous layer's output. With tensor parallelism the row-split
    projections are followed by an all-reduce (paper, section 2.1).
    """
    reduced = tensor_parallel > 1
    after_o = "o_all_reduce" if reduced else "o"
    attention = [
        Operator("attn_norm", ()),
        Operator("qkv", ("attn_norm",)),
        Operator("rope_append", ("qkv",)),
        Operator("decode_attention", ("rope_append",)),
        # A chunk that straddles two ranges: the later range's queries read the earlier one's keys.
        Operator("prefill_attention", ("rope_append",), earlier_rows=("rope_append",)),
        Operator("o", ("decode_attention", "prefill_attention")),
    ]
    if reduced:
        attention.append(Operator("o_all_reduce", ("o",)))
    attention.append(Operator("ffn_norm", (after_o,)))
    if spec.num_experts:
        ffn = [Operator("router", ("ffn_norm",)), Operator("experts", ("ffn_norm", "router"))]
    else:
        ffn = [Operator("up_gate", ("ffn_norm",)), Operator("down", ("up_gate",))]
    if reduced:
        ffn.append(Operator("ffn_all_reduce", (ffn[-1].name,)))
    return (*attention, *ffn)
