"""The leaderboard as one HTML page that needs nothing else, and as Markdown."""

from pathlib import Path

from markupsafe import Markup

from harness import units
from harness.compare.board import Board, Entry, Figure, Group
from harness.errors import HarnessError
from harness.files import replace_file
from harness.judge.verdicts import METRIC_WORDS, RATES
from harness.report import words
from harness.report.markdown import escape, grid
from harness.report.page import asset, template
from harness.report.table import LIMITED

RANKING = (
    "A ranking is no verdict: it says who was fastest, not whether the difference is more than chance. "
    "`harness compare RUN RUN --across machine` judges that."
)
APART = (
    "Figures that others published, as they state them. They were not measured by this suite, nobody repeated them "
    "here, workloads differ from row to row, and they never enter a verdict or a ranking."
)
EMPTY = "Nothing has been published yet: `harness publish RUN` files a run."
_DIGEST = 12


def write_board(board: Board, path: Path) -> list[Path]:
    """Write the page, and Markdown of the same name beside it. Returns both paths. Raises HarnessError."""
    beside = path.with_suffix(".md")
    if beside == path:
        raise HarnessError(f"{path}: is the name of the Markdown beside the page", next_step="Give a name in .html.")
    try:
        for target, text in ((path, html(board)), (beside, markdown(board))):
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, text.encode())
    except OSError as error:
        raise HarnessError(
            f"--output: {path} cannot be written ({error.strerror})", next_step="Name a file in a folder of yours."
        ) from None
    return [path, beside]


def html(board: Board) -> str:
    """The page."""
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


def value(entry: Entry, group: Group) -> str:
    """The median of a row by the group's metric, with its unit."""
    return units.NOTHING if entry.value is None else _marked(_unit(entry.value, group), group.metric, entry)


def rate(entry: Entry) -> str:
    """The median of the output tokens a second."""
    if entry.output_tok_s is None:
        return units.NOTHING
    return _marked(units.significant(entry.output_tok_s), "output_tok_s", entry)


def first_token(entry: Entry) -> str:
    """The p50 of TTFT in ms."""
    return units.NOTHING if entry.ttft_p50_s is None else _marked(units.milliseconds(entry.ttft_p50_s), "ttft_s", entry)


def validity(entry: Entry) -> str:
    if not entry.valid:
        return "INVALID"
    return "VALID" if entry.ranked or entry.value is None else "CLIENT-LIMITED"


def limited(group: Group) -> str | None:
    """What the mark of a limited number means, where there is one."""
    there = any(entry.client_limited for entry in group.entries)
    return f"{LIMITED} the load generator was the limit of this number, not the server." if there else None


def _marked(shown: str, field: str, entry: Entry) -> str:
    return f"{shown}{LIMITED}" if field in entry.client_limited else shown


def spread(entry: Entry, group: Group) -> str:
    """The least and the most of the repeats."""
    if entry.least is None or entry.most is None:
        return units.NOTHING
    return f"{_unit(entry.least, group)} to {_unit(entry.most, group)}"


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


def _unit(number: float, group: Group) -> str:
    if group.metric in RATES:
        return f"{units.significant(number)} tok/s"
    return units.seconds(number) if group.metric == "wall_s" else f"{units.milliseconds(number)} ms"


def _matrix(board: Board) -> str:
    lines = []
    for group in board.groups:
        cells = [heading(group) + (" (SIMULATED)" if group.simulated else "")]
        for machine in board.machines:
            best = group.best_of(machine)
            shown = units.NOTHING if best is None else f"{value(best, group)}: {best.server} / {best.load}, {best.date}"
            cells.append(shown)
        lines.append(cells)
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
