"""The paper's tables, to the printed digit."""

import pytest

from autosearch.catalog import GPUS, CatalogError, find_gpu, find_model
from autosearch.cost_model import capacity, iteration_cost, optimal_tokens_per_s_per_gpu
from autosearch.operators import Resource
from autosearch.workload import RequestLengths, WorkloadError, from_bucket, from_lengths, from_sums

A100 = GPUS["a100-80gb"]
# Table 2: GFLOP, memory GB, network GB, and the three times in ms.
TABLE_2 = {
    "kqv": (27487.8, 19.5, 0, 11.01, 1.22, 0),
    "o": (21990.2, 16.1, 0, 8.81, 1.01, 0),
    "ug": (153931.6, 96.6, 0, 61.67, 6.04, 0),
    "d": (76965.8, 49.7, 0, 30.84, 3.11, 0),
    "decode_attention": (3665.9, 462.2, 0, 1.47, 28.89, 0),
    "prefill_attention": (916.3, 2.1, 0, 0.37, 0.13, 0),
    "network": (18.8, 75.2, 75.2, 0.01, 4.70, 31.33),
}


@pytest.fixture(scope="module")
def table_2():
    return iteration_cost(find_model("llama-2-70b"), A100, 8, from_sums(2048, 1_398_430, 349_541))


@pytest.mark.parametrize("row", TABLE_2)
def test_table_2_amounts_are_reproduced_to_the_printed_digit(table_2, row):
    ours = table_2.operators[row]
    assert (round(ours.gflop, 1), round(ours.mem_gb, 1), round(ours.net_gb, 1)) == TABLE_2[row][:3]


@pytest.mark.parametrize("row", TABLE_2)
def test_table_2_times_are_reproduced_to_the_printed_digit(table_2, row):
    ours = table_2.operators[row]
    assert tuple(round(time, 2) for time in (ours.compute_ms, ours.mem_ms, ours.net_ms)) == TABLE_2[row][3:]


def test_table_2_totals(table_2):
    total = table_2.total
    assert tuple(round(time, 2) for time in (total.compute_ms, total.mem_ms, total.net_ms)) == (114.17, 45.09, 31.33)
    assert table_2.bound is Resource.COMPUTE


def test_small_amounts_are_not_rounded():
    """Amounts are divided in tenths as the paper prints them, but only where that is below half a percent."""
    small = iteration_cost(find_model("llama-3-8b"), A100, 1, from_lengths(128, RequestLengths(16, 16)))
    for row in small.operators.values():
        for amount, time, rate in ((row.gflop, row.compute_ms, 312e3), (row.mem_gb, row.mem_ms, 2000)):
            assert time == pytest.approx(1e3 * amount / rate)
    assert 0 < small.operators["prefill_attention"].mem_gb < 0.1


def test_network_time_is_the_exact_form_and_the_printed_one_is_offered(table_2):
    assert table_2.t_net_ms == pytest.approx(table_2.operators["network"].net_ms, rel=1e-3)
    assert table_2.t_net_ms == pytest.approx(4 * 7 / 8 * 2048 * 8192 * 2 * 80 / 300e9 * 1e3)
    assert table_2.t_net_approximate_ms * 7 / 8 == pytest.approx(table_2.t_net_ms)


OPTIMA = {  # nominal, exact
    "llama-2-70b": (1857, 1885),
    "qwen2-72b": (1803, 1788),
    "deepseek-67b": (1944, 1928),
    "llama-3-8b": (16236, 16189),
}


@pytest.mark.parametrize("name", OPTIMA)
def test_published_optima_follow_from_nominal_parameters(name):
    model = find_model(name)
    nominal = optimal_tokens_per_s_per_gpu(A100, model.optimum_parameters)
    exact = optimal_tokens_per_s_per_gpu(A100, model.exact.active)
    assert (round(nominal), round(exact)) == OPTIMA[name]


def test_nominal_parameters_round_to_the_published_ones():
    nominal = {name: find_model(name).optimum_parameters / 1e9 for name in OPTIMA}
    rounded = {name: round(count, 1) for name, count in nominal.items()}
    assert rounded == {"llama-2-70b": 70.0, "qwen2-72b": 72.1, "deepseek-67b": 66.9, "llama-3-8b": 8.0}


def test_optimum_of_the_real_h200_is_the_benchmark_contracts():
    assert optimal_tokens_per_s_per_gpu(GPUS["h200"], find_model("llama-3-8b").exact.active) == pytest.approx(
        41.1e3, abs=50
    )


def test_exact_parameter_counts():
    assert find_model("llama-3-8b").exact.total == 8_030_261_248
    assert find_model("llama-2-70b").exact.total == 68_976_648_192
    assert find_model("mixtral-8x7b").exact.total == 46_702_792_704
    assert find_model("mixtral-8x7b").exact.active == 12_879_925_248


TABLE_1_DERIVED = {  # seconds to read all memory, flops per byte of memory, network over memory bandwidth
    "v100": (0.018, 139, 0.33),
    "a100-80gb": (0.040, 156, 0.30),
    "h100": (0.024, 295, 0.27),
    "h200-96gb": (0.020, 206, 0.19),
    "b200": (0.015, 281, 0.23),
    "mi300": (0.036, 247, 0.19),
    "gaudi2": (0.040, 417, 0.25),
    "ada6000": (0.050, 190, 0.07),
}


@pytest.mark.parametrize("name", TABLE_1_DERIVED)
def test_table_1_derived_columns(name):
    gpu = GPUS[name]
    ratios = (
        round(gpu.memory_gb / gpu.memory_gb_per_s, 3),
        round(gpu.compute_gflop_per_s / gpu.memory_gb_per_s),
        round(gpu.network_gb_per_s / gpu.memory_gb_per_s, 2),
    )
    assert ratios == TABLE_1_DERIVED[name]


WORKLOADS = [(102, 222), (1155, 211), (246, 322), (512, 512), (1024, 512), (512, 1024)]


@pytest.mark.parametrize("lengths", WORKLOADS)
@pytest.mark.parametrize("name", ["llama-2-70b", "llama-3-70b", "qwen2-72b", "deepseek-67b"])
def test_the_70b_class_is_compute_bound_at_the_largest_batch_that_fits(name, lengths):
    """Figure 3: T_R between 0.07 and 0.37 as printed."""
    model, mean = find_model(name), RequestLengths(*lengths)
    batch = capacity(model, A100, 8, mean).max_batch_size
    assert 0.06 <= iteration_cost(model, A100, 8, from_lengths(batch, mean)).t_r <= 0.40


def test_llama_3_8b_on_one_card_is_balanced():
    """Figure 3: about 1 at 512 in, 1024 out."""
    model, mean = find_model("llama-3-8b"), RequestLengths(512, 1024)
    batch = capacity(model, A100, 1, mean).max_batch_size
    assert iteration_cost(model, A100, 1, from_lengths(batch, mean)).t_r == pytest.approx(1, abs=0.15)


def test_gqa_is_what_lets_1024_requests_fit_where_about_256_would():
    """At 512 in, 512 out a batch of 2,048 rows holds 1,024 decodes; with a KV head per query head 249 requests fit."""
    held = capacity(find_model("llama-2-70b"), A100, 8, RequestLengths(512, 512))
    assert held.max_requests >= 1024
    assert held.max_batch_size >= 2048
    assert held.max_requests_without_gqa == pytest.approx(256, rel=0.03)
    assert held.max_batch_size_without_gqa == int(2 * held.max_requests_without_gqa)


def test_experts_have_the_papers_rows_too():
    """Mixtral's rows are Table 2's, with the router besides; a token passes two of eight experts."""
    cost = iteration_cost(find_model("mixtral-8x7b"), A100, 8, from_lengths(2048, RequestLengths(1024, 512)))
    assert set(cost.operators) == {*TABLE_2, "router"}
    assert cost.operators["ug"].gflop == pytest.approx(2 * 2048 * 2 * 2 * 4096 * 14336 * 32 / 1e9, rel=1e-3)
    assert cost.operators["ug"].gflop == pytest.approx(2 * cost.operators["d"].gflop, rel=1e-3)
    weights_gb = 8 * 4096 * 14336 * 2 * 32 / 1e9
    assert weights_gb < cost.operators["d"].mem_gb < 1.4 * weights_gb


def test_t_r_is_the_closed_form(table_2):
    closed = (312e12 / 2000e9) * (8 * 80e9 / 70e9) / (2 * 2048)  # MemSize of all eight cards over P_model
    assert table_2.t_r == pytest.approx(closed)


def test_gpu_from_yaml(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "{memory_gb: 24, memory_gb_per_s: 1000, network_gb_per_s: 64, compute_gflop_per_s: 1e5}", encoding="utf-8"
    )
    gpu = find_gpu(str(path))
    assert (gpu.name, gpu.memory_gb, gpu.best_gemm_gflop_per_s) == ("mine", 24, 1e5)


FIELDS = "memory_gb_per_s: 1000, network_gb_per_s: 64, compute_gflop_per_s: 1e5"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[1]", ": :", "[" * 5000, b"\xff\x00", "{1: 2}"),
        *("{memory: 3}", "{memory_gb: x}", "{memory_gb: 24}", "{memory_gb: -1}"),
        *(f"{{memory_gb: {value}, {FIELDS}}}" for value in ("-1", "0", ".nan", ".inf", "1e400", "true", "[1]", "x")),
        f"{{memory_gb: 24, {FIELDS}, gemm_gflop_per_s: 0}}",
        *(f"{{memory_gb: 24, {FIELDS}, name: {name}}}" for name in ("../up", "[a]", "''", "a/b")),
    ],
)
def test_unusable_gpu_files_are_refused(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CatalogError, match=r"bad\.yaml"):
        find_gpu(str(path))


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(CatalogError, match="a100-80gb"):
        find_gpu("rtx")
    with pytest.raises(CatalogError, match="llama-3-8b"):
        find_model("gpt-5")


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf"), 1e300])
def test_impossible_workloads_are_refused(number):
    with pytest.raises(WorkloadError):
        from_sums(128, number, 1)
    with pytest.raises(WorkloadError):
        from_sums(128, 1, number)
    with pytest.raises(WorkloadError):
        RequestLengths(number, 5)
    with pytest.raises(WorkloadError):
        RequestLengths(5, number)
    with pytest.raises(WorkloadError):
        from_bucket(128, 0.5, number)


def test_empty_and_endless_batches_are_refused():
    for batch in (0, -128, 10**400):
        with pytest.raises(WorkloadError):
            from_sums(batch, 1, 1)
    with pytest.raises(WorkloadError):
        RequestLengths(0, 0)
    with pytest.raises(WorkloadError):
        from_bucket(128, float("nan"), 512)
