"""The driver's tables, gpu_metrics: what held the clocks back, and the energy counter."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.machine.telemetry import GpuMetrics, compute_throttling, parse_gpu_metrics
from tests.support.fake_gpus import (
    apu_table,
    attribute,
    attribute_counters,
    attribute_table,
    instinct_table,
    radeon_table,
    table,
)

# Revision 1.9: ids of the energy counter, of cycles, and of those held back by PROCHOT, power and three kinds of heat.
ENERGY, CYCLES, PROCHOT, POWER, CHIP, REGULATOR, MEMORY = 7, *range(9, 15)
COUNTERS = dict.fromkeys((CYCLES, PROCHOT, POWER, CHIP, REGULATOR, MEMORY), 0)


def held(*tables: bytes) -> list[dict[str, float] | None]:
    before: GpuMetrics | None = None
    shares = []
    for raw in tables:
        parsed = parse_gpu_metrics(raw)
        assert parsed is not None
        shares.append(compute_throttling(before, parsed))
        before = parsed
    return shares


@pytest.mark.parametrize(
    ("bit", "kind"),
    [(0, "power"), (7, "power"), (16, "current"), (23, "current"), (32, "heat"), (45, "heat"), (47, "prochot")],
)
def test_a_status_says_what_limits_now(bit: int, kind: str) -> None:
    assert held(radeon_table(1 << bit), radeon_table(0)) == [{kind: 1.0}, {}]
    assert held(radeon_table(1 << bit | 1)) == [{kind: 1.0, "power": 1.0}]


def test_counters_of_an_instinct_and_an_apu() -> None:
    tables = [instinct_table(1000, heat=10, power=0), instinct_table(2000, heat=260, power=1000)]
    assert held(*tables, instinct_table(3000, heat=260, power=1000)) == [None, {"heat": 0.25, "power": 1.0}, {}]
    # A counter may wrap.
    assert held(instinct_table(2**32 - 500, heat=2**32 - 100), instinct_table(500, heat=400)) == [None, {"heat": 0.5}]
    # An APU counts in a unit of its own.
    assert held(apu_table(), apu_table(power=3), apu_table(power=3, heat=1), apu_table(1, 3, 1)) == [
        None, {"power": 1.0}, {"heat": 1.0}, {"prochot": 1.0},
    ]  # fmt: skip
    parsed = parse_gpu_metrics(instinct_table(1, energy_j=1234.5))
    assert parsed is not None and parsed.energy_j == 1234.5


def test_a_table_of_attributes() -> None:
    values = COUNTERS | {CYCLES: 54536484, POWER: 633093, ENERGY: 3 << 15}
    raw = attribute_counters(values)
    assert parse_gpu_metrics(raw) == GpuMetrics(
        counters=(0, 633093, 0, 0, 0), kinds=("prochot", "power", "heat", "heat", "heat"), cycles=54536484, energy_j=1.5
    )
    later = attribute_counters(values | {CYCLES: 54536484 + 1000, POWER: 633093 + 400, MEMORY: 250, CHIP: 100})
    assert held(raw, later) == [None, {"power": 0.4, "heat": 0.25}]
    # Not filled in, or of another kind.
    assert parse_gpu_metrics(attribute_table()) == GpuMetrics()
    assert parse_gpu_metrics(attribute_counters({POWER: 1, ENERGY: 2**16})) == GpuMetrics(energy_j=1.0)
    for other in ((ENERGY, 3, 6, 1), (ENERGY, 256, 6, 1), (ENERGY, 0, 7, 1), (ENERGY, 0, 2, 1), (ENERGY, 0, 6, 2)):
        assert parse_gpu_metrics(attribute_table(attribute(*other, 7))) == GpuMetrics()


def test_damaged_attributes_are_unknown() -> None:
    raw = attribute_counters(COUNTERS)
    for count in (-(2**31), 0, len(COUNTERS) + 1, len(COUNTERS) + 3):
        assert parse_gpu_metrics(raw[:4] + struct.pack("<i", count) + raw[8:]) is None
    for size in range(len(raw)):
        assert parse_gpu_metrics(raw[:size]) is None
        assert parse_gpu_metrics(struct.pack("<H", size) + raw[2:]) is None
    for encoding in (8 << 20 | ENERGY << 10 | 1, 6 << 20 | ENERGY << 10):  # no such type, no value
        assert parse_gpu_metrics(attribute_table(struct.pack("<QQ", encoding, 7))) is None


@given(st.binary(max_size=3000), st.integers(-1, 40))
def test_no_table_is_a_mistake_of_ours(raw: bytes, count: int) -> None:
    parse_gpu_metrics(raw)
    parse_gpu_metrics(attribute_table(raw[:300], count=count))


def test_what_the_driver_did_not_fill_in_is_unknown() -> None:
    for raw in (table(1, 3, 120, {}), table(3, 0, 264, {}), table(1, 7, 2208, {})):
        assert parse_gpu_metrics(raw) == GpuMetrics()


@pytest.mark.parametrize(
    "raw", [b"", b"\x01", table(1, 3, 128, {}), table(1, 9, 400, {}), table(3, 0, 256, {}), radeon_table(1)[:119]]
)
def test_unknown_tables_are_not_guessed_at(raw: bytes) -> None:
    assert parse_gpu_metrics(raw) is None
