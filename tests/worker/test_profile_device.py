"""Launches of single operators: on the CPU for real, and on a GPU that only counts time."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosearch.catalog import find_model
from autosearch.operators import layer_operators
from worker import profile_cuda
from worker.config import WorkerConfig
from worker.cuda_loading import load_model
from worker.cuda_model import GraphKey
from worker.profile_cuda import CudaDevice, ProfilingError
from worker.profile_device import Bench, HostDevice, lone
from worker.profile_points import Launch, Pair, Scope, bursts
from worker.profiler import measure
from worker.steady_batch import SteadyBatchError, SteadyMix
from worker.streams import WHOLE, LaneOrder, Place

torch.set_num_threads(1)
OPERATORS = layer_operators(find_model("llama-3-8b").spec)


@pytest.mark.parametrize("num_sms", [132, 108, 78])
def test_an_operator_runs_where_it_is_asked_to(num_sms):
    scope = Scope(OPERATORS, num_sms, (256, 512))
    for launch in bursts(scope):
        schedule = lone(launch, OPERATORS, num_sms)
        schedule.validate(OPERATORS)
        order = LaneOrder(schedule, OPERATORS, num_sms)
        index = [operation.operator for operation in schedule.operations].index(launch.operator)
        assert order.places[index] == launch.place
        assert schedule.operations[index].kernel == launch.kernel


@given(st.lists(st.sampled_from(list(bursts(Scope(OPERATORS, 132, (256, 512))))), min_size=2, max_size=2, unique=True))
def test_every_launch_has_a_schedule_of_its_own(launches):
    first, second = (lone(launch, OPERATORS, 132).name for launch in launches)
    assert first != second


@pytest.fixture(scope="module")
def loaded(random_model):
    config = WorkerConfig(random_model(), max_batch_tokens=64, max_slots=64, page_size=16, num_pages=400)
    return load_model(config, lambda what, share: None, (64,))


def test_a_dry_run_on_the_cpu_times_every_operator(loaded):
    mix = SteadyMix(64, 30, 40, 20)
    device = HostDevice(Bench(loaded, mix))
    # Few parts of the SMs, as a small device has.
    loaded.model.num_sms = 32
    try:
        found = measure(device, Scope(layer_operators(loaded.spec), 32, (32, 64)), math.inf, lambda: 0.0)
    finally:
        loaded.model.num_sms = 132
    assert found.num_skipped_points == found.num_skipped_bursts == 0
    assert {launch.tokens for launch in found.alone} == {32, 64}
    assert all(time > 0 for time in found.bursts.values())
    assert found.pairs


def test_parts_of_an_iteration_leave_the_rest_alone(loaded):
    bench = Bench(loaded, SteadyMix(64, 30, 40, 20))
    model, layers = bench.model, bench.model.layers
    before = {name: getattr(layers, name).clone() for name in ("_qkv", "_attention", "delta", "_gated")}
    key = bench.key(Launch("o", 64))
    with torch.inference_mode():
        layers.delta.zero_()
        model.run_parts(key, ("o",), 1)
    assert not torch.equal(layers.delta, before["delta"])
    for name in ("_qkv", "_attention", "_gated"):
        assert torch.equal(getattr(layers, name), before[name])
    with torch.inference_mode():
        layers.tickets.fill_(7)
        model.run_parts(bench.key(Launch("up_gate", 64)), ("up_gate",))
        assert bool((layers.tickets == 7).all()), "a GEMM's loop would disturb attention that draws tickets beside it"
        model.run_parts(bench.key(Launch("decode_attention", 64)), ("decode_attention",))
        assert not layers.tickets.any()


def test_a_mix_that_does_not_fit_is_refused_at_once(loaded):
    with pytest.raises(SteadyBatchError, match="KV pages"):
        Bench(loaded, SteadyMix(64, 50, 180, 20))


class SimulatedGpu:
    """Streams that take time; an energy counter with steps; no kernels."""

    def __init__(self, watts=500.0) -> None:
        self.now, self.watts, self.ends = 5.0, watts, {}
        self.current = "default"
        self.stopped = False

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def joules(self) -> float:
        return self.watts * math.floor(self.now / 0.1) * 0.1

    def sm_mhz(self) -> float:
        return 1410.0

    def run(self, ms: float) -> None:
        start = math.inf if self.stopped else max(self.now + 1e-5, self.ends.get(self.current, 0.0))
        self.ends[self.current] = start + ms / 1e3

    def synchronize(self) -> None:
        self.now = max([self.now, *(end for end in self.ends.values() if end < math.inf)])

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def gpu(monkeypatch):
    simulated = SimulatedGpu()

    class Event:
        def __init__(self, enable_timing=False) -> None:
            self.time = 0.0

        def record(self) -> None:
            self.time = max(simulated.now, simulated.ends.get(simulated.current, 0.0))

        def query(self) -> bool:
            return self.time <= simulated.now

        def synchronize(self) -> None:
            simulated.now = max(simulated.now, self.time)

        def elapsed_time(self, end) -> float:
            return (end.time - self.time) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", simulated.stream)
    monkeypatch.setattr(torch.cuda, "synchronize", simulated.synchronize)
    return simulated


class SimulatedBench:
    """A model of 32 layers whose operators take 100 µs in a burst and, from half a second of it on, 125."""

    num_layers, rows, operators = 32, 2048, OPERATORS

    def __init__(self, gpu) -> None:
        self.gpu, self.model = gpu, self
        self.began = None

    def key(self, launch: Launch) -> GraphKey:
        return GraphKey(launch.tokens, True, launch.operator)

    def put_on(self, tokens: int) -> None:
        pass

    def capture_parts(self, key, parts, num_layers=None):
        bench, layers = self, num_layers or self.num_layers
        bench.began = self.gpu.now

        class Graph:
            def replay(self) -> None:
                settled = bench.gpu.ends.get(bench.gpu.current, 0.0) > bench.began + 0.5
                bench.gpu.run(0.02 + len(parts) * layers * (0.125 if settled else 0.1))

        return Graph()


@pytest.fixture
def device(gpu):
    return CudaDevice(SimulatedBench(gpu), gpu, gpu.clock, gpu.sleep)


def test_a_burst_is_free_of_what_an_empty_graph_takes(device):
    assert device.burst(Launch("o", 2048)) == pytest.approx(100.0, rel=1e-6)
    assert device.burst(Launch("o", 2048, "", Place(0, 68))) == pytest.approx(100.0, rel=1e-6)


def test_a_sustained_reading_begins_when_the_times_have_settled(device, gpu):
    reading = device.alone(Launch("o", 2048))
    assert reading.time_us == pytest.approx(125.0 + 20 / 32, rel=1e-3)
    assert reading.watts == pytest.approx(500.0, rel=0.01)
    assert reading.sm_mhz == 1410.0
    assert gpu.now < 5.0 + 2.0


def test_two_loops_run_beside_each_other(device):
    pair = Pair(Launch("o", 1024, "", Place(0, 68)), Launch("decode_attention", 1024, "cuda", Place(1, 64)))
    first, second = device.together(pair)
    assert first.time_us == pytest.approx(second.time_us, rel=1e-2)
    assert first.time_us == pytest.approx(125.6, rel=1e-2)
    assert first.watts == second.watts == pytest.approx(500.0, rel=0.01)


def test_a_whole_layer_and_a_card_with_nothing_to_do(device):
    assert device.layer(2048).time_us == pytest.approx(9 * 125, rel=1e-2)
    # Embedding and head: two parts, which the simulated GPU runs once in every layer.
    assert device.around(2048).time_us == pytest.approx(32 * 250, rel=1e-2)
    assert device.static_watts() == pytest.approx(500.0, rel=0.01)


def test_a_gpu_that_does_not_come_on_is_a_failure(device, gpu, monkeypatch):
    monkeypatch.setattr(profile_cuda.Loop, "_one_ms", lambda self: 1.0)
    gpu.stopped = True
    with pytest.raises(ProfilingError, match="did not end"):
        device.alone(Launch("o", 2048))


def test_kernels_at_the_whole_gpu_are_no_partition():
    assert lone(Launch("o", 256), OPERATORS, 132).operations[0].sm_share == 1.0
    assert LaneOrder(lone(Launch("o", 256), OPERATORS, 132), OPERATORS, 132).partitions == ()
    assert Launch("o", 256).place == WHOLE
