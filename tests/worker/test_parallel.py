"""Tensor parallel: real gloo ranks in processes of their own give the tokens of one rank."""

import multiprocessing
import queue
import threading
import traceback
from dataclasses import replace

import numpy as np
import pytest
import torch

from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, nanobatch_only
from worker.config import WorkerConfig
from worker.executor import Worker
from worker.parallel import SingleRank, make_group

TIMEOUT_S = 120

MODELS = {
    "llama, odd vocabulary": ("llama", {"vocab_size": 101}),
    "llama, tied": ("llama", {"vocab_size": 103, "tie_word_embeddings": True}),
    "llama, biases, odd FFN": ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 83}),
    "qwen2, one KV head": ("qwen2", {"num_key_value_heads": 1}),
    "mixtral": ("mixtral", {"num_key_value_heads": 2, "intermediate_size": 81}),
}
SIX_HEADS = ("llama", {"num_attention_heads": 6, "hidden_size": 48, "num_key_value_heads": 3, "vocab_size": 101})


def requests(ask):
    """Greedy and sampled ones together; at the last one's temperature a padded id would be as likely as any."""
    draw = np.random.default_rng(7)
    prompts = [draw.integers(0, 101, n).tolist() for n in (1, 9, 40, 17)]
    temperatures, shares = (0.0, 0.8, 0.0, 1e6), (1.0, 0.9, 1.0, 1.0)
    return [ask(p, 16, temperature=temperatures[i], top_p=shares[i], seed=i) for i, p in enumerate(prompts)]


def run_rank(config, rank, rendezvous, planner, asks, results):
    """What every rank's process does; each rank plans for itself, the same way."""
    try:
        worker = Worker(config, rank)
        worker.load(rendezvous=rendezvous)
        results.put((rank, planner(worker).run(asks), worker.capacity))
        worker.close()
    except Exception:
        results.put((rank, traceback.format_exc(), None))


@pytest.fixture
def ranks(planner):
    """ranks(target, arguments of each rank) -> what each rank put into the queue, by rank."""
    # Forked from a clean process that has imported torch once: quick, and no threads of this one are lost.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, planner.__module__])
    processes = []

    def run(target, arguments):
        results = context.Queue()
        for rank in arguments:
            processes.append(context.Process(target=target, args=(*rank, results), daemon=True))
            processes[-1].start()
        try:
            gathered = [results.get(timeout=TIMEOUT_S) for _ in arguments]
        except queue.Empty:
            pytest.fail(f"not all ranks answered within {TIMEOUT_S} s")
        return {rank: rest for rank, *rest in gathered}

    yield run
    for process in processes:
        process.join(10)
        process.kill()


def config(folder, size):
    return WorkerConfig(
        folder,
        tensor_parallel_size=size,
        max_batch_tokens=32,
        max_slots=8,
        page_size=8,
        num_pages=64,
        num_threads=1,
        nano_batches=2,
        join_timeout_s=TIMEOUT_S,
    )


class Exchanging:
    """A worker that gets other schedules before some of its steps, prepared while an earlier one runs."""

    def __init__(self, worker, sets):
        self.worker, self.sets = worker, sets
        self.capacity = worker.capacity
        self.num_overlapped = 0

    def execute(self, plan):
        number, phase = divmod(plan.step, 5)
        preparing = None
        if phase == 1:
            arguments = (number, self.sets[number % len(self.sets)])
            preparing = threading.Thread(target=self.worker.schedules.prepare, args=arguments)
            preparing.start()
        elif phase == 3:
            self.worker.schedules.use(number)
        result = self.worker.execute(plan)
        self.num_overlapped += result.overlapped
        if preparing is not None:
            preparing.join()
        return result


def run_exchanging_rank(config, rank, rendezvous, planner, asks, sets, results):
    try:
        worker = Worker(config, rank)
        worker.load(rendezvous=rendezvous)
        exchanging = Exchanging(worker, sets)
        results.put((rank, planner(exchanging).run(asks), exchanging.num_overlapped))
        worker.close()
    except Exception:
        results.put((rank, traceback.format_exc(), None))


def test_ranks_that_exchange_schedules_at_the_same_step_give_the_same_tokens(
    random_model, ranks, planner, ask, tmp_path
):
    folder = random_model("llama", vocab_size=101)
    alone = Worker(config(folder, 1))
    alone.load()
    expected = planner(alone).run(requests(ask))
    operators = layer_operators(alone.spec, 2)
    sets = [
        [measured(nanobatch_only(operators, rows, count), share) for rows in (4, 8, 16, 32) for share in (0.1, 0.5, 1)]
        for count in (2, 3)
    ]
    of_two = replace(config(folder, 2), nano_batches=1, max_schedules=40)
    rendezvous = (tmp_path / "rendezvous").as_uri()
    arguments = [(of_two, rank, rendezvous, planner, requests(ask), sets) for rank in range(2)]
    answers = ranks(run_exchanging_rank, arguments)
    assert answers[0] == answers[1]
    tokens, num_overlapped = answers[0]
    assert tokens == expected
    assert num_overlapped > 3


def measured(schedule, share):
    name, figures = f"{schedule.name} at {share}", Figures(100.0, 1050.0, 1000.0)
    workload = {"decode_share": share, "mean_context": 25.0, "prefill_pairs": 1e3}
    return replace(schedule, name=name, gpu="cpu", measured=figures, **workload)


def run_over(size, folder, ranks, planner, ask, tmp_path):
    rendezvous = (tmp_path / "rendezvous").as_uri()
    return ranks(run_rank, [(config(folder, size), rank, rendezvous, planner, requests(ask)) for rank in range(size)])


@pytest.mark.parametrize(
    ("model", "size"),
    [
        *((name, 2) for name in MODELS),
        ("llama, odd vocabulary", 4),
        ("qwen2, one KV head", 4),
        ("mixtral", 4),
    ],
)
def test_ranks_give_the_tokens_of_one_rank(model, size, random_model, ranks, planner, ask, tmp_path):
    check(*MODELS[model], size, random_model, ranks, planner, ask, tmp_path)


@pytest.mark.parametrize("size", [2, 3])
def test_heads_that_straddle_kv_heads_and_sizes_that_divide_nothing(size, random_model, ranks, planner, ask, tmp_path):
    check(*SIX_HEADS, size, random_model, ranks, planner, ask, tmp_path)


def check(family, changes, size, random_model, ranks, planner, ask, tmp_path):
    folder = random_model(family, **changes)
    alone = Worker(config(folder, 1))
    alone.load()
    expected = planner(alone).run(requests(ask))
    answers = run_over(size, folder, ranks, planner, ask, tmp_path)
    for rank in range(size):
        tokens, capacity = answers[rank]
        assert tokens == expected, f"rank {rank}"
        assert capacity == alone.capacity


def gather(rank, size, rendezvous, results):
    group = make_group(rank, size, rendezvous, TIMEOUT_S)
    total = torch.arange(6.0).view(2, 3) + rank
    group.all_reduce(total)
    columns = group.all_gather_columns(torch.tensor([[rank, 10 + rank], [20 + rank, 30 + rank]]))
    results.put((rank, total.tolist(), columns.tolist()))
    group.close()
    group.close()


def test_collectives(ranks, tmp_path):
    rendezvous = (tmp_path / "rendezvous").as_uri()
    answers = ranks(gather, [(rank, 3, rendezvous) for rank in range(3)])
    total = (3 * torch.arange(6.0).view(2, 3) + 3).tolist()
    columns = [[0, 10, 1, 11, 2, 12], [20, 30, 21, 31, 22, 32]]
    assert answers == {rank: [total, columns] for rank in range(3)}


def test_a_single_rank_exchanges_nothing():
    group = make_group(0, 1, "")
    assert isinstance(group, SingleRank)
    tensor = torch.ones(2, 3)
    group.all_reduce(tensor)
    assert torch.equal(group.all_gather_columns(tensor), torch.ones(2, 3))
    group.close()


def leave(rank, size, rendezvous, results):
    group = make_group(rank, size, rendezvous, 2.0)
    if rank == 1:
        results.put((1, "left"))
        return
    try:
        group.all_reduce(torch.ones(4))
        results.put((0, "went on"))
    except RuntimeError:
        results.put((0, "raised"))


def test_a_lost_rank_raises_in_the_others_instead_of_hanging(ranks, tmp_path):
    rendezvous = (tmp_path / "rendezvous").as_uri()
    assert ranks(leave, [(rank, 2, rendezvous) for rank in range(2)]) == {0: ["raised"], 1: ["left"]}
