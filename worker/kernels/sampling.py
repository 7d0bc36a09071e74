"""Random sampling on the device: temperature, top-k, then top-p of what top-k keeps, one program per row.

Chooses as `worker.sampler` does (of equal logits the lower ids are kept; inverse CDF in order of ids), but sorts
nothing: thresholds are found by counting what lies above. Weights are integers, exp(score) in units of 2^-44, so
that sums are exact in any order, and a row's token depends on nothing but its logits and parameters. Knows nothing
of requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernel_set import MAX_VOCAB
from worker.sampler import MIN_TEMPERATURE

_BLOCK = 8192  # logits at a time
_WARP_LOGITS = 512  # of these for each warp
# Low bits of an fp32's key that are the same for every number of the type: no need to search them.
_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Integer that orders as the fp32 number does; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _number(key, SHIFT: tl.constexpr):
    """The fp32 number that has this key."""
    ordered = (key << SHIFT) | ((key >> 31) & ((1 << SHIFT) - 1))
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, top, scale):
    """exp((x - top) / temperature) in units of 2^-44; scale is log2(e) / temperature."""
    return (tl.exp2((x - top) * scale) * 17592186044416.0).to(tl.int64)


@triton.jit
def _load(logits, start, vocab, BLOCK: tl.constexpr):
    """Ids and fp32 logits of a block; minus infinity beyond the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    return ids, tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _range(logits, vocab, BLOCK: tl.constexpr):
    """The smallest logit, the largest of each lane of the block, and how many are not finite."""
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    faults = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        ids, x = _load(logits, start, vocab, BLOCK)
        top = tl.maximum(top, x)
        low = tl.where(ids < vocab, tl.minimum(low, x), low)
        # Neither infinities nor NaN are less.
        faults += tl.where((tl.abs(x) < float("inf")) | (ids >= vocab), 0, 1)
    return tl.min(low, 0), top, tl.sum(faults, 0)


@triton.jit
def _reached(keys, count, low, high):
    """The largest integer in [low, high] that `count` of the keys reach; low if there is none."""
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum((keys >= middle).to(tl.int32), 0) >= count:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _needed(total, need, vocab, top, scale):
    """A logit below which all tokens together have no more weight than total - need, so that none is needed."""
    spare = ((total - need) // vocab).to(tl.float32)
    # With a margin that is wider than fp32's error in the distance, and in its subtraction.
    return top - (44.01 - tl.log2(spare)) / scale - tl.abs(top) * 1e-6


@triton.jit
def _search(logits, vocab, low, high, need, top, scale, WEIGH: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in [low, high] from which on there is `need`, and how much is above it: of weight (int64, WEIGH)
    or of tokens (int32). Taken as known: there is enough from `low` on, and nothing above `high`.

    Every pass leaves a quarter of the range.
    """
    SUM: tl.constexpr = tl.int64 if WEIGH else tl.int32
    above = need * 0
    while low < high:
        step = (high - low) // 4 + 1
        second, third, fourth = low + step, low + 2 * step, low + 3 * step
        # Keys end well below 2^31: a threshold cut to that is as far beyond all of them.
        key_2 = tl.minimum(second, 0x7FFFFFFF).to(tl.int32)
        key_3 = tl.minimum(third, 0x7FFFFFFF).to(tl.int32)
        key_4 = tl.minimum(fourth, 0x7FFFFFFF).to(tl.int32)
        sum_2 = tl.zeros((BLOCK,), SUM)
        sum_3 = tl.zeros((BLOCK,), SUM)
        sum_4 = tl.zeros((BLOCK,), SUM)
        for start in range(0, vocab, BLOCK):
            _, x = _load(logits, start, vocab, BLOCK)
            key = _key(x, SHIFT)
            part = _weight(x, top, scale) if WEIGH else tl.full((BLOCK,), 1, tl.int32)
            sum_2 += tl.where(key >= key_2, part, 0)
            sum_3 += tl.where(key >= key_3, part, 0)
            sum_4 += tl.where(key >= key_4, part, 0)
        from_2, from_3, from_4 = tl.sum(sum_2, 0), tl.sum(sum_3, 0), tl.sum(sum_4, 0)
        if from_4 >= need:
            low = fourth
        elif from_3 >= need:
            if fourth <= high:
                above = from_4
            low, high = third, tl.minimum(high, fourth - 1)
        elif from_2 >= need:
            if third <= high:
                above = from_3
            low, high = second, tl.minimum(high, third - 1)
        else:
            if second <= high:
                above = from_2
            high = tl.minimum(high, second - 1)
    return low, above


@triton.jit
def _nth(logits, vocab, threshold, count, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Id of the count-th token with this key in order of ids; vocab if there are fewer."""
    seen = count * 0
    found = vocab
    for start in range(0, vocab, BLOCK):
        _, x = _load(logits, start, vocab, BLOCK)
        equal = (_key(x, SHIFT) == threshold).to(tl.int32)
        here = tl.sum(equal, 0)
        if (seen < count) & (seen + here >= count):
            found = start + tl.sum((seen + tl.cumsum(equal, 0) < count).to(tl.int32), 0)
        seen += here
    return found


@triton.jit
def _kept_weight(x, ids, top, scale, threshold, last, SHIFT: tl.constexpr):
    """Weights; 0 for tokens below the threshold, and for those at it behind the id `last`."""
    key = _key(x, SHIFT)
    return tl.where((key > threshold) | ((key == threshold) & (ids <= last)), _weight(x, top, scale), 0)


@triton.jit
def _total(logits, vocab, top, scale, threshold, last, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Weight of all kept tokens."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        ids, x = _load(logits, start, vocab, BLOCK)
        total += _kept_weight(x, ids, top, scale, threshold, last, SHIFT)
    return tl.sum(total, 0)


@triton.jit
def _invert(
    logits, vocab, top, scale, threshold, last, noise, BLOCKS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The first token whose cumulative kept weight is above the share `noise` of the total."""
    number = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.int64)
    for start in range(0, vocab, BLOCK):
        ids, x = _load(logits, start, vocab, BLOCK)
        here = tl.sum(_kept_weight(x, ids, top, scale, threshold, last, SHIFT), 0)
        sums = tl.where(number == start // BLOCK, here, sums)
    total = tl.sum(sums, 0)
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    # Not by tl.cumsum: it is for vectors that give every thread a number of its own.
    up_to = tl.sum(tl.where(number[None, :] <= number[:, None], sums[None, :], 0), 1)
    block = tl.sum((up_to <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(number < block, sums, 0), 0)
    ids, x = _load(logits, block * BLOCK, vocab, BLOCK)
    cumulative = before + tl.cumsum(_kept_weight(x, ids, top, scale, threshold, last, SHIFT), 0)
    return block * BLOCK + tl.sum((cumulative <= target).to(tl.int32), 0)


@triton.jit
def _choose(
    logits, vocab, temperature, top_k, top_p, noise, BLOCKS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The row's token; -1 if a logit is not finite."""
    low, tops, faults = _range(logits, vocab, BLOCK)
    top = tl.max(tops, 0)
    token = -1
    if faults == 0:
        scale = (1.4426950408889634 / temperature).to(tl.float32)
        lowest, highest = _key(low, SHIFT).to(tl.int64), _key(top, SHIFT).to(tl.int64)
        # Kept are the tokens above the threshold, and those at it up to the id `last`.
        threshold, last, room = lowest, vocab, vocab
        if (top_k > 0) & (top_k < vocab):
            # The k-th of some of the logits is no larger than the k-th of all.
            start = _reached(_key(tops, SHIFT), top_k, lowest, highest)
            threshold, above = _search(logits, vocab, start, highest, top_k, top, scale, False, SHIFT, BLOCK)
            room = top_k - above
            last = _nth(logits, vocab, threshold.to(tl.int32), room, SHIFT, BLOCK)
        if top_p < 1.0:
            total = _total(logits, vocab, top, scale, threshold.to(tl.int32), last, SHIFT, BLOCK)
            need = tl.minimum(tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1), total)
            start = tl.maximum(_key(_needed(total, need, vocab, top, scale), SHIFT).to(tl.int64), threshold)
            nucleus, weight = _search(logits, vocab, start, highest, need, top, scale, True, SHIFT, BLOCK)
            each = tl.maximum(_weight(_number(nucleus.to(tl.int32), SHIFT), top, scale), 1)
            missing = tl.minimum((need - weight + each - 1) // each, vocab).to(tl.int32)
            if nucleus == threshold:
                missing = tl.minimum(missing, room)
            threshold = nucleus
            last = _nth(logits, vocab, threshold.to(tl.int32), missing, SHIFT, BLOCK)
        token = _invert(logits, vocab, top, scale, threshold.to(tl.int32), last, noise, BLOCKS, SHIFT, BLOCK)
    return token


@triton.jit
def _sample_kernel(
    logits,  # [n, stride]
    rows,  # [n] int32: which sample each row is
    temperature,  # [n] fp64
    top_k,  # [n] int32
    top_p,  # [n] fp64
    noise,  # [n] fp64
    num_rows,  # pointer to the count of all random rows
    slots,  # [samples] int32
    sampled,  # [samples] int32
    last_tokens,  # [slots + 1] int32
    first,  # which of the random rows row 0 is
    vocab,
    stride,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCKS: tl.constexpr,  # of BLOCK logits each in a row, rounded up to a power of two
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if first + row >= tl.load(num_rows):
        return
    # Beyond these bounds the scale would leave fp32's range.
    bounded = tl.minimum(tl.maximum(tl.load(temperature + row), MIN_TEMPERATURE), 1e30)
    token = _choose(
        logits + row.to(tl.int64) * stride,
        vocab,
        bounded,
        tl.load(top_k + row),
        tl.load(top_p + row),
        tl.load(noise + row),
        BLOCKS,
        SHIFT,
        BLOCK,
    )
    sample = tl.load(rows + row)
    tl.store(sampled + sample, token)
    tl.store(last_tokens + tl.load(slots + sample), tl.maximum(token, 0))


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    noise: torch.Tensor,
    first: int,
    num_rows: torch.Tensor,
    slots: torch.Tensor,
    sampled: torch.Tensor,
    last_tokens: torch.Tensor,
    *,
    block: int = _BLOCK,
) -> None:
    """sampled[rows[i]] = a token of logits[i], for all i with first + i < num_rows; -1 if a logit is not finite.

    logits [n, vocab]; rows, top_k [n] int32; temperature, top_p, noise [n] fp64, noise in [0, 1). Parameters mean
    what they mean in worker.sampler.SamplingRows. The token, or 0 for -1, also goes to last_tokens[slots[rows[i]]].
    """
    count, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab} tokens is too large to be sampled: {MAX_VOCAB} at most")
    block = max(32, min(block, triton.next_power_of_2(vocab)))
    _sample_kernel[(count,)](
        logits,
        rows,
        temperature,
        top_k,
        top_p,
        noise,
        num_rows,
        slots,
        sampled,
        last_tokens,
        first,
        vocab,
        logits.stride(0),
        MIN_TEMPERATURE=MIN_TEMPERATURE,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocab, block)),
        SHIFT=_SHIFTS[logits.dtype],
        BLOCK=block,
        num_warps=max(1, block // _WARP_LOGITS),
    )
