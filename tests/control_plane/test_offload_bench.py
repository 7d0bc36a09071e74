"""`bench offload`: the rounds file, the ideals, the simulated play, its tables and pictures."""

from __future__ import annotations

import csv
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from control_plane.bench import offload_rounds
from control_plane.bench.offload_device import FakeDevice, Timing
from control_plane.bench.offload_ideal import IdealLru, Use, ideal_hits
from control_plane.bench.offload_local_store import LocalStore, service_of
from control_plane.bench.offload_options import SimulationOptions, Sweep
from control_plane.bench.offload_rounds import ROUNDS_FILE, Conversation, Round, make, read
from control_plane.bench.offload_simulation import Node, simulate
from control_plane.bench.offload_sweeps import node_of, run
from control_plane.bench.offload_work import BLOCK_PAGE, read_blocks, scaled, select, sessions_of
from control_plane.main import app
from control_plane.options import ConfigError
from scheduler.plan import IterationPlan, KVMove, MoveKind

SHARED = Path(os.environ.get("NANOFLOW_SHARED", Path(__file__).parents[2].parent / "shared"))


# --- the rounds file ---


def test_the_committed_rounds_are_what_their_program_makes(tmp_path):
    offload_rounds.main([str(tmp_path / "again.csv")])
    assert (tmp_path / "again.csv").read_bytes() == ROUNDS_FILE.read_bytes()
    assert read(ROUNDS_FILE) == make()


def test_the_committed_rounds_are_like_those_of_lmsys():
    conversations = read(ROUNDS_FILE)
    rounds = [each for conversation in conversations for each in conversation.rounds]
    assert len(rounds) / len(conversations) == pytest.approx(3.3, abs=0.05)
    assert max(each.num_tokens for each in conversations) <= offload_rounds.MAX_TOKENS
    lengths = SHARED / "traces" / "lmsys_lengths.csv"
    if not lengths.exists():
        pytest.skip(f"{lengths} is not there; NANOFLOW_SHARED names the folder with traces/")
    with lengths.open() as file:
        real = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    for column, drawn in enumerate(zip(*((each.prompt_tokens, each.output_tokens) for each in rounds))):
        wanted = sorted(row[column] for row in real)
        for share in (0.25, 0.5, 0.75, 0.9):
            found = sorted(drawn)[int(share * len(drawn))]
            assert found == pytest.approx(wanted[int(share * len(wanted))], rel=0.2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no conversation"),
        ("conversation,round\n0,0\n", "columns"),
        ("conversation,round,wait_s,prompt_tokens,output_tokens\n0,1,0,5,5\n", "out of place"),
        ("conversation,round,wait_s,prompt_tokens,output_tokens\n0,0,0,0,5\n", "out of place"),
        ("conversation,round,wait_s,prompt_tokens,output_tokens\n0,0,inf,5,5\n", "waits"),
        ("conversation,round,wait_s,prompt_tokens,output_tokens\n-1,0,0,5,5\n", "negative"),
        ("conversation,round,wait_s,prompt_tokens,output_tokens\n0,0,0,1000000000000,5\n", "more than 1048576 tokens"),
    ],
)
def test_a_file_that_is_none_of_rounds_is_refused(tmp_path, text, problem):
    (tmp_path / "rounds.csv").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path / "rounds.csv")


def test_selecting_and_scaling():
    conversations = make(100)
    assert all(len(each.rounds) <= 2 for each in select(conversations, max_rounds=2))
    for share in (0.0, 0.25, 0.9, 1.0):
        chosen = select(conversations, multi_round_share=share)
        assert sum(len(each.rounds) > 1 for each in chosen) / len(chosen) == pytest.approx(share, abs=0.02)
        assert [each.number for each in chosen] == sorted({each.number for each in chosen})
    long = scaled(conversations, 4.0, 3000)
    assert max(each.num_tokens for each in long) <= 3000
    assert long[0].rounds[0].prompt_tokens == 4 * conversations[long[0].number].rounds[0].prompt_tokens


# --- the ideals ---


@given(st.lists(st.lists(st.integers(0, 12), max_size=6), max_size=30), st.integers(1, 8))
def test_the_ideal_lru_keeps_what_was_used_last(chains, capacity):
    cache, used = IdealLru(capacity), []
    for chain in chains:
        expected, leading = 0, True
        for key in chain:
            kept = list(dict.fromkeys(reversed(used)))[:capacity]  # the last ones used, by definition
            leading = leading and key in kept
            expected += leading
            used.append(key)
        assert cache.use(chain) == expected


def test_only_questions_count_and_nothing_is_forgotten_without_a_limit():
    uses = [Use("ab"), Use("abcd", is_question=False), Use("abcdx")]
    assert ideal_hits(uses, None) == 4
    assert ideal_hits(uses, 2) == 0


# --- the play ---


def small(num_conversations: int, seed: int = 1) -> list[Conversation]:
    """Short conversations that overlap."""
    rng = random.Random(seed)
    return [
        Conversation(
            number,
            tuple(
                Round(rng.uniform(0, 3), rng.randint(1, 60), rng.randint(1, 40)) for _ in range(rng.choice([1, 2, 4]))
            ),
        )
        for number in range(num_conversations)
    ]


FREE_LOADS = Timing(load_page_s=0.0)  # else some pages are cheaper to compute
NODE = Node(page_size=8, gpu_pages=80, cpu_pages=2000, batch_tokens=64, max_slots=8, timing=FREE_LOADS)


def test_with_room_for_all_every_page_is_hit_that_a_cache_could_hit():
    outcome = simulate(NODE, sessions_of(small(30)), 500)
    assert outcome.hits == outcome.endless_hits == outcome.ideal_hits > 0
    assert outcome.cpu_hits > 0, "the GPU alone had room for all: nothing was tried"
    assert outcome.num_prompt_tokens - outcome.num_computed_tokens == outcome.num_cached_tokens
    assert outcome.num_repeated_tokens - 8 * outcome.num_requests < outcome.num_cached_tokens
    assert outcome.num_cached_tokens <= outcome.num_repeated_tokens


def test_without_a_store_only_the_gpu_is_hit():
    outcome = simulate(replace(NODE, cpu_pages=0), sessions_of(small(30)), 500)
    assert outcome.cpu_hits == outcome.ssd_hits == outcome.traffic.num_stored == 0
    assert abs(outcome.gpu_hits - outcome.ideal_gpu_hits) <= 0.05 * outcome.asked_pages


def test_what_the_cpu_tier_has_lost_comes_from_ssd():
    node = replace(NODE, gpu_pages=70, cpu_pages=64, ssd_pages=2000)
    outcome = simulate(node, sessions_of(small(30)), 500)
    assert outcome.ssd_hits > 0
    assert outcome.points_below_ideal() < 2.0
    assert outcome.pages_on_both > 0
    without = simulate(replace(node, ssd_pages=0), sessions_of(small(30)), 500)
    assert without.hits < outcome.hits


def test_engines_that_share_a_store_find_each_others_pages_and_keep_them_once():
    sessions = sessions_of(small(30))
    shared = simulate(replace(NODE, num_engines=2), sessions, 500)
    apart = simulate(replace(NODE, num_engines=2, is_shared=False), sessions, 500)
    assert shared.hits == shared.endless_hits > apart.hits
    assert shared.pages_in_stores == shared.distinct_in_stores < apart.pages_in_stores
    assert apart.distinct_in_stores < apart.pages_in_stores


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([4, 8, 16]), st.integers(130, 300), st.sampled_from([0, 64, 500]))
def test_any_play_ends_and_counts_agree(seed, page_size, gpu_pages, cpu_pages):
    """What the device is told to load is checked there, page by page."""
    node = replace(NODE, page_size=page_size, gpu_pages=gpu_pages, cpu_pages=cpu_pages, num_engines=1 + seed % 2)
    conversations = small(12, seed)
    outcome = simulate(node, sessions_of(conversations), 500)
    assert outcome.num_requests == sum(len(each.rounds) for each in conversations)
    assert outcome.hits * page_size == outcome.num_cached_tokens
    assert outcome.hits <= outcome.endless_hits
    assert 0.0 <= outcome.saved_share <= 1.0


def test_the_committed_rounds_save_nearly_all_that_can_be_saved():
    """The bound of the issue: 95 % of what an endless cache of single tokens would save."""
    conversations = read(ROUNDS_FILE)[:150]
    node = Node(page_size=64, gpu_pages=512, cpu_pages=1 << 14)
    outcome = simulate(node, sessions_of(conversations), 8193)
    assert outcome.cpu_hits > 0
    assert outcome.saved_share >= 0.95


def test_pages_that_cost_more_to_load_than_to_compute_are_computed():
    dear = replace(NODE, timing=Timing(load_page_s=0.03))
    outcome, free = simulate(dear, sessions_of(small(30)), 500), simulate(NODE, sessions_of(small(30)), 500)
    assert 0 < outcome.cpu_hits < free.cpu_hits / 2


def test_a_page_that_two_loads_bring_at_once_is_counted(tmp_path):
    service = service_of(64, 0, 0, tmp_path, lambda: 0.0)
    device = FakeDevice(Timing(), 64, LocalStore(service, lambda: 0.0))
    none = np.empty(0, np.int32)

    def plan(step: int, *moves: KVMove) -> IterationPlan:
        return IterationPlan(step, 0, (), *(none for _ in range(6)), 0, np.empty(0, np.bool_), moves)

    digests = tuple(bytes([number]) * 32 for number in range(3))
    device.start(plan(0, KVMove(0, MoveKind.STORE, (0, 1, 2), digests)), 0.0)
    assert [each.num_pages for each in device.finish(plan(0), 0.1).moves] == [3]
    loads = [KVMove(1, MoveKind.LOAD, (3, 4), digests[:2]), KVMove(2, MoveKind.LOAD, (5, 6), digests[1:])]
    device.start(plan(1, *loads), 0.1)
    assert [each.num_pages for each in device.finish(plan(1), 0.2).moves] == [2, 2]
    device.start(plan(2, KVMove(3, MoveKind.LOAD, (7,), digests[:1])), 0.2)
    device.start(plan(2, KVMove(4, MoveKind.STORE, (7,), digests[:1])), 0.2)
    device.finish(plan(2), 0.3)
    traffic = device.traffic
    assert (traffic.num_loaded, traffic.num_loaded_twice) == (5, 1)
    assert (traffic.num_stored, traffic.num_stored_twice) == (3, 1)
    service.close()


# --- a trace with block identities ---


def test_a_trace_names_blocks(tmp_path):
    lines = [{"timestamp": 0, "hash_ids": [0, 1, 2]}, {"timestamp": 1500, "hash_ids": [0, 1, 9]}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sessions = read_blocks(tmp_path / "trace.jsonl")
    turns = [session.turns[0] for session in sessions]
    assert [turn.num_repeated for turn in turns] == [0, 2 * BLOCK_PAGE]
    assert [turn.wait_s for turn in turns] == [0.0, 1.5]
    outcome = simulate(Node(page_size=BLOCK_PAGE, gpu_pages=20, cpu_pages=64), sessions, 100)
    assert (outcome.hits, outcome.asked_pages) == (2, 6)


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '{"timestamp": 0, "hash_ids": [2147483648]}',
        '{"timestamp": 0, "hash_ids": [-1]}',
        '{"timestamp": 0, "hash_ids": [1e999]}',
        '{"timestamp": NaN, "hash_ids": [1]}',
        '{"timestamp": -5, "hash_ids": [1]}',
        '{"timestamp": "0", "hash_ids": [1]}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, line):
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match="hash_ids"):
        read_blocks(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(("cpu_pages", "ssd_pages"), [(2000, 0), (500, 4000)])
def test_a_real_trace_is_hit_as_often_as_by_the_ideal_lru(cpu_pages, ssd_pages):
    """Of the scheduler and the store together, within half a point."""
    trace = SHARED / "traces" / "mooncake_conversation.jsonl"
    if not trace.exists():
        pytest.skip(f"{trace} is not there; NANOFLOW_SHARED names the folder with traces/")
    tokens = {f"{tier}_tokens": 512 * pages for tier, pages in (("gpu", 400), ("cpu", cpu_pages), ("ssd", ssd_pages))}
    node = node_of(SimulationOptions(mooncake=trace, **tokens))
    outcome = simulate(node, read_blocks(trace, limit=1500), 1 << 14)
    assert outcome.cpu_hits + outcome.ssd_hits > 0
    assert abs(outcome.points_below_ideal()) < 0.5


# --- the command ---


def test_a_sweep_ends_in_one_json_line_and_a_picture(tmp_path, capsys):
    options = SimulationOptions(limit=4, sweeps=(Sweep.ENGINES,), plot=tmp_path / "hits.png")
    result = run(options)
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == result
    assert {row["sweep"] for row in result["rows"]} == {"as given", "engines", "cpu"}
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_what_cannot_be_played(tmp_path):
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["bench", "offload", "simulate", *arguments])
        assert isinstance(result.exception, ConfigError | SystemExit)
        return str(result.exception)

    assert "gpu-tokens" in refused("--gpu-tokens", "3")
    for name in ("gpu", "cpu", "ssd"):
        assert f"{name}-tokens" in refused(f"--{name}-tokens", str(10**30))
    short = tmp_path / "short.csv"
    short.write_text("conversation,round,wait_s,prompt_tokens,output_tokens\n0,0,0,5,5\n")
    assert "no prompt fills a page" in refused("--rounds", str(short))
    assert "plot" in refused("--limit", "1", "--plot", "/proc/none.png")


def test_a_trace_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_blocks(tmp_path / "trace.jsonl")
