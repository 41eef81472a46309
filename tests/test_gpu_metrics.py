"""The driver's tables, gpu_metrics: what held the clocks back, and the energy counter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import gpu_metrics
from tests.fake_gpus import apu_table, instinct_table, radeon_table, table


def held(*tables: bytes) -> list[dict[str, float] | None]:
    before: gpu_metrics.Table | None = None
    found = []
    for raw in tables:
        parsed = gpu_metrics.parse(raw)
        assert parsed is not None
        found.append(gpu_metrics.held_back(before, parsed))
        before = parsed
    return found


@pytest.mark.parametrize(
    ("bit", "kind"),
    [
        (0, "power"),
        (7, "power"),
        (16, "current"),
        (23, "current"),
        (32, "heat"),
        (36, "heat"),
        (45, "heat"),
        (47, "prochot"),
    ],
)
def test_a_status_says_what_limits_now(bit: int, kind: str) -> None:
    assert held(radeon_table(1 << bit), radeon_table(0)) == [{kind: 1.0}, {}]
    assert held(radeon_table(1 << bit | 1)) == [{kind: 1.0, "power": 1.0}]


def test_an_instinct_counts_cycles() -> None:
    tables = [instinct_table(1000, heat=10, power=0), instinct_table(2000, heat=260, power=1000)]
    assert held(*tables, instinct_table(3000, heat=260, power=1000)) == [None, {"heat": 0.25, "power": 1.0}, {}]


def test_a_counter_may_wrap() -> None:
    assert held(instinct_table(2**32 - 500, heat=2**32 - 100), instinct_table(500, heat=400)) == [None, {"heat": 0.5}]


def test_an_apu_counts_in_a_unit_of_its_own() -> None:
    assert held(apu_table(), apu_table(power=3), apu_table(power=3, heat=1), apu_table(1, 3, 1)) == [
        None, {"power": 1.0}, {"heat": 1.0}, {"prochot": 1.0},
    ]  # fmt: skip


def test_the_energy_counter() -> None:
    found = gpu_metrics.parse(instinct_table(1, energy_j=1234.5))
    assert found is not None and found.energy_j == 1234.5


def test_what_the_driver_did_not_fill_in_is_unknown() -> None:
    for raw in (table(1, 3, 120, {}), table(3, 0, 264, {}), table(1, 7, 2208, {})):
        assert gpu_metrics.parse(raw) == gpu_metrics.Table()
    assert held(table(1, 7, 2208, {}), table(1, 7, 2208, {})) == [None, None]


@pytest.mark.parametrize(
    "raw", [b"", b"\x01", table(1, 3, 128, {}), table(1, 9, 400, {}), table(3, 0, 256, {}), radeon_table(1)[:119]]
)
def test_unknown_tables_are_not_guessed_at(raw: bytes) -> None:
    assert gpu_metrics.parse(raw) is None


@given(st.binary(max_size=3000))
def test_no_table_is_a_mistake_of_ours(raw: bytes) -> None:
    gpu_metrics.parse(raw)
