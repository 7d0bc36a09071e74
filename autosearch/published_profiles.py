"""Builds the package's profiles from published numbers: `python -m autosearch.published_profiles`.

A100: the paper's Table 2 (times per operator) and the authors' table of interference. H200: this project's own
first measurement of one card. Everything that is computed instead of measured is marked `derived`.
"""

from __future__ import annotations

from collections.abc import Iterator

from autosearch.operators import Resource
from autosearch.profile_table import PROFILE_FOLDER, ConcurrentRate, IsolatedTime, MeasuredOn, ProfileTable
from autosearch.workload import Workload, from_sums

_STEP, _LARGEST = 128, 2048
# Table 2: milliseconds of LLaMA-2-70B on 8 A100s at 2,048 rows, all 80 layers.
_A100_LAYERS = 80
_A100_GEMM_MS = {"qkv": 16.08, "o": 16.01, "up_gate": 69.92, "down": 34.96}
_A100_ATTENTION_MS = {"decode_attention": 35.60, "prefill_attention": 4.56}
_A100_NETWORK_MS = 47.92  # of two all-reduces, each an all-gather twice
_A100_GATHERS = {"o_all_reduce": 2, "ffn_all_reduce": 2, "attention_all_gather": 1, "o_all_gather": 1}
# The authors' table: rate by share given away by the GEMM, from a tenth up.
_A100_MEMORY_RATES = (0.25, 0.40, 0.50, 0.60, 0.70, 0.80, 0.85, 0.90, 0.95)
_A100_NETWORK_RATES = (0.40, 0.60, 0.70, 0.80, 0.90)
_A100_SPREAD = 0.05  # "under 5 % of the mean" over GEMM shapes


def a100() -> ProfileTable:
    """The paper's A100 numbers as a profile."""
    isolated = []
    for tokens in range(_STEP, _LARGEST + 1, _STEP):
        exact = tokens != _LARGEST
        for name, ms in _A100_GEMM_MS.items():
            # Not published below 2,048 rows: every nano-operation pays for loading its weights, as 256 rows more.
            time = 1e3 * ms / _A100_LAYERS * (tokens + 256) / (_LARGEST + 256)
            isolated.append(IsolatedTime(name, tokens, time, derived=exact))
        for name, ms in _A100_ATTENTION_MS.items():
            isolated.append(IsolatedTime(name, tokens, 1e3 * ms / _A100_LAYERS * tokens / _LARGEST, derived=exact))
        for name, gathers in _A100_GATHERS.items():
            time = 1e3 * _A100_NETWORK_MS / _A100_LAYERS * gathers / 4 * tokens / _LARGEST
            isolated.append(IsolatedTime(name, tokens, time, derived=True))
    return ProfileTable(
        name="a100-80gb-llama-2-70b-tp8",
        source="arXiv 2408.12757 Table 2 (512 in, 1024 out) and the authors' interference table; below 2,048 rows "
        "GEMMs follow t(M) = t(2048) (M + 256) / 2304, attention and network follow their rows",
        model="llama-2-70b",
        measured_on=MeasuredOn("a100-80gb", 8, 108, versions={"paper": "2408.12757v2"}),
        workload=from_sums(_LARGEST, 1_398_430, 349_541),
        spread=_A100_SPREAD,
        isolated=tuple(isolated),
        concurrent=tuple(_a100_pairs()),
    )


def _a100_pairs() -> Iterator[ConcurrentRate]:
    for other, rates in ((Resource.MEMORY, _A100_MEMORY_RATES), (Resource.NETWORK, _A100_NETWORK_RATES)):
        for tenth, rate in enumerate(rates, start=1):
            shares = (round(1 - tenth / 10, 1), tenth / 10)
            yield ConcurrentRate((Resource.COMPUTE, other), shares, (shares[0], rate), _A100_SPREAD)


# One H200, LLaMA-3-8B layer at 2,048 rows of which 1,024 decode at 768 tokens of context, sustained.
_H200_GEMM_US = 1340.0  # all four GEMMs, middle of the sustained readings
_H200_GEMM_FLOPS = {"qkv": 6144 * 4096, "o": 4096 * 4096, "up_gate": 28672 * 4096, "down": 4096 * 14336}
# Rate of the layer's GEMMs over that at 2,048 rows. Below 512 rows by the burst rates (396 and 617 of 686 TFLOP/s); at
# 512 and 1,024 by the sustained run of two nano-batches one after the other, 2040 µs a layer instead of 2011.
_H200_GEMM_RATES = {128: 396 / 686, 256: 617 / 686, 512: 1340 / 1369, 1024: 1340 / 1369, 2048: 1.0}
_H200_ATTENTION_US = 735.0
_H200_ELEMENTWISE_US = {"attn_norm": 13.0, "ffn_norm": 13.0, "rope_append": 17.0}  # RoPE: what is left of ~90 µs
_H200_SILU_US = 47.0  # runs between up_gate and down; counted with up_gate
_H200_GEMM_JOULES, _H200_ATTENTION_JOULES = 0.68, 0.24  # dynamic, per layer
_H200_SMS = 132
# SMs of the GEMM, and both rates beside each other
_H200_PAIRS = (
    (108, 0.75, 0.28),
    (100, 0.70, 0.37),
    (92, 0.64, 0.45),
    (84, 0.56, 0.55),
    (76, 0.51, 0.63),
    (68, 0.46, 0.71),
)
_H200_SPREAD = 0.02  # GEMMs read 1330-1355 µs, the layer 1990-2010 µs


def h200() -> ProfileTable:
    """This project's first reading of one H200 as a profile."""
    work = Workload(_LARGEST, 1024, 1024 * 768.0, 1024 * 768.0)
    isolated: list[IsolatedTime] = []
    for tokens in sorted(_H200_GEMM_RATES):
        isolated += _h200_times(tokens)
    pairs = tuple(
        ConcurrentRate(
            (Resource.COMPUTE, Resource.MEMORY),
            (sms / _H200_SMS, (_H200_SMS - sms) / _H200_SMS),
            (gemm, attention),
            _H200_SPREAD,
        )
        for sms, gemm, attention in _H200_PAIRS
    )
    return ProfileTable(
        name="h200-llama-3-8b",
        source="one H200, driver 580, bf16, sustained; operators' parts of the layer's GEMM time by flops, sizes below "
        "2,048 rows by other runs, prefill attention by 400 TFLOP/s (it was left out of the measurement)",
        model="llama-3-8b",
        measured_on=MeasuredOn(
            "h200", 1, _H200_SMS, 1400, 700, 180, {"driver": "580", "cuda": "13.0", "torch": "2.11", "triton": "3.6"}
        ),
        workload=work,
        spread=_H200_SPREAD,
        isolated=tuple(isolated),
        concurrent=pairs,
    )


def _h200_times(tokens: int) -> Iterator[IsolatedTime]:
    rows = tokens / _LARGEST
    layer_us = _H200_GEMM_US * rows / _H200_GEMM_RATES[tokens]
    total = sum(_H200_GEMM_FLOPS.values())
    for name, flops in _H200_GEMM_FLOPS.items():
        silu = _H200_SILU_US * rows if name == "up_gate" else 0.0
        part = flops / total
        yield IsolatedTime(name, tokens, layer_us * part + silu, joules=_H200_GEMM_JOULES * part * rows, derived=True)
    whole = tokens == _LARGEST
    yield IsolatedTime(
        "decode_attention", tokens, _H200_ATTENTION_US * rows, joules=_H200_ATTENTION_JOULES * rows, derived=not whole
    )
    pairs_flops = 4.0 * 1024 * 768 * 4096 * rows
    yield IsolatedTime("prefill_attention", tokens, pairs_flops / 400e6, joules=0.0, derived=True)
    for name, us in _H200_ELEMENTWISE_US.items():
        yield IsolatedTime(name, tokens, us * rows, joules=0.0, derived=not whole or name == "rope_append")


def main() -> None:
    """Write both files."""
    for table in (a100(), h200()):
        (PROFILE_FOLDER / f"{table.name}.json").write_text(table.to_json() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
