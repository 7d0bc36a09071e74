"""A million keys in two tiers: bytes and microseconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MEASURE = """
import gc, hashlib, json, time
import psutil
from kvstore.residents import Residents

NUM_KEYS = 1_000_000
CHAIN = 64

def rss():
    gc.collect()
    return psutil.Process().memory_info().rss

before = rss()
tiers = [Residents(NUM_KEYS * 4096, 1 << 30) for _ in range(2)]
chains = []
for number in range(NUM_KEYS):
    key = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
    for tier in tiers:
        tier.publish(key, tier.reserve(1000), 1000)
    if number % 1000 < CHAIN and len(chains) < 200 * CHAIN:
        chains.append(key)
num_bytes = (rss() - before) / NUM_KEYS
times = []
for start in range(0, len(chains), CHAIN):
    chain = chains[start:start + CHAIN]
    began = time.perf_counter()
    handles = [tiers[0].find(key) for key in chain]
    for handle in reversed(handles):
        tiers[0].lru.touch(handle)
    times.append(time.perf_counter() - began)
times.sort()
print(json.dumps({"bytes_per_key": num_bytes, "chain_p50_us": times[len(times) // 2] * 1e6}))
"""


def test_a_million_keys_are_small_and_fast():
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    measured = json.loads(result.stdout)
    assert measured["bytes_per_key"] < 400
    assert measured["chain_p50_us"] < 200
