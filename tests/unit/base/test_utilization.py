"""The safe gpu_memory_utilization: never one that vLLM refuses, and never needlessly small."""

import math
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.base.units import GIB
from harness.engines import (
    HOST_RESERVE_BYTES,
    VLLM_DEFAULT_UTILIZATION,
    default_reserve,
    safe_utilization,
    safe_utilization_from_log,
    vllm_accepts,
)

SIZES = st.integers(1, 2 * 1024 * GIB)


def safe(free: int, total: int, gpus: int = 1, host_available: int | None = None) -> Decimal | None:
    reserve = default_reserve(min(free, total), gpus)
    return safe_utilization(free, total, reserve=reserve, host_available=host_available)


def refused_by_vllm(free: int, total: int, utilization: str) -> bool:
    """vLLM 0.32, v1/worker/utils.py, request_memory; the utilization as on its command line."""
    gpu_memory_utilization = float(utilization)
    requested_memory = math.ceil(total * gpu_memory_utilization)
    return free < requested_memory


@pytest.mark.parametrize(
    ("free", "total", "expected"),
    [
        ("76.45", "96.0", "0.78"),  # a Strix Halo with a 96 GiB carve-out and a desktop; 0.92 wants 88.32 GiB
        ("93.5", "110", "0.83"),
        ("95.6", "96", "0.92"),  # no more than vLLM's default
        ("120.0", "62.47", "0.92"),  # HIP told more free memory than there is
        ("1.0", "96", None),
    ],
)
def test_known_cases(free: str, total: str, expected: str | None) -> None:
    in_bytes = safe(int(Decimal(free) * GIB), int(Decimal(total) * GIB))
    assert in_bytes == safe_utilization_from_log(free, total) == (None if expected is None else Decimal(expected))


@given(free=SIZES, total=SIZES)
@example(free=int(76.45 * GIB), total=96 * GIB)
@example(free=2 * 1024 * GIB, total=100 * GIB)  # free above total
def test_vllm_never_refuses_it(free: int, total: int) -> None:
    share = safe(free, total)
    if share is not None:
        assert not refused_by_vllm(min(free, total), total, str(share))
        assert Decimal("0.01") <= share <= VLLM_DEFAULT_UTILIZATION


@given(free=SIZES, total=SIZES, reserve=st.integers(0, 8 * GIB))
def test_the_next_hundredth_would_be_too_much(free: int, total: int, reserve: int) -> None:
    share = safe_utilization(free, total, reserve=reserve)
    more = (share or Decimal(0)) + Decimal("0.01")
    if more <= VLLM_DEFAULT_UTILIZATION:
        assert not vllm_accepts(min(free, total) - reserve, total, more)


@given(free=SIZES, total=SIZES, available=SIZES, gpus=st.integers(1, 8))
def test_shared_pages_and_several_gpus_only_make_it_smaller(free: int, total: int, available: int, gpus: int) -> None:
    alone = safe(free, total) or Decimal(0)
    share = safe(free, total, gpus, available)
    if share is not None:
        assert share <= alone
        assert not refused_by_vllm(min(free, available - HOST_RESERVE_BYTES), total, str(share))


@given(free=st.integers(1, 200_000), total=st.integers(1, 200_000), off=st.floats(-0.00499, 0.00499))
def test_printed_numbers_are_as_safe_as_bytes(free: int, total: int, off: float) -> None:
    """Hundredths of a GiB, as printed; the true bytes may be anywhere that is rounded to them."""
    share = safe_utilization_from_log(free / 100, total / 100)
    if share is not None and free <= total:
        true_free, true_total = (int((size / 100 + off) * GIB) for size in (free, total))
        assert not refused_by_vllm(true_free, true_total, str(share))
