"""What a resumed run keeps, what it compares, and what it waits for."""

import io
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from rich.console import Console

from harness.base.errors import HarnessError
from harness.run import resume
from harness.run.progress import Progress
from harness.run.resume import complete_cells
from harness.run.running import digest_files
from harness.scenario import Server
from tests.support.made_runs import scenario, write_made_run


def caches(**names: str | None) -> dict[str, Server]:
    return {name: Server(template="vllm-cpu", caches=value) for name, value in names.items()}


SHARED = caches(cold="new", warm="cold", alone="new", other=None)


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        ("r2-warm-x", {"r2-cold-x", "r2-warm-x"}),
        ("r2-cold-x", {"r2-cold-x", "r2-warm-x"}),
        ("r1-alone-x", {"r1-alone-x"}),
        ("r1-other-x", {"r1-other-x"}),
    ],
)
def test_a_repeat_begins_again_with_the_server_that_compiles(tmp_path: Path, lost: str, again: set[str]) -> None:
    """Servers may share compiled kernels, which are gone at the end of a run."""
    run = write_made_run(tmp_path / "run", made_of=scenario(servers=SHARED, repeats=2))
    assert complete_cells(tmp_path / "run", run) == set(run.order)
    cut = replace(run, cells=[cell for cell in run.cells if cell.id != lost])
    assert complete_cells(tmp_path / "run", cut) == set(run.order) - again


def folder_of(root: Path, **files: str) -> Path:
    root.mkdir()
    for name, text in files.items():
        (root / name).write_text(text)
    return root


def test_files_of_a_run_are_equal_only_by_name_and_content(tmp_path: Path) -> None:
    first = digest_files([folder_of(tmp_path / "first", a="aab", b="b")])
    others = [{"a": "aa", "b": "bb"}, {"a": "aabb"}, {"a": "b", "b": "aab"}, {"a": "aab", "c": "b"}]
    digests = [digest_files([folder_of(tmp_path / f"other{at}", **files)]) for at, files in enumerate(others)]
    assert len({first, *digests}) == 5
    moved = folder_of(tmp_path / "moved", b="b", a="aab")
    assert digest_files([moved]) == first, "where a folder is does not matter"
    assert digest_files([moved / "a", moved / "b"]) == digest_files([moved / "b", moved / "a"])


@pytest.mark.parametrize("is_stuck", [False, True])
def test_processes_of_a_killed_run_are_not_waited_for_without_end(
    tmp_path: Path, is_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, killed = 0.0, list[int]()

    def sleep(time_s: float) -> None:
        nonlocal now_s
        now_s += time_s

    def orphans(_owner: object) -> list[object]:
        return [] if killed and not is_stuck else [SimpleNamespace(pid=77, kill=lambda: killed.append(77))]

    monkeypatch.setattr(resume, "orphans_of", orphans)
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    run, progress = write_made_run(tmp_path / "run"), Progress(Console(file=io.StringIO()))
    with pytest.raises(HarnessError, match="77") if is_stuck else nullcontext():
        resume._wait_for_orphans(run, progress)
    assert killed and now_s >= resume.ORPHANS_S
