"""The tokens that a server generated for another client, in runs whose every record and sample is chosen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.base.reason import Reason
from harness.numbers.formulas import foreign_tokens, max_generated
from harness.numbers.other_clients import find_other_clients
from harness.numbers.summarize import summarize
from harness.records import run_data
from harness.records.manifest import CellRun, Resumption, Run, ServedBy, read_run, write_run
from harness.records.records import BadField, Request
from harness.records.samples import MetricsSample
from harness.scenario import Load
from harness.scenario.plan import cell_of
from tests.support.made_runs import (
    MONOTONIC_S,
    WALL_S,
    both_marks,
    request,
    scenario,
    served_by,
    value_of,
    write_lines,
    write_made_run,
)

STEP_S = 20.0  # from the start of a cell to that of the next one
RUNNING = served_by(phases=[], template=None)
CUT: dict[str, Any] = {"error": "unfinished", "output_tokens": None, "chunks_s": [0.5]}


def write_cells(
    folder: Path,
    counts: Sequence[tuple[float, ...]],
    records: Sequence[Sequence[Request]] | None = None,
    *,
    served: ServedBy = RUNNING,
    values: dict[str, float] | None = None,  # other ones of each sample
    **manifest: Any,
) -> Path:
    """A run with these cells on one server. `counts`: the tokens that it had generated at each sample of a cell, the
    first before the load and the last after it. `records`: ten answers of 11 tokens each by default.
    """
    chosen = scenario(servers={"a": scenario().servers["a"]}, repeats=len(counts), loads={"x": LOAD})
    requests, marks, samples, cells = [], [], [], []
    for number, of_cell in enumerate(counts):
        start_s, name = number * STEP_S, f"r{number + 1}-a-x"
        made = TEN if records is None else records[number]
        requests += [
            msgspec.structs.replace(one, cell=name, process=number, sent_s=one.sent_s + start_s) for one in made
        ]
        marks += both_marks(name, number, start_s, start_s + 12.0, sent=len(made))
        for place, count in enumerate(of_cell):
            at_s = 0.0 if place == 0 else 14.0 if place == len(of_cell) - 1 else 1.0 + place
            more = {"running": 0.0} if values is None else values
            samples.append(MetricsSample(WALL_S + start_s + at_s, name, {"generated_tokens": float(count), **more}))
        cells.append(
            CellRun(id=name, server="a", load="x", repeat=number + 1, started_wall_s=WALL_S + start_s,
                    ended_wall_s=WALL_S + start_s + 12.0, served_by=served)
        )  # fmt: skip
    write_made_run(folder, made_of=chosen, **manifest)
    write_lines(folder / "requests.jsonl", requests)
    write_lines(folder / "processes.jsonl", marks)
    write_lines(folder / "metrics.jsonl", samples)
    write_run(folder, msgspec.structs.replace(read_run(folder), cells=cells))
    return folder


LOAD = Load(user="batch", requests=10, output_tokens=11)
TEN = [request(index=index, sent_s=MONOTONIC_S + 1.0 + index) for index in range(10)]


def reasons(folder: Path) -> dict[str, Reason]:
    return find_other_clients(run_data.load(folder))


def found(folder: Path) -> dict[str, tuple[float, float]]:
    """By cell what the server generated and the most that may be ours."""
    return {
        name: (reason.values["generated"], reason.values["max_tokens"])
        for name, reason in reasons(folder).items()
        if reason.code == "other_client"
    }


def test_the_tolerance_is_two_percent_and_fifty_tokens() -> None:
    assert [foreign_tokens(tokens, 1000.0) for tokens in (0.0, 1000.0, 1050.0, 1051.0)] == [0.0, 0.0, 0.0, 51.0]
    assert [foreign_tokens(tokens, 10_000.0) for tokens in (10_200.0, 10_201.0)] == [0.0, 201.0]
    assert foreign_tokens(50.0, 0.0) == 0.0
    assert foreign_tokens(51.0, 0.0) == 51.0


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 11.0),
        ({"output_tokens": 7}, 7.0),  # of an answer that ended, what the server reports
        ({"output_tokens": None}, 11.0),
        (CUT, 11.0),  # the server may go on to the end
        (CUT | {"error": "abandoned"}, 11.0),
        (CUT | {"error": "timeout", "asked_tokens": 500}, 500.0),
        (CUT | {"error": "http", "chunks_s": []}, 11.0),  # a proxy that gave up does not stop the server
        (CUT | {"error": "connect", "chunks_s": []}, 0.0),
        (CUT | {"error": "rejected", "chunks_s": []}, 0.0),
        ({"resent": True}, 22.0),  # it may have been computed twice
        (CUT | {"asked_tokens": None}, None),
        (CUT | {"asked_tokens": 1, "chunks_s": [0.5, 0.6]}, None),  # the server does not keep to its bound
        ({"output_tokens": None, "asked_tokens": None, "vectors": 3}, 3.0),
    ],
)
def test_the_most_tokens_that_a_request_can_have(changes: dict[str, Any], most: float | None) -> None:
    assert value_of(max_generated, request(**changes)) == most


def test_another_client_beside_a_run(tmp_path: Path) -> None:
    assert found(write_cells(tmp_path / "alone", [(5, 60, 116)])) == {}  # with the request that checks the server
    assert found(write_cells(tmp_path / "near", [(5, 60, 5 + 111 + 50)])) == {}
    folder = write_cells(tmp_path / "run", [(5, 60, 325)])
    assert found(folder) == {"r1-a-x": (320.0, 111.0)}
    values = reasons(folder)["r1-a-x"].values
    assert (values["seconds"], values["tokens_per_s"]) == (14.0, 209 / 14)
    assert values["answers_per_s"] == pytest.approx(209 / 11 / 14)
    summary = summarize(folder)
    assert (summary.valid, [(one.code, one.cell) for one in summary.reasons]) == (False, [("other_client", "r1-a-x")])


def test_answers_are_those_that_the_server_counted(tmp_path: Path) -> None:
    folder = write_cells(tmp_path / "run", [(0, 2000)])
    counted = [(0.0, 4.0), (14.0, 42.0)]  # ten are ours
    write_lines(
        folder / "metrics.jsonl",
        [MetricsSample(WALL_S + at_s, "r1-a-x", {"running": 0.0, "generated_tokens": at_s * 100, "timed_requests": n})
         for at_s, n in counted],
    )  # fmt: skip
    assert reasons(folder)["r1-a-x"].values["answers_per_s"] == 28 / 14


def test_the_warm_up_counts(tmp_path: Path) -> None:
    warm = [request(phase="warmup", index=-1 - number, output_tokens=100, asked_tokens=100) for number in range(5)]
    assert found(write_cells(tmp_path / "ours", [(0, 611)], [[*warm, *TEN]])) == {}
    assert found(write_cells(tmp_path / "theirs", [(0, 450, 711)], [[*warm, *TEN]])) == {"r1-a-x": (711.0, 611.0)}


def test_only_the_cells_in_which_it_was_active(tmp_path: Path) -> None:
    cells = write_cells(tmp_path / "one", [(0, 111), (111, 800), (800, 911)])
    assert found(cells) == {"r2-a-x": (689.0, 111.0)}
    between = write_cells(tmp_path / "between", [(0, 111), (700, 811)])  # it ended before the second load
    assert found(between) == {"r1-a-x": (700.0, 111.0)}
    little = write_cells(tmp_path / "little", [(111 * n + 30 * n, 111 * n + 111 + 30 * n) for n in range(4)])
    assert found(little) == dict.fromkeys((f"r{n}-a-x" for n in range(1, 5)), (534.0, 444.0))  # the last gap is unseen


def test_a_cut_answer_may_end_in_the_time_of_the_next_load(tmp_path: Path) -> None:
    cut = [request(index=index, asked_tokens=400, **CUT) for index in range(3)]
    assert found(write_cells(tmp_path / "run", [(0, 100), (100, 1200)], [[*TEN, *cut], TEN])) == {}


def test_a_server_that_was_started_again_is_another_one(tmp_path: Path) -> None:
    assert found(write_cells(tmp_path / "reset", [(0, 111), (1, 112)])) == {}
    assert found(write_cells(tmp_path / "busy", [(0, 111), (1, 400)])) == {"r2-a-x": (399.0, 111.0)}
    inside = write_cells(tmp_path / "inside", [(500, 10, 900)])  # INVALID for that
    assert reasons(inside) == {}
    assert [one.code for one in summarize(inside).reasons] == ["counters_restarted"]


def test_what_was_between_the_sessions_of_a_resumed_run_does_not_count(tmp_path: Path) -> None:
    folder = write_cells(tmp_path / "run", [(0, 111), (9000, 9111)])
    assert found(folder) == {"r1-a-x": (9000.0, 111.0)}
    resumed = [Resumption(wall_s=WALL_S + STEP_S - 1, kept=1)]
    write_run(folder, msgspec.structs.replace(read_run(folder), resumed=resumed))
    assert found(folder) == {}


def test_a_cell_without_samples_is_part_of_what_is_ours(tmp_path: Path) -> None:
    assert found(write_cells(tmp_path / "run", [(0, 111), (), (222, 333)])) == {}
    assert found(write_cells(tmp_path / "busy", [(0, 111), (), (722, 833)])) == {
        "r1-a-x": (722.0, 111.0)
    }  # until the next sample


def test_loads_that_ran_together_are_one(tmp_path: Path) -> None:
    """The stages of a load have samples of their own, and one count."""
    folder = write_cells(tmp_path / "run", [(0, 60), (90, 222)])
    run = read_run(folder)
    load = msgspec.structs.replace(LOAD, requests=None, duration_s=12.0, stages=[{"users": 1, "for_s": 12.0}] * 2)
    cells = [
        CellRun(**msgspec.structs.asdict(cell_of("a", f"x@{n}", 1)), started_wall_s=old.started_wall_s,
                ended_wall_s=old.ended_wall_s, served_by=old.served_by)
        for n, old in enumerate(run.cells, 1)
    ]  # fmt: skip
    scenario_with = msgspec.structs.replace(run.scenario, repeats=1, loads={"x@1": load, "x@2": load})
    names = {f"r{n}-a-x": cell.id for n, cell in enumerate(cells, 1)}
    write_run(folder, msgspec.structs.replace(run, scenario=scenario_with, cells=cells, order=list(names.values())))
    for name in ("requests", "processes", "metrics"):
        path = folder / f"{name}.jsonl"
        text = path.read_text()
        for old, new in names.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        path.write_text(text)
    assert found(folder) == {}
    path.write_text(path.read_text().replace("222", "400"))
    assert set(found(folder)) == set(names.values())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"values": {}}, "its metrics do not show whether it is idle"),
        ({"served": served_by(phases=[], metrics_url="http://127.0.0.1:9000/metrics")}, "a gateway"),
        ({"served": served_by(phases=[], gateway=served_by())}, "a gateway"),
        ({"records": [[*TEN, request(index=10, asked_tokens=None, **CUT)]]}, "the length of some answers"),
        ({"records": [[*TEN, request(index=10, output_tokens=None,
                                     bad_fields=[BadField("usage.completion_tokens", "above", "12", 11)])]]},
         "the length of some answers"),
        ({"counts": [(9000,)]}, "its metrics were not read"),
        ({"counts": [()]}, "no count"),
    ],
)  # fmt: skip
def test_where_it_is_not_known_there_is_a_note(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = write_cells(tmp_path / "run", **({"counts": [(0, 9000)]} | change))
    (reason,) = reasons(folder).values()
    assert reason.code == "clients_unchecked"
    assert reason.values["why"].startswith(why)
    summary = summarize(folder)
    assert [(one.code, one.cell) for one in summary.notes if one.code == "clients_unchecked"] == [
        ("clients_unchecked", "r1-a-x")
    ]
    assert "other_client" not in [one.code for one in summary.reasons]


def test_without_a_sample_before_the_first_request_it_is_not_known(tmp_path: Path) -> None:
    early = [request(index=index, sent_s=MONOTONIC_S - 1.0) for index in range(3)]
    (reason,) = reasons(write_cells(tmp_path / "run", [(0, 9000)], [early])).values()
    assert reason.code == "clients_unchecked"


def test_a_counter_that_appears_or_goes_is_no_difference(tmp_path: Path) -> None:
    """Two programs that take turns at /metrics have other counters."""
    for values in (
        [{}, {"generated_tokens": 9000.0}],
        [{"generated_tokens": 0.0, "x": 1.0}, {"generated_tokens": 9e3}],
    ):
        folder = write_cells(tmp_path / str(len(values[0])), [(0, 0)])
        samples = [MetricsSample(WALL_S + at_s, "r1-a-x", {"running": 0.0, **one})
                   for at_s, one in zip((0.0, 14.0), values, strict=True)]  # fmt: skip
        write_lines(folder / "metrics.jsonl", samples)
        assert [one.code for one in reasons(folder).values()] == ["clients_unchecked"]


def test_lost_records_are_no_other_client(tmp_path: Path) -> None:
    folder = write_cells(tmp_path / "run", [(0, 9000)])
    marks = both_marks("r1-a-x", 0, 0.0, 12.0, sent=11)
    for lines in (marks, marks[:1]):
        write_lines(folder / "processes.jsonl", lines)
        assert reasons(folder) == {}


def test_a_live_load_has_no_results_of_cells(tmp_path: Path) -> None:
    folder = write_cells(tmp_path / "run", [(0, 9000)])
    run: Run = read_run(folder)
    write_run(folder, msgspec.structs.replace(run, cells=[]))
    assert set(reasons(folder)) == {"r1-a-x"}
