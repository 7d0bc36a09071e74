"""`bench offload engine`: a trained model with a real store process and without, in turns."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from control_plane.bench import offload_engine
from control_plane.bench.offload_engine import run
from control_plane.bench.offload_options import EngineOptions
from control_plane.bench.offload_player import Answer, Pace, Session, play
from control_plane.bench.offload_report import AGAIN, WITH, WITHOUT, Returns, Turn, compare, return_row, turn_row
from control_plane.bench.offload_rounds import Conversation, Round
from control_plane.bench.offload_store_process import StoreProcess, StoreSize
from control_plane.config import EngineConfig
from control_plane.main import app
from control_plane.options import ConfigError
from kvstore.client import ClientConfig, KVClient
from kvstore.keys import KVKey
from scheduler.move_costs import MoveCosts
from scheduler.plan import RequestEnd
from scheduler.request import FinishReason
from scheduler.scheduler_config import SchedulerConfig
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.executor import LocalExecutor, Worker

CPU_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def engine(stories_folder):
    return EngineConfig(
        model=stories_folder,
        device="cpu",
        num_threads=1,
        num_gpu_blocks_override=32,
        max_num_seqs=8,
        kv_store_policy="wait",
    )


@pytest.fixture
def patient_client(monkeypatch):
    """A busy machine may let the store answer late: that is no miss here."""
    monkeypatch.setattr("kvstore.client.ClientConfig", partial(ClientConfig, call_timeout_s=5.0))


@pytest.fixture
def dear_prefill(monkeypatch):
    """This model computes a page faster than any store brings it: as measured, next to nothing would be loaded."""
    monkeypatch.setattr(MoveCosts, "compute_s", lambda self, num_pages: float(num_pages))


@pytest.mark.usefixtures("patient_client", "dear_prefill")
def test_both_sides_say_the_same_and_the_store_saves_prompt_tokens(engine, tmp_path, capsys):
    """In so few pages that by itself the engine computes most conversations again."""
    engine = replace(engine, num_gpu_blocks_override=20)
    options = EngineOptions(
        limit=12,
        length_scale=0.15,
        at_once=6,
        time_scale=0.01,
        repeats=1,
        return_len=200,
        return_repeats=1,
        cpu_bytes=CPU_BYTES,
        ssd_dir=tmp_path / "ssd",
        ssd_bytes=CPU_BYTES,
        plot=tmp_path / "times.png",
    )
    result = run(engine, options)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    without, with_store = result["rounds"]
    assert without["cpu_cached_tokens"] == 0 < with_store["cpu_cached_tokens"]
    assert with_store["computed_tokens"] < 0.8 * without["computed_tokens"]
    assert with_store["prompt_tokens"] == without["prompt_tokens"]
    assert result["outputs"]["equal"] == result["outputs"]["compared"] == result["num_requests"]
    cached = {row["label"]: row["cached_tokens"] for row in result["returns"]}
    assert cached == {AGAIN: 0, "engine's own cache": 208, "store, CPU": 208, "store, SSD": 208}
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kv_store": "unix:/nowhere/kv.sock"}, "no store"),
        ({"enable_prefix_caching": False}, "prefix caching"),
        ({"max_model_len": 100}, "return-len"),
    ],
)
def test_what_cannot_be_measured_is_refused(engine, changes, problem):
    options = EngineOptions(limit=2, length_scale=0.1, repeats=1, return_len=200, cpu_bytes=CPU_BYTES)
    with pytest.raises(ConfigError, match=problem):
        run(replace(engine, **changes), replace(options, return_repeats=0) if "kv_store" in changes else options)


def test_a_store_that_is_not_there_is_told_before_a_model_is_loaded(engine, monkeypatch):
    monkeypatch.setattr(offload_engine, "open_engine", lambda *_: pytest.fail("a model is loaded"))
    with pytest.raises(ConfigError, match="there is no store"):
        run(replace(engine, kv_store="unix:/tmp/nope.sock"), EngineOptions(limit=2))


def test_a_store_that_cannot_start_says_why():
    with pytest.raises(ConfigError, match="cpu-bytes"):
        StoreProcess(StoreSize(1))


def test_a_store_keeps_what_is_on_ssd_over_a_restart(tmp_path):
    store = StoreProcess(StoreSize(1 << 20, tmp_path, 8 << 20))
    try:
        client = KVClient(ClientConfig(store.address, call_timeout_s=5.0))
        assert client.put(KVKey(b"key"), b"x" * 5000)
        store.restart()
        deadline = time.monotonic() + 20
        while (found := client.get(KVKey(b"key"), wait_s=1.0)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert found == b"x" * 5000
        client.close()
    finally:
        store.close()
        store.close()


@pytest.mark.parametrize("at_once", [None, 1, 3])
def test_every_prompt_has_what_was_said_in_front(stories_folder, at_once):
    worker = Worker(WorkerConfig(stories_folder, num_pages=100, max_batch_tokens=64, max_slots=4, num_threads=1))
    worker.load()
    executor = LocalExecutor(worker)
    rounds = (Round(0.01, 9, 5), Round(0.02, 4, 6), Round(0.0, 3, 2))
    conversations = [Conversation(number, rounds[: 1 + number % 3]) for number in range(7)]
    try:
        with Session(executor, SchedulerConfig(), None, 30.0) as session:
            play(session, conversations, Pace(at_once, 0.5), 512)
            lengths = {name: (answer.prompt_len, len(answer.token_ids)) for name, answer in session.answers.items()}
            assert len(lengths) == sum(len(each.rounds) for each in conversations)
            assert (lengths["2-0"], lengths["2-1"], lengths["2-2"]) == ((9, 5), (18, 6), (27, 2))
            assert all(0 < answer.ttft_s <= answer.latency_s for answer in session.answers.values())
            if at_once == 1:
                ordered = sorted(session.answers, key=lambda name: session.answers[name].asked_s)
                assert ordered == [
                    f"{each.number}-{index}" for each in conversations for index in range(len(each.rounds))
                ]
            with pytest.raises(RuntimeError, match="did not end as it should"):
                session.answer("too long", [1] * 5000, 4)
    finally:
        executor.close()


@pytest.mark.parametrize("kind", [LocalExecutor, CudaExecutor])
def test_one_executor_serves_one_session_after_the_other(stories_folder, kind):
    """Each with a scheduler of its own, which knows nothing of what slots and pages hold."""
    config = WorkerConfig(stories_folder, num_pages=40, max_batch_tokens=64, max_slots=4, num_threads=1)
    if kind is LocalExecutor:
        worker = Worker(config)
        worker.load()
        executor = LocalExecutor(worker)
    else:
        executor = CudaExecutor(config)
    conversations = [Conversation(number, (Round(0.0, 20, 12), Round(0.0, 10, 8))) for number in range(4)]
    said = []
    try:
        for _ in range(2):
            with Session(executor, SchedulerConfig(), None, 30.0) as session:
                play(session, conversations, Pace(1, 0.0), 512)
                said.append({name: answer.token_ids for name, answer in session.answers.items()})
                assert session.forget() > 0
                assert session.answer("again", [1, *range(40)], 3).end.num_cached_tokens == 0
    finally:
        executor.close()
    assert said[0] == said[1]


# --- rows ---


def answer(ttft_s: float, tokens: list[int], cached: int = 0, cpu: int = 0) -> Answer:
    end = RequestEnd("x", FinishReason.LENGTH, len(tokens), cached, 0.0, 0, "", cpu, 0)
    return Answer(50, 10.0, tokens, 10.0 + ttft_s, 12.0, end)


def test_rows_are_means_of_turns_and_times_of_all_requests():
    turns = [
        Turn(WITHOUT, {"a": answer(0.2, [1]), "b": answer(0.4, [2])}, 100, 0, 3.0),
        Turn(WITH, {"a": answer(0.1, [1], 48, 32), "b": answer(0.3, [3])}, 52, 1, 2.0),
        Turn(WITH, {"a": answer(0.1, [1], 48, 16), "b": answer(0.5, [2])}, 52, 3, 4.0),
    ]
    row = turn_row(WITH, turns)
    assert row["ttft_mean_ms"] == pytest.approx(250)
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"]) == (pytest.approx(200), pytest.approx(500))
    assert (row["computed_tokens"], row["cpu_cached_tokens"], row["gpu_cached_tokens"]) == (52, 24, 24)
    assert (row["total_s"], row["dropped_pages"], row["prompt_tokens"]) == (3.0, 2, 100)
    assert compare(turns) == {"compared": 4, "equal": 3}


def test_a_return_is_compared_with_computing_again():
    returns = Returns()
    for ttft_s in (0.3, 0.6, 0.9):
        returns.add(AGAIN, answer(ttft_s, [1]))
        returns.add("store, CPU", answer(ttft_s / 4, [1], 48))
    row = return_row("store, CPU", returns)
    assert (row["count"], row["cached_tokens"], row["times_faster"]) == (3, 48, 4.0)


def test_the_command_has_its_flags():
    result = CliRunner().invoke(app, ["bench", "offload", "engine", "--help"], env={"COLUMNS": "200"})
    for flag in ("--device", "--return-len", "--kv-store", "--ssd-dir", "--plot"):
        assert flag in result.output
