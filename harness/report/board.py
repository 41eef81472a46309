"""Published runs: a VALID run filed by machine and scenario, and the leaderboard as one HTML page and as Markdown."""

import filecmp
import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from markupsafe import Markup

from harness import units
from harness.analysis.summarize import summarize
from harness.columns import METRIC_WORDS, RATES
from harness.comparison.board import Board, Entry, Figure, Group
from harness.errors import HarnessError, RunError
from harness.files import open_file, pretty_json, read_bytes, replace_file
from harness.judge.noise_floors import folder_name, is_noise_run, noise_path
from harness.reasons import sentences as in_words
from harness.report import words
from harness.report.html import asset, template
from harness.report.markdown import escape, grid, render
from harness.report.table import LIMITED
from harness.rundir.manifest import Run, read_run
from harness.summary import Summary, because

RANKING = (
    "A ranking is no verdict: it says who was fastest, not whether the difference is more than chance. "
    "`harness compare RUN RUN --across machine` checks that."
)
APART = (
    "Figures that others published, as they state them. They were not measured by this suite and not repeated "
    "here, workloads differ from row to row, and they never enter a verdict or a ranking."
)
EMPTY = "Nothing has been published yet: `harness publish RUN` files a run."
_DIGEST = 12
RECORDS = "requests.jsonl"


def write_board(board: Board, path: Path) -> list[Path]:
    """Write the page, and Markdown of the same name next to it. Returns both paths. Raises HarnessError."""
    text_path = path.with_suffix(".md")
    if text_path == path:
        raise HarnessError(f"{path}: is also the name of the page in Markdown", next_step="Give a name in .html.")
    try:
        for target, text in ((path, html(board)), (text_path, markdown(board))):
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, text.encode())
    except OSError as error:
        raise HarnessError(
            f"--output: {path} cannot be written ({error.strerror})", next_step="Name a file in a folder of yours."
        ) from None
    return [path, text_path]


def html(board: Board) -> str:
    return template("leaderboard.html.j2").render(
        board=board,
        style=Markup(asset("report.css")),
        value=value,
        spread=spread,
        heading=heading,
        digest=digest,
        metric_name=metric_name,
        rate=rate,
        first_token=first_token,
        validity=validity,
        limited=limited,
        units=units,
        ranking=RANKING.replace("`", ""),
        apart=APART,
        empty=EMPTY.replace("`", ""),
    )


def markdown(board: Board) -> str:
    """The same as GitHub Flavored Markdown."""
    parts = ["# Leaderboard"]
    if board.groups:
        parts += [RANKING, _matrix(board), *(_group(group) for group in board.groups)]
    else:
        parts.append(EMPTY)
    if board.unreadable:
        parts.append("\n".join(f"- not readable: {escape(text)}" for text in board.unreadable))
    if board.figures:
        parts += ["## Third-party figures", APART, _figures(board.figures)]
    return "\n\n".join(parts) + "\n"


def _marked(number: float | None, shown: Callable[[float], str], field: str, entry: Entry) -> str:
    if number is None:
        return units.NOTHING
    return f"{shown(number)}{LIMITED}" if field in entry.client_limited else shown(number)


def value(entry: Entry, group: Group) -> str:
    """The median of a row by the group's metric, with its unit."""
    return _marked(entry.value, lambda number: words.in_unit(number, group.metric), group.metric, entry)


def rate(entry: Entry) -> str:
    return _marked(entry.output_tok_s, units.significant, "output_tok_s", entry)


def first_token(entry: Entry) -> str:
    """The p50 of TTFT in ms."""
    return _marked(entry.ttft_p50_s, units.milliseconds, "ttft_s", entry)


def validity(entry: Entry) -> str:
    if not entry.valid:
        return "INVALID"
    return "VALID" if entry.ranked or entry.value is None else "CLIENT-LIMITED"


def limited(group: Group) -> str | None:
    """What the mark of a limited number means, where there is one."""
    there = any(entry.client_limited for entry in group.entries)
    return f"{LIMITED} the load generator was the limit of this number, not the server." if there else None


def spread(entry: Entry, group: Group) -> str:
    """The least and the most of the repeats."""
    if entry.min is None or entry.max is None:
        return units.NOTHING
    return f"{words.in_unit(entry.min, group.metric)} to {words.in_unit(entry.max, group.metric)}"


def heading(group: Group) -> str:
    return f"{group.scenario} · {group.model}"


def metric_name(group: Group) -> str:
    return f"{METRIC_WORDS[group.metric]}, {'more' if group.metric in RATES else 'less'} is better"


def digest(entry: Entry) -> str:
    """The beginning of the image's digest, without its repository; of an image that was never in one, of its id."""
    if entry.image_digest is None:
        return units.NOTHING
    if "@" not in entry.image_digest:
        return f"image id {entry.image_digest.rpartition(':')[2][:_DIGEST]}"
    kind, _, sum_ = entry.image_digest.rpartition("@")[2].rpartition(":")
    return f"{kind}:{sum_[:_DIGEST]}" if kind else sum_[:_DIGEST]


def _matrix(board: Board) -> str:
    def cell(group: Group, machine: str) -> str:
        best = group.best_of(machine)
        return units.NOTHING if best is None else f"{value(best, group)}: {best.server} / {best.load}, {best.date}"

    lines = [
        [heading(group) + (" (SIMULATED)" if group.simulated else ""), *(cell(group, name) for name in board.machines)]
        for group in board.groups
    ]
    return grid(["Scenario", *board.machines], lines)


def _group(group: Group) -> str:
    text = f"## {escape(heading(group))}\n\n{escape(group.question)} Ranked by {metric_name(group)}. "
    text += f"Workload `{group.workload_sha256[:_DIGEST]}`."
    if group.simulated:
        text += f"\n\n> **{words.SIMULATED}**"
    head = ["#", "Machine", "Server", "Load", "Median", "Least to most", "Repeats", "tok/s", "TTFT p50, ms", "Errors"]
    head += ["Date", "Image digest", "Version", "Validity", "Run"]
    lines = [
        [
            str(number) if entry.ranked else units.NOTHING,
            entry.machine,
            entry.server,
            entry.load,
            value(entry, group) + (" (best of this machine)" if entry.best else ""),
            spread(entry, group),
            str(entry.repeats),
            rate(entry),
            first_token(entry),
            str(entry.errors),
            entry.date,
            digest(entry),
            entry.version or units.NOTHING,
            validity(entry),
            entry.run,
        ]
        for number, entry in enumerate(group.entries, 1)
    ]
    return "\n\n".join([text, grid(head, lines), *filter(None, [limited(group)])])


def _figures(figures: list[Figure]) -> str:
    head = ["Hardware", "Model", "Setup", "Load", "Result", "Claim", "Source", "Date"]
    lines = [[f.hardware, f.model, f.setup, f.load, f.result, f.claim, f.source, f.date] for f in figures]
    return grid(head, lines)


def publish(folder: Path, results: Path, *, records: bool = False) -> tuple[Path, list[str]]:
    """Write summary.json, run.json and report.md of a run below `results`, with `records` its requests packed, too.

    Returns the folder and the names of the files that were new or changed: none the second time. Raises RunError for
    a run that is not VALID, HarnessError for one that has no place there.
    """
    run = read_run(folder)
    summary = summarize(folder)
    _refuse(run, summary, folder)
    target = noise_path(results, run).parent / folder_name(run.id)
    files = {
        "run.json": pretty_json(run),
        "summary.json": pretty_json(summary),
        "report.md": render(summary, run).encode(),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        changed = [name for name, content in files.items() if _replace(target / name, content)]
        if records and (folder / RECORDS).exists() and _pack(folder / RECORDS, target / f"{RECORDS}.gz"):
            changed.append(f"{RECORDS}.gz")
    except OSError as error:
        raise HarnessError(
            f"{target}: the run cannot be filed there ({error.strerror or error})",
            next_step="--results DIR chooses another folder.",
        ) from None
    return target, changed


def _refuse(run: Run, summary: Summary, folder: Path) -> None:
    if is_noise_run(run):
        raise HarnessError(
            f"{run.id}: an A/A run is no result; what it found is stored as noise.json",
            next_step="Publish runs of `harness run`.",
        )
    if run.origin is not None:
        raise HarnessError(
            f"{run.id}: was measured by {run.origin.tool}, and what it says is not ranked with runs of this suite",
            next_step="Publish runs of `harness run`.",
        )
    if summary.valid and run.status == "valid":
        return
    reasons = in_words(summary.reasons or run.reasons or [because("run_status", status=run.status)])
    state = "INVALID" if run.status in ("valid", "invalid") else run.status
    raise RunError(
        f"{run.id}: only a VALID run is published, and this one is {state}: {reasons[0]}",
        next_step=f"harness report {folder} shows all reasons.",
        detail="\n".join(reasons) if len(reasons) > 1 else "",
    )


def _replace(path: Path, content: bytes) -> bool:
    """Write a file in one step unless it is so already; whether it had to be."""
    if path.exists() and read_bytes(path) == content:
        return False
    replace_file(path, content)
    return True


def _pack(source: Path, path: Path) -> bool:
    """gzip without a name or a time, so that the same records always give the same file."""
    temporary = path.with_name(f"{path.name}.new")
    with (
        open_file(source) as plain,
        temporary.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
    ):
        shutil.copyfileobj(plain, packed)
    if path.exists() and filecmp.cmp(path, temporary, shallow=False):
        temporary.unlink()
        return False
    os.replace(temporary, path)
    return True
