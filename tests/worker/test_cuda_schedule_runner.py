"""How a schedule is made runnable on a GPU that serves, with scripted graphs and streams: what happens when."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import InvalidScheduleError, PipelineSchedule
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.cuda_model import CudaModel, GraphKey
from worker.cuda_schedules import CudaSchedules
from worker.folded_norms import fold_norms
from worker.kernel_set import ReferenceKernels
from worker.kv_cache import KVCache, KVCacheShape
from worker.streams import PartitionError

ROWS = 32


@pytest.fixture
def executor(random_model):
    limits = {"max_batch_tokens": ROWS, "max_slots": 8, "page_size": 16, "num_pages": 32}
    executor = CudaExecutor(WorkerConfig(random_model("llama"), dtype="float32", **limits))
    yield executor
    executor.close()


@pytest.fixture
def schedule(executor) -> PipelineSchedule:
    return replace(decode_beside(layer_operators(executor.spec), ROWS, 12, 0.5), name="new")


def twin_of(model: CudaModel) -> CudaModel:
    spec, twin = model.spec, model.twin(ReferenceKernels())
    shape = KVCacheShape(spec.num_layers, 1, spec.num_kv_heads, model.limits.page_size, spec.head_dim)
    twin.use_cache(KVCache(shape, torch.float32, torch.device("cpu")))
    return twin


class Log:
    """What was called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def note(self, what: str):
        return lambda *args, **kwargs: self.calls.append(what)


@pytest.fixture
def log(monkeypatch) -> Log:
    log = Log()

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            log.calls.append(f"begin in {pool}, {capture_error_mode}")

        def capture_end(self):
            log.calls.append("end")

        def replay(self):
            log.calls.append("replay")

        def reset(self):
            log.calls.append("reset")

    class Stream:
        def __init__(self, device):
            pass

        def synchronize(self):
            log.calls.append("synchronize")

    class Event:
        def __init__(self, blocking):
            assert blocking

        def record(self):
            log.calls.append("record")

        def synchronize(self):
            log.calls.append("wait")

    @contextmanager
    def stream(one):
        log.calls.append("onto a stream" if one is not None else "onto the capture stream")
        yield
        log.calls.append("back")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return log


def test_a_schedule_is_tried_on_the_twin_and_then_captured(executor, schedule, log, monkeypatch):
    model, twin = executor.model, twin_of(executor.model)
    monkeypatch.setattr(twin, "_iteration", log.note("the twin's layers"))
    monkeypatch.setattr(model, "_iteration", log.note("the model's iteration"))
    runner = CudaSchedules(model, twin, "the pool")
    runner.prepare(schedule)
    assert log.calls == [
        *("onto a stream", "the twin's layers", "synchronize", "back"),
        *("onto the capture stream", "begin in the pool, thread_local", "the model's iteration", "end", "back"),
    ]
    assert model.schedule(GraphKey(ROWS, True, "new")) == schedule
    assert twin._schedules == {}
    log.calls.clear()
    runner.release("new")
    assert log.calls == ["reset"]
    runner.release("new")
    assert (model._schedules, model._cuts, model._graphs) == ({}, {}, {})


def test_a_rehearsal_goes_all_the_way_and_leaves_nothing(executor, log, monkeypatch):
    model, twin = executor.model, twin_of(executor.model)
    monkeypatch.setattr(twin, "_iteration", lambda key, *parts: log.calls.append(f"twin: {key.schedule}"))
    monkeypatch.setattr(model, "_iteration", lambda key: log.calls.append(f"model: {key.schedule}"))
    CudaSchedules(model, twin, None).rehearse()
    steps = [call for call in log.calls if call.startswith(("twin", "model", "re"))]
    assert steps == [
        *("twin: a rehearsal", "model: a rehearsal", "replay", "reset"),
        *("twin: a rehearsal-folded", "model: a rehearsal-folded", "replay", "reset"),
    ]
    assert (model._schedules, twin._schedules, model._graphs, twin._graphs) == ({}, {}, {}, {})


@pytest.mark.parametrize("error", [PartitionError("cuda-bindings are missing"), RuntimeError("out of memory")])
def test_a_device_that_cannot_do_it_starts_all_the_same(error, executor, monkeypatch, log, caplog):
    def refuse(schedules):
        raise error

    twin = twin_of(executor.model)
    monkeypatch.setattr(twin, "use_schedules", refuse)
    CudaSchedules(executor.model, twin, None).rehearse()
    assert str(error) in caplog.text
    assert (executor.model._schedules, executor.model._graphs) == ({}, {})


def test_what_waits_for_the_iterations_is_an_event_behind_them(log):
    """Also where there is no twin: the next set may be a part of the first one."""
    on_a_gpu = SimpleNamespace(view=SimpleNamespace(block=SimpleNamespace(device=torch.device("cuda"))))
    wait = CudaSchedules(on_a_gpu, None, None).mark()
    assert log.calls == ["record"]
    wait()
    assert log.calls == ["record", "wait"]


def test_a_capture_that_fails_is_ended_and_no_graph_is_kept(executor, schedule, log, monkeypatch):
    model, twin = executor.model, twin_of(executor.model)
    runner = CudaSchedules(model, twin, None)

    def fail(key):
        raise RuntimeError("a kernel was not compiled")

    monkeypatch.setattr(model, "_iteration", fail)
    with pytest.raises(RuntimeError, match="not compiled"):
        runner.prepare(schedule)
    assert log.calls[-2:] == ["begin in None, thread_local", "end"]
    runner.release("new")
    assert (model._schedules, model._graphs) == ({}, {})


def test_no_garbage_is_collected_within_a_capture(executor, log, monkeypatch):
    """Another engine's graphs may be among it."""
    model, collects = executor.model, []

    @contextmanager
    def graph(captured):
        collects.append(gc.isenabled())
        yield
        collects.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(model, "_iteration", lambda *which: collects.append(gc.isenabled()))
    model.capture(GraphKey(ROWS, True), None)
    model.capture_parts(GraphKey(ROWS, True), ("o",))
    assert collects == [False, True, False, False, False]
    assert gc.isenabled()


def test_a_device_that_cannot_be_divided_so_refuses(executor, schedule, log, monkeypatch):
    model, twin = executor.model, twin_of(executor.model)

    def refuse(schedules):
        raise PartitionError("the driver gives 64 of 132 SMs")

    monkeypatch.setattr(twin, "use_schedules", refuse)
    with pytest.raises(InvalidScheduleError, match="64 of 132"):
        CudaSchedules(model, twin, None).prepare(schedule)
    assert not any("begin" in call for call in log.calls)


@pytest.mark.parametrize("fold", [False, True], ids=["plain", "folded"])
def test_what_runs_on_the_twin_touches_nothing_of_the_model(executor, schedule, fold):
    model, twin = executor.model, twin_of(executor.model)
    schedule = fold_norms(schedule) if fold else schedule
    parts = (model, model.layers)
    seen = [{name: value.clone() for name, value in vars(part).items() if torch.is_tensor(value)} for part in parts]
    weights = {name: value.clone() for name, value in model._weights.items()}
    cache = [model.layers.cache.k(layer).clone() for layer in range(model.spec.num_layers)]
    with torch.inference_mode():
        twin.use_schedules([schedule])
        twin.warm_up(GraphKey(ROWS, True, schedule.name))
    assert twin.layers.residual.abs().sum() > 0
    for part, values in zip(parts, seen):
        assert all(torch.equal(getattr(part, name), value) for name, value in values.items())
    assert all(torch.equal(model._weights[name], value) for name, value in weights.items())
    assert all(torch.equal(model.layers.cache.k(layer), before) for layer, before in enumerate(cache))
    assert twin._weights is model._weights
