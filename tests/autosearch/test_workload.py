"""The batch size that memory keeps full for given lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosearch.catalog import find_gpu, find_model
from autosearch.cost_model import capacity, kv_bytes_per_token
from autosearch.workload import BATCH_STEP, RequestLengths, WorkloadError, fitted_batch_tokens

H200_BYTES = 141e9
FILL = 0.92  # of the card, for weights and KV; the rest is for buffers, graphs and the driver


def kv_tokens(name: str, num_gpus: int) -> int:
    """Tokens of KV beside 16-bit weights on so many H200s."""
    model = find_model(name)
    free = FILL * num_gpus * H200_BYTES - 2 * model.exact.total
    return int(free / kv_bytes_per_token(model.spec))


@pytest.mark.parametrize(
    ("name", "num_gpus", "lengths", "tokens", "rows"),
    [
        ("llama-3-8b", 1, (512, 1024), 867_000, 1_270),
        ("llama-2-70b", 2, (512, 512), 370_000, 960),
    ],
)
def test_two_h200_examples(name: str, num_gpus: int, lengths: tuple[int, int], tokens: int, rows: int) -> None:
    """2,048 rows do not fit everything."""
    held = kv_tokens(name, num_gpus)
    assert held == pytest.approx(tokens, rel=0.01)
    assert RequestLengths(*lengths).steady_rows(held) == pytest.approx(rows, rel=0.01)
    assert fitted_batch_tokens(held, *lengths, at_most=2048) == rows // BATCH_STEP * BATCH_STEP


def test_measured_pages_of_an_h200() -> None:
    """15,452 pages of 64 tokens: by hand 988,928 / 768 * 2 = 2,575 rows at 512/512, 1,448 at 512/1024."""
    assert fitted_batch_tokens(15_452 * 64, 512, 512, at_most=8192) == 2560
    assert fitted_batch_tokens(15_452 * 64, 512, 512, at_most=2048) == 2048
    assert fitted_batch_tokens(15_452 * 64, 512, 1024, at_most=2048) == 1408


def test_small_memory_is_not_rounded_to_nothing() -> None:
    assert fitted_batch_tokens(64 * 16, 20, 20, at_most=256) == 68  # 1,024 tokens, 34 requests of 30, 2 rows each
    assert fitted_batch_tokens(10, 512, 512, at_most=256) == 1


def test_no_output_is_refused() -> None:
    with pytest.raises(WorkloadError):
        fitted_batch_tokens(1000, 0, 0, at_most=256)


@given(
    held=st.integers(1, 10**7),
    input_len=st.integers(1, 8192),
    output_len=st.integers(1, 8192),
    at_most=st.integers(1, 8192),
)
def test_never_more_than_memory_keeps_full_nor_than_allowed(
    held: int, input_len: int, output_len: int, at_most: int
) -> None:
    fitted = fitted_batch_tokens(held, input_len, output_len, at_most)
    assert 1 <= fitted <= at_most
    live = fitted * output_len / (input_len + output_len)  # decodes of a full batch
    assert fitted == 1 or live * (input_len + output_len / 2) <= held * (1 + 1e-9)
    assert fitted < BATCH_STEP or fitted == at_most or fitted % BATCH_STEP == 0


def test_the_cost_model_says_the_same() -> None:
    """Eq. 5's capacity of a whole card, against the same tokens of KV."""
    model, gpu, lengths = find_model("llama-3-8b"), find_gpu("h200"), RequestLengths(512, 1024)
    held = (gpu.memory_gb * 1e9 - 2 * model.exact.total) / kv_bytes_per_token(model.spec)
    assert capacity(model, gpu, 1, lengths).max_batch_size == int(lengths.steady_rows(held))
