"""How models are cut: every part exactly once, whatever divides."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosearch.specs import ModelSpec, RopeSpec
from worker.sharding import ShardingError, shard


def spec(num_heads=8, num_kv_heads=4, intermediate_size=80, vocab_size=101):
    return ModelSpec(
        architecture="llama",
        num_layers=1,
        hidden_size=64,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_position=64,
        norm_eps=1e-6,
        rope=RopeSpec(),
        tie_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
    )


@given(
    size=st.integers(1, 8),
    heads_per_rank=st.integers(1, 6),
    group=st.integers(1, 8),
    width=st.integers(8, 200),
    vocab=st.integers(8, 200),
)
def test_every_part_is_somewhere_exactly_once(size, heads_per_rank, group, width, vocab):
    num_heads = size * heads_per_rank
    if num_heads % group:
        group = 1
    model = spec(num_heads, num_heads // group, width, vocab)
    shards = [shard(model, size, rank) for rank in range(size)]
    for name, total in (("heads", num_heads), ("intermediate", width), ("vocab", vocab)):
        ranges = [getattr(part, name) for part in shards]
        assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))
    for part in shards:
        assert part.num_heads % part.num_kv_heads == 0
        queries_per_kv = part.num_heads // part.num_kv_heads
        for local in range(part.num_heads):
            assert part.kv_heads[local // queries_per_kv] == (part.heads[0] + local) // group
        # All ranks run the same shapes.
        shapes = dataclasses.astuple(part)[5], part.vocab_size, part.num_heads, part.num_kv_heads
        assert shapes == (dataclasses.astuple(shards[0])[5], shards[0].vocab_size, *shapes[2:])
        assert part.num_kv_heads == shards[0].num_kv_heads
        assert part.intermediate[1] - part.intermediate[0] <= part.intermediate_size
        assert part.vocab[1] - part.vocab[0] <= part.vocab_size


def test_kv_heads_are_not_copied_where_they_divide():
    assert [shard(spec(32, 8), 4, rank).kv_heads for rank in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [shard(spec(8, 2), 4, rank).kv_heads for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [shard(spec(6, 3), 2, rank).kv_heads for rank in range(2)] == [(0, 0, 1), (1, 2, 2)]


@pytest.mark.parametrize(
    ("model", "size", "rank", "message"),
    [
        (spec(9, 3), 2, 0, "9 attention heads: use one of 1, 3, 9"),
        (spec(8, 8), 16, 0, "8 attention heads"),
        (spec(8, 8, intermediate_size=3), 4, 0, "FFN width"),
        (spec(8, 8, vocab_size=3), 4, 0, "vocabulary"),
        (spec(), 2, 2, "rank 2 of 2"),
        (spec(), 0, 0, "ranks"),
    ],
)
def test_impossible_shapes_are_refused_with_the_number_in_the_way(model, size, rank, message):
    with pytest.raises(ShardingError, match=message):
        shard(model, size, rank)
