"""The names of kernels that files may give are those that there are."""

from autosearch import decode_beside
from autosearch.catalog import find_model
from autosearch.operators import KERNELS, layer_operators
from autosearch.pipeline import sequential
from worker import profile_points
from worker.folded_norms import fold_norms
from worker.triton_kernels import GEMM_VARIANTS


def test_known_names_are_those_that_the_worker_has():
    folded = fold_norms(sequential(layer_operators(find_model("llama-3-8b").spec), 256))
    names = {(op.operator, op.kernel) for op in folded.operations}
    names |= {(operator, GEMM_VARIANTS[0]) for operator in ("qkv", "o", "up_gate", "down")}
    names |= {(operator, kernel) for operator, kernels in profile_points.KERNELS.items() for kernel in kernels}
    assert {name for name in names if name[1]} == {
        (op, kernel) for op, kernels in KERNELS.items() for kernel in kernels
    }


def test_those_beside_attention_are_known():
    assert set(decode_beside.KERNELS) <= set(KERNELS["decode_attention"])
