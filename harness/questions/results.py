"""Results: VALID runs filed by machine and scenario, and the leaderboard over them."""

import gzip
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import yaml
from msgspec import Struct
from msgspec.structs import replace

from harness.base import units
from harness.base.command_line import command_line
from harness.base.errors import HarnessError, reason_of
from harness.base.files import open_file, pretty_json, read_text, replace_file
from harness.base.metrics import METRICS
from harness.base.reason import Reason, sentence
from harness.base.units import format_date
from harness.numbers.power_settings import power_note, power_text
from harness.numbers.row_estimate import estimate_row
from harness.numbers.summarize import read_summary, summary_of
from harness.numbers.summary import CellSummary, Row, Summary
from harness.numbers.verdicts import is_client_limited, is_paced, metric_values, work_metric
from harness.questions.compare.decide import refuse_invalid, refuse_search
from harness.questions.joint import analyse
from harness.questions.report.page import read_searched, run_page
from harness.questions.startup import startup_facts
from harness.records.directory import folder_name, list_runs, read_inputs, work_options
from harness.records.manifest import QUICK, Run, ServedBy, read_run
from harness.report import words
from harness.report.elements import LIMITED, Bullet, Bullets, Element, Fold, Grid, Paragraph, TableColumn, plain_grid
from harness.report.manifest_facts import UNKNOWN, describe_machine, manifest_facts
from harness.report.markdown import render
from harness.report.result_card import code, render_card
from harness.report.sections import simulated_note
from harness.report.sentences import largest_error, late_numbers_text
from harness.run.running_server import combination_words

RANKING = (
    "A ranking is no verdict: it says who was fastest, not whether the difference is more than chance. "
    "`harness compare RUN RUN --across machine` checks that."
)
APART = (
    "Figures that others published, as they state them. They were not measured by this suite and not repeated "
    "here, workloads differ from row to row, and they never enter a verdict or a ranking."
)
EMPTY = "There are no results yet: `harness results add RUN` files a run."
_DIGEST_CHARS = 19  # "sha256:" and twelve more
RECORDS = "requests.jsonl"
THIRD_PARTY = Path("reference") / "third-party.yaml"


class Figure(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure published by others, in reference/third-party.yaml."""

    hardware: str
    model: str
    setup: str
    load: str
    result: str
    claim: str  # its kind of author: vendor, community, paper
    source: str
    date: str  # of the source; "undated" where none was recorded
    url: str | None = None

    @property
    def cells(self) -> list[str]:
        source = self.source if self.url is None else f"{self.source} {self.url}"
        return [self.hardware, self.model, self.setup, self.load, self.result, self.claim, source, self.date]


class Entry(Struct, frozen=True, kw_only=True):
    """A row of a filed run, as the leaderboard shows it."""

    machine: str
    server: str
    load: str
    metric: str  # of its group
    values: list[float]  # one for each repeat
    mean: float | None = None  # geometric, of the repeats
    low: float | None = None  # the 95 % interval of the mean; None: one repeat, or a number of all requests together
    high: float | None = None
    power: str | None = None  # the machine's power settings; None: not recorded
    output_tok_s: float | None
    ttft_p50: float | None
    errors: int
    date: str
    run: str
    image_digest: str | None
    version: str | None
    valid: bool
    client_limited: list[str]  # fields of Numbers
    client_error: float  # of these fields at most, as a share
    ranked: bool  # only if the run is valid and the load generator did not limit the value
    best: bool = False  # of its machine

    @property
    def mean_text(self) -> str:
        """The mean of the repeats with its unit."""
        shown = units.NOTHING if self.mean is None else words.format_metric(self.mean, self.metric)
        return self._mark_limited(shown, METRICS[self.metric].field)

    @property
    def interval_text(self) -> str:
        """The ends of the interval; the unit is that of the mean."""
        if self.low is None or self.high is None:
            return units.NOTHING
        low, high = (words.format_metric(end, self.metric).rpartition(" ") for end in (self.low, self.high))
        return f"{low[0]}–{high[0]}" if low[2] == high[2] else f"{' '.join(low[::2])}–{' '.join(high[::2])}"

    def cells(self, place: int) -> dict[str, str]:
        """The texts of its row by their column, those of ORIGIN last."""
        limited = "VALID" if self.ranked or self.mean is None else "CLIENT-LIMITED"
        return {
            "#": str(place) if self.ranked else units.NOTHING,
            "Machine": f"{self.machine} (best)" if self.best else self.machine,
            "Server / load": f"{self.server} / {self.load}",
            "Mean": self.mean_text,
            "Interval (95 %)": self.interval_text,
            "Repeats": str(len(self.values)),
            "tok/s": self._mark_limited(units.significant(self.output_tok_s), "output_tok_s"),
            "TTFT p50, ms": self._mark_limited(units.milliseconds(self.ttft_p50), "ttft"),
            "Errors": str(self.errors),
            "Validity": limited if self.valid else "INVALID",
            "Date": self.date,
            "Run": self.run,
            "Image": (self.image_digest or units.NOTHING).rpartition("@")[2][:_DIGEST_CHARS],
            "Version": self.version or units.NOTHING,
            "Power": self.power or UNKNOWN,
        }

    @property
    def has_mark(self) -> bool:
        """Whether one of its numbers has the sign of a late load generator."""
        return any(text.endswith(LIMITED) for text in self.cells(1).values())

    def _mark_limited(self, text: str, field: str) -> str:
        return f"{text}{LIMITED}" if field in self.client_limited and text != units.NOTHING else text


ORIGIN = ("Date", "Run", "Image", "Version", "Power")  # in a line below the row
RANKED: tuple[tuple[str, str, Literal["name", "verdict", ""]], ...] = (  # the columns: key, title, group
    ("place", "#", ""), ("server", "Machine", "name"), ("load", "Server / load", "name"), ("rate", "Mean", ""),
    ("speedup", "Interval (95 %)", ""), ("repeats", "Repeats", ""), ("tok_s", "tok/s", ""),
    ("ttft", "TTFT p50, ms", ""), ("errors", "Errors", ""), ("verdict", "Validity", "verdict"),
)  # fmt: skip
FIGURE_HEAD = ("Hardware", "Model", "Setup", "Load", "Result, as stated", "Claim", "Source", "Date")


class Group(Struct, frozen=True, kw_only=True):
    """The rows with the same scenario, model, workload and kind of engine (simulated or real), best first."""

    scenario: str
    question: str
    model: str
    workload_sha256: str
    simulated: bool
    metric: str
    entries: list[Entry]
    power: Reason | None = None  # the power settings of its runs differ, or are not recorded of some

    def best_of(self, machine: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.machine == machine and entry.best), None)

    @property
    def heading(self) -> str:
        differs = self.power is not None and self.power.code == "power_differs"
        return f"{self.scenario} · {self.model}" + " · POWER SETTINGS DIFFER" * differs

    @property
    def ranked_by(self) -> str:
        return f"{METRICS[self.metric].title}, {'more' if METRICS[self.metric].more_is_better else 'less'} is better"

    @property
    def rows(self) -> list[dict[str, str]]:
        return [entry.cells(place) for place, entry in enumerate(self.entries, 1)]


class Board(Struct, frozen=True, kw_only=True):
    """The leaderboard."""

    machines: dict[str, str]  # by name its GPUs, else its CPU
    groups: list[Group]
    figures: list[Figure]
    unreadable: list[str]
    manifests: dict[str, dict[str, str]] = {}  # by run what it ran on and with

    @property
    def limited_note(self) -> str | None:
        """The meaning of the mark of a limited number; None if no number has it."""
        errors = [entry.client_error for group in self.groups for entry in group.entries if entry.has_mark]
        return f"The load generator was late: {late_numbers_text(max(errors), LIMITED)}." if errors else None


def collect_board(results: Path, shipped: Path) -> Board:
    """Read all runs below `results`, and the third-party figures from there, else from `shipped`.

    A run that cannot be read is listed in the board.
    """
    runs: list[tuple[Run, Summary]] = []
    unreadable = []
    for folder, run in list_runs(results=results):
        try:
            if isinstance(run, HarnessError):
                raise run
            runs.append((run, read_summary(folder)))
        except HarnessError as error:
            unreadable.append(error.what)
    same_work: dict[tuple[str, str, str, bool], list[tuple[Run, Summary]]] = {}
    for run, summary in runs:
        key = (run.scenario_name, run.scenario.model, run.workload_sha256, run.simulated)
        same_work.setdefault(key, []).append((run, summary))
    groups = [_make_group(members) for _, members in sorted(same_work.items())]
    own = results / THIRD_PARTY
    return Board(
        machines=dict(
            sorted({run.server_machine.name: describe_machine(run.server_machine) or "" for run, _ in runs}.items())
        ),
        groups=sorted(
            (group for group in groups if group.entries),
            key=lambda group: (group.simulated, group.scenario, group.model),
        ),
        figures=read_figures(own if own.exists() else shipped / THIRD_PARTY),
        unreadable=unreadable,
        manifests={run.id: manifest_facts(run) for run, _ in runs},
    )


def read_figures(path: Path) -> list[Figure]:
    """The third-party figures in a file; none without one. Raises HarnessError for a damaged one."""
    try:
        raw = yaml.safe_load(read_text(path))
        return msgspec.convert(raw["figures"], list[Figure])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise HarnessError(
            f"{path}: cannot be read ({reason_of(error)})", next_step="The file was changed or damaged."
        ) from None


def _make_group(members: Sequence[tuple[Run, Summary]]) -> Group:
    newest = max((run for run, _ in members), key=lambda run: run.started_wall_s)
    loads = [run.scenario.loads[row.load] for run, summary in members for row in summary.rows]
    metric = "ttft_p50" if any(map(is_paced, loads)) else work_metric(loads)
    entries = [_make_entry(run, summary, row, metric) for run, summary in members for row in summary.rows]
    entries.sort(key=_rank_key)
    best: dict[str, Entry] = {}
    for entry in entries:
        if entry.ranked:
            best.setdefault(entry.machine, entry)
    marked = [replace(entry, best=best.get(entry.machine) is entry) for entry in entries]
    return Group(
        scenario=newest.scenario_name,
        question=newest.scenario.question,
        model=newest.scenario.model,
        workload_sha256=newest.workload_sha256,
        simulated=newest.simulated,
        metric=metric,
        entries=marked,
        power=power_note([run for run, _ in members]),
    )


def _rank_key(entry: Entry) -> tuple[bool, float, str, str, str, str]:
    """Best first; entries without a rank last."""
    value = (entry.mean or 0.0) * (-1 if METRICS[entry.metric].more_is_better else 1)
    return not entry.ranked, value, entry.machine, entry.server, entry.load, entry.run


def _make_entry(run: Run, summary: Summary, row: Row, metric: str) -> Entry:
    cells = {cell.id: cell for cell in summary.cells}
    values = [value for value in metric_values(row, cells, metric) if value]
    mean = estimate_row(row, cells, metric)
    served: ServedBy | None = next((cell.served_by for cell in run.served if cell.server == row.server), None)
    numbers = row.pooled
    valid = summary.valid is True and run.status == "valid"
    return Entry(
        machine=run.server_machine.name,
        server=row.server,
        load=row.load,
        metric=metric,
        values=values,
        mean=None if mean is None else mean.value,
        low=None if mean is None else mean.low,
        high=None if mean is None else mean.high,
        power=power_text(run.server_machine),
        output_tok_s=_mean(row, cells, "output_tok_s"),
        ttft_p50=_mean(row, cells, "ttft_p50"),
        errors=numbers.failed,
        date=format_date(run.started_wall_s),
        run=run.id,
        image_digest=served.image_digest if served else None,
        version=served.version if served else None,
        valid=valid,
        client_limited=row.client_limited,
        client_error=largest_error(row),
        ranked=valid and mean is not None and not is_client_limited(row, metric),
    )


def _mean(row: Row, cells: Mapping[str, CellSummary], metric: str) -> float | None:
    estimate = estimate_row(row, cells, metric)
    return None if estimate is None else estimate.value


def board_page(board: Board) -> list[Element]:
    """The best row of each machine, the ranking of each group, and the figures of others."""
    unreadable = [Bullet(f"not readable: {text}", "inconclusive") for text in board.unreadable]
    page: list[Element] = [
        Paragraph("Best row of each machine and scenario", "title"),
        *([Paragraph(RANKING, "fine"), _best_grid(board)] if board.groups else [Paragraph(EMPTY, "fine")]),
        *([Bullets(unreadable)] if unreadable else []),
    ]
    for group in board.groups:
        about = f"{group.question} Ranked by {group.ranked_by}. The best row of each machine is marked."
        page += [Paragraph(group.heading, "heading"), Paragraph(about, "fine")]
        page += simulated_note(group.simulated)
        page += [] if group.power is None else [Paragraph(f"Warning: {sentence(group.power)}", "warning")]
        page.append(_ranking_grid(group))
        page.append(_manifest_fold(board, group))
    page += [Paragraph(board.limited_note, "fine")] if board.limited_note else []
    if board.figures:
        figures = plain_grid(FIGURE_HEAD, [figure.cells for figure in board.figures])
        hint = "`harness results --format markdown`"
        page.append(Fold("Third-party figures", [Paragraph(APART, "warning"), figures], hint))
    return page


def _manifest_fold(board: Board, group: Group) -> Fold:
    """What each run of a group ran on and with."""
    parts: list[Element] = []
    for run in dict.fromkeys(entry.run for entry in group.entries):
        facts = board.manifests[run]
        parts.append(Paragraph(run, "part"))
        parts.append(plain_grid(["What", "Value"], [[name, text] for name, text in facts.items()]))
    return Fold("Machine, software and settings of each run", parts, "`harness results --format markdown`")


def _best_grid(board: Board) -> Grid:
    """By group and machine the best row."""

    def cell(group: Group, machine: str) -> str:
        best = group.best_of(machine)
        return units.NOTHING if best is None else f"{best.mean_text}: {best.server} / {best.load}, {best.date}"

    machines = [f"{name} ({what})" if what else name for name, what in board.machines.items()]
    rows = [
        [group.heading + (" (SIMULATED)" if group.simulated else ""), *(cell(group, name) for name in board.machines)]
        for group in board.groups
    ]
    return plain_grid(["Scenario", *machines], rows)


def _ranking_grid(group: Group) -> Grid:
    columns = [TableColumn(key, title, group=kind) for key, title, kind in RANKED]
    return Grid(
        columns=columns,
        rows=[[row[column.title] for column in columns] for row in group.rows],
        styles=["best" if entry.best else "" if entry.ranked else "unusable" for entry in group.entries],
        below=[", ".join(f"{title} {row[title]}" for title in ORIGIN) for row in group.rows],
    )


def add_result(folder: Path, results: Path, *, records: bool = False) -> tuple[Path, list[str]]:
    """Write summary.json, run.json and report.md of a run below `results`, with `records` its requests packed, too.

    Returns the folder and the names of the files; a run that is filed again gives the same files. Raises RunError
    for a run that is not VALID, HarnessError for one that has no place there.
    """
    run = read_run(folder)
    summary = analyse(folder).summary
    _refuse_result(folder, run, summary)
    target = results.joinpath(*map(folder_name, (run.server_machine.name, run.scenario_name, run.id)))
    files = {
        "run.json": pretty_json(run),
        "summary.json": pretty_json(summary),
        "report.md": render(run_page(summary, run, read_searched(folder, summary, run))).encode(),
    }
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_file(target / name, content)
    names = list(files)
    if records and (folder / RECORDS).exists():
        _pack(folder / RECORDS, target / f"{RECORDS}.gz")
        names.append(f"{RECORDS}.gz")
    return target, names


def result_card(folder: Path, shipped: Collection[str]) -> str:
    """Return the card of a run in Markdown. `shipped`: names of the scenarios that ship.

    Raises RunError for a run that is neither VALID nor imported.
    """
    run, summary = read_run(folder), summary_of(folder)
    refuse_invalid(folder, run, summary, "has a card")
    refuse_search(folder, run, "has a card")
    asks_starts = any(server.caches is not None for server in run.scenario.servers.values())
    answers = startup_facts(analyse(folder).summary.answers)[0] if asks_starts else []
    texts = [code(answer.text) for answer in answers]
    duration = work_options(read_inputs(folder)).get("--duration")
    return render_card(run, summary, _repeat_command(run, duration, is_shipped=run.scenario_name in shipped), texts)


def _repeat_command(run: Run, duration: str | None, *, is_shipped: bool) -> str:
    """Return the command that sends the same requests again, to a server of the reader."""
    runs_already = any(cell.served_by.template is None for cell in run.served)
    options = ["--url", "URL", "--model", run.scenario.model] if runs_already else []
    if run.scenario_name == QUICK:
        return command_line("harness", "quick", "URL", *combination_words(run.scenario))
    options += [] if duration is None else ["--duration", duration]
    for trace in [load.agent_trace for load in run.scenario.loads.values() if load.agent_trace is not None][:1]:
        options += ["--trace", Path(trace.file).name]
        options += [] if trace.conversations is None else ["--slice", str(trace.conversations)]
    return command_line("harness", "run", run.scenario_name if is_shipped else f"{run.scenario_name}.yaml", *options)


def _refuse_result(folder: Path, run: Run, summary: Summary) -> None:
    if run.origin is not None:
        raise HarnessError(
            f"{run.id}: was imported from {run.origin.tool}, and imports are not ranked with runs of this suite",
            next_step="File runs of `harness run`.",
        )
    refuse_invalid(folder, run, summary, "is filed")
    refuse_search(folder, run, "is filed")
    if summary.starts:
        raise HarnessError(
            f"{run.id}: it asks how long servers take to start, and results are ranked by their speed under load",
            next_step=f"`{command_line('harness', 'results', 'card', folder)}` prints its answer as Markdown.",
        )


def _pack(source: Path, path: Path) -> None:
    """Pack a file. Equal records give equal files: no name, no time."""
    temporary = path.with_name(f"{path.name}.new")
    with (
        open_file(source) as plain,
        temporary.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
    ):
        shutil.copyfileobj(plain, packed)
    os.replace(temporary, path)
