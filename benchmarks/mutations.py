"""Seeded defects: one-line mutations of the product, each with the test files that must catch it.

    python benchmarks/mutations.py            all of them; about half an hour on two cores
    python benchmarks/mutations.py 7 23       only these
    python benchmarks/mutations.py --check    whether each anchor is still unique; applies and runs nothing

Each is applied in a temporary copy of the working tree, and only its test files run there. A mutation is found by its
text, wherever in harness/ that is. The test that caught it must pass without it. Exit code 1: one was missed, is not
known, or its text is not there exactly once.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("harness", "tests", "scenarios", "compose", "locustfiles", "docs", "examples", "results", "benchmarks")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "Dockerfile", "SECURITY.md")
TIMEOUT_S = 600


class Mutation(NamedTuple):
    """One defect."""

    area: str
    defect: str
    old: str
    new: str
    tests: str  # names of test files without `test_` and `.py`


MUTATIONS = [
    # Numbers of one request
    Mutation("numbers", "TPOT divides by all tokens, the first included",
             "steps = np.where(has_tpot & (after > 0), after, np.nan)",
             "steps = np.where(has_tpot & (after > 0), tokens, np.nan)", "formulas"),
    Mutation("numbers", "TPOT starts at the first chunk of a bundle, not at its last",
             "tpot_s: Floats = (rows.last_chunk_s - started_s) / steps",
             "tpot_s: Floats = (rows.last_chunk_s - rows.first_chunk_s) / steps", "arrivals"),
    Mutation("numbers", "E2E of a stream is the end of the response, not the last chunk",
             "np.where(rows.chunks > 0, rows.last_chunk_s, rows.ended_s), np.nan)",
             "rows.ended_s, np.nan)", "formulas"),
    Mutation("numbers", "tokens without text count as if a chunk carried them",
             "np.maximum(np.minimum(tokens, chunks), tokens - textless)",
             "tokens", "formulas"),
    Mutation("numbers", "send lag has the wrong sign",
             "0.0 - rows.scheduled_s",
             "rows.scheduled_s + 0.0", "formulas"),
    Mutation("numbers", "the share of tokens inside the window is too small",
             "(chunks_s <= to_s[at])).sum() / len(chunks_s)",
             "(chunks_s <= to_s[at])).sum() / (len(chunks_s) + 1)", "formulas"),
    Mutation("numbers", "an answer that is shorter than its fixed length is not noticed",
             "rows.output_tokens != rows.asked_tokens",
             "rows.output_tokens > rows.asked_tokens", "formulas"),
    # Numbers of a cell
    Mutation("numbers", "an answer that ends at the start of the window counts in it",
             "(cell.window_s[0] < ended_s) & (ended_s <= cell.window_s[1])",
             "(cell.window_s[0] <= ended_s) & (ended_s <= cell.window_s[1] + 1)", "summarize goodput"),
    Mutation("numbers", "tokens of unfinished requests are no longer in the rate",
             "rows.where(rows.error.is_in(None, *CUT))",
             "rows.where(rows.good)", "summarize goodput"),
    Mutation("numbers", "all tokens of a request count in the window, whenever they came",
             "(rows.output_tokens * shares)[has_tokens]",
             "rows.output_tokens[has_tokens]", "summarize"),
    Mutation("numbers", "a percentile is shown with one request too few",
             "name: percentile_at(name) if requests >= NEEDED[name] else None",
             "name: percentile_at(name) if requests >= NEEDED[name] - 1 else None", "summarize stats pooled"),
    Mutation("numbers", "a percentile is one rank too low",
             "index = int(np.searchsorted(shares, permille / 1000 - 1e-12))",
             "index = max(0, int(np.searchsorted(shares, permille / 1000 - 1e-12)) - 1)", "stats share_test"),
    Mutation("numbers", "an age that equals the bound is no miss",
             "reached = values_s >= slo.bound_s",
             "reached = values_s > slo.bound_s", "goodput"),
    Mutation("numbers", "a percentile of chunk gaps is one rank too low",
             "rank = max(1, -(-self.n * permille // 1000))",
             "rank = max(1, self.n * permille // 1000)", "scale"),
    Mutation("numbers", "attainment counts requests of which it is unknown as misses",
             "attainment=met / (len(results) - unknown)",
             "attainment=met / len(results)", "goodput same_numbers"),
    Mutation("numbers", "an SLO with < is met by its bound",
             'if slo.operator == "<=" else values_s < slo.bound_s',
             'if slo.operator == "<=" else values_s <= slo.bound_s', "goodput"),
    Mutation("numbers", "the achieved rate of an open loop is one request too high",
             "return (count - 1) / span_s",
             "return count / span_s", "open_loop arrivals"),
    Mutation("numbers", "energy is a rectangle and not a trapezoid sum",
             "(late[0] - early[0]) * (early[1] + late[1]) / 2", "(late[0] - early[0]) * early[1]",
             "telemetry telemetry_judged same_numbers"),
    Mutation("numbers", "the interval of a ratio is half as wide",
             "return math.exp(self.log_ratio - half_width), math.exp(self.log_ratio + half_width)",
             "return math.exp(self.log_ratio - half_width / 2), math.exp(self.log_ratio + half_width / 2)", "stats"),
    Mutation("numbers", "the first piece of a changing rate counts twice",
             "expected -= arrivals", "expected -= 0", "arrivals"),
    # Validity
    Mutation("validity", "missing requests do not make a run INVALID",
             "if load.requests is not None and numbers.sent != load.requests:",
             "if load.requests is not None and numbers.sent > load.requests:", "validity summarize"),
    Mutation("validity", "one percent more errors than allowed are fine",
             "if rate is not None and rate > allowed:", "if rate is not None and rate > allowed + 0.01:",
             "validity summarize"),
    Mutation("validity", "a tenth of the tokens may be missing on the server",
             "_TOKEN_DIFFERENCE = 0.01", "_TOKEN_DIFFERENCE = 0.1", "validity"),
    Mutation("validity", "heat may hold a GPU back half of the time",
             "_HEAT = 0.05", "_HEAT = 0.5", "telemetry_judged validity"),
    Mutation("validity", "records that a process sent and did not write are not missed",
             "if mark.sent is not None and mark.sent != recorded:",
             "if mark.sent is not None and mark.sent < recorded:", "validity"),
    Mutation("validity", "a killed load process is not noticed",
             "return sorted(starts - ends)", "return sorted(ends - starts)", "validity"),
    Mutation("validity", "a server that ran out of memory is fine",
             "if served.oom_killed:", "if served.oom_killed and served.restarts:", "validity"),
    Mutation("validity", "users that never came are fine",
             "if had < load.users and", "if had < 0 and", "validity"),
    Mutation("validity", "a load generator that sends 100 ms late is fine",
             "_SEND_LAG_S = 0.010", "_SEND_LAG_S = 0.100", "self_check validity client_limited"),
    Mutation("validity", "the loads of a mix are measured when the first one is warm",
             "return any(self._is_load_warming_up(", "return all(self._is_load_warming_up(", "sequencer"),
    Mutation("validity", "another process may hold nearly all GPU memory",
             "_FOREIGN_MEMORY = 0.25", "_FOREIGN_MEMORY = 0.95", "validity"),
    Mutation("validity", "planned cells that did not run are not missed",
             "return [] if run.status == \"live\" else [cell for cell in run.order if cell not in run.ran]",
             "return []", "summarize validity"),
    # Verdicts and checks
    Mutation("verdicts", "an effect inside the margin is called faster or slower",
             "return low > 1 + MARGIN or high < 1 / (1 + MARGIN)", "return low > 1 or high < 1", "compare"),
    Mutation("verdicts", "faster and slower are swapped",
             '"faster" if effect.log_ratio > 0 else "slower"', '"faster" if effect.log_ratio < 0 else "slower"',
             "compare"),
    Mutation("verdicts", "not significant is called same",
             "if _is_inside(low, high):", "if abs(effect.log_ratio) < margin:", "compare"),
    Mutation("verdicts", "wall times are compared as speeds",
             "value if METRICS[metric].more_is_better else 1 / value for value in values if value > 0",
             "value for value in values if value > 0", "compare"),
    Mutation("verdicts", "several comparisons are not corrected for",
             "corrected = iter(stats.holm(p_values))", "corrected = iter(p_values)", "compare"),
    Mutation("verdicts", "a row that is not valid gets a verdict",
             "row = next((row for row in rows if row.invalid is not None), None)", "row = None", "summarize junit"),
    Mutation("verdicts", "a gate passes where its interval contains the tolerance",
             "if low is not None and low > limit:", "if high is not None and high > limit:", "compare"),
    Mutation("verdicts", "a run is compared with its own copy",
             "if (run.id, run.started_wall_s) in seen:", "if False:", "compare"),
    Mutation("verdicts", "a check passes where its interval contains the bound",
             "if len(ends) == 1:", "if ends := {any(ends)}:", "checks check_intervals"),
    Mutation("verdicts", "a check of no row passes",
             'status="failed", code="no_row"', 'status="passed", code="no_row"', "checks"),
    # Parsing
    Mutation("parsing", "an event of several data lines is joined without a line end",
             'b"\\n".join(self._data)', 'b"".join(self._data)', "sse"),
    Mutation("parsing", "a line that ends in CR LF is two lines",
             'data = data.replace(b"\\r\\n", b"\\n").replace(b"\\r", b"\\n")',
             'data = data.replace(b"\\r", b"\\n")', "sse"),
    Mutation("parsing", "a stream that breaks off without [DONE] is complete",
             "if not answer.done and answer.finish is None:", "if answer.done and answer.finish is None:",
             "client outcomes fuzz"),
    Mutation("parsing", "an error event inside a stream is ignored",
             "if is_error_name(event.type):", "if False:", "client outcomes stream_errors fuzz"),
    Mutation("parsing", "an error that is no error object is ignored",
             'if _reports_error(value) else None', 'if False else None', "stream_errors"),
    Mutation("parsing", "the server's Retry-After has no upper limit",
             "return min(float(value), MAX_RETRY_AFTER_S)", "return float(value)", "retry_after"),
    Mutation("parsing", "an event of any size is kept in memory",
             "if self._data_bytes + len(self._rest) > MAX_EVENT_BYTES:", "if False:", "sse untrusted"),
    Mutation("parsing", "milliseconds in a check are read as seconds",
             "return number, unit, _parse_bound(number) / units[unit]",
             "return number, unit, _parse_bound(number)", "checks"),
    Mutation("parsing", "the speed of a trace is ignored",
             "self.at_s.append(since_s / trace.speed)", "self.at_s.append(since_s)", "traces"),
    Mutation("parsing", "the last length of a uniform distribution never comes",
             "return minimum + int(draw * (maximum - minimum + 1))", "return minimum + int(draw * (maximum - minimum))",
             "workload behaviour prompts"),
    Mutation("parsing", "chunks of an imported benchmark start at sending, not at the first token",
             "list(accumulate(detail.itls[index], initial=ttft))",
             "list(accumulate(detail.itls[index], initial=0.0))", "imports"),
    # Security
    Mutation("security", "the API key is shown in base64",
             "yield from {text, text.translate(_URL_SAFE)}", "yield from ()", "secrecy untrusted leaks"),
    Mutation("security", "a table starts a formula in a spreadsheet",
             'return f"\'{text}" if text.lstrip().startswith(_FORMULA) else text', "return text", "export untrusted"),
    Mutation("security", "a proxy of the environment gets the API key",
             "session.trust_env = False", "session.trust_env = True", "tls secrecy"),
    Mutation("security", "the web UI answers pages of other sites",
             'foreign = origin.lower() not in (f"http://{host}", f"https://{host}")', "foreign = False", "live_access"),
    Mutation("security", "a short token is accepted for the web UI",
             "if len(given) < _MIN_TOKEN or", "if len(given) < 1 or", "live_access"),
    Mutation("security", "any process is taken for the dead owner of a container",
             "if labels.get(HOST) != here[HOST]:", "if False:", "serve_labels"),
    Mutation("security", "a named pipe in place of a file is opened",
             "if not stat.S_ISREG(mode):", "if False:", "untrusted damaged_files bad_input"),
    Mutation("security", "HTML in a name reaches the page",
             "autoescape=True,", "autoescape=False,", "report_html untrusted"),
    # Lost load and lost records
    Mutation("load loss", "records that could not be written are dropped",
             "del self._lines[:written]", "self._lines.clear()", "recorder full_disk"),
    Mutation("load loss", "the last burst sends more than the planned requests",
             "number = max_slots if requests is None else max(0, min(max_slots, requests - first))",
             "number = max_slots if requests is None or first < requests else 0",
             "workload users"),
    Mutation("load loss", "the end mark counts records that were not written",
             'self._recorded_of[number] - self._pending * (number == len(self._cells) - 1)',
             "self._recorded_of[number]", "recorder full_disk"),
]  # fmt: skip


def places(root: Path, mutation: Mutation) -> list[Path]:
    """The files of the product that have the text, once for each time that they have it."""
    files = [path for folder in ("harness", "locustfiles") for path in (root / folder).rglob("*.py")]
    return [path for path in sorted(files) for _ in range(path.read_text().count(mutation.old))]


def copy_of(folder: Path) -> Path:
    """A copy of the working tree in which tests run."""
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "cache"))
    for name in FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    return folder


def test_files(root: Path, name: str) -> list[Path]:
    """The files of tests of that name which need neither Docker nor real engines."""
    return [path for part in ("unit", "engine", "e2e") for path in (root / "tests" / part).rglob(f"test_{name}.py")]


def result_of(copy: Path, mutation: Mutation) -> str:
    """Apply a mutation and run its tests: "caught by TEST", "MISSED", or why it is not known."""
    (place,) = places(copy, mutation)
    before = place.read_text()
    place.write_text(before.replace(mutation.old, mutation.new))
    try:
        done = _pytest(copy, *(str(path) for name in mutation.tests.split() for path in test_files(copy, name)))
    finally:
        place.write_text(before)
    if done is None:
        return "caught by a timeout"
    if done.returncode == 0:
        return "MISSED"
    failed = re.search(r"^(?:FAILED|ERROR) (tests/[^\s\[]+)", done.stdout, re.MULTILINE)
    if failed is None:
        return f"not known: pytest ended with {done.returncode}"
    test = failed[1]  # with all of its parameters
    again = _pytest(copy, test)
    if again is None or again.returncode:
        return f"not known: {test} fails without it, too"
    return f"caught by {test.removeprefix('tests/')}"


def _pytest(copy: Path, *tests: str) -> "subprocess.CompletedProcess[str] | None":
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None


def misplaced() -> Iterator[str]:
    """Mutations whose text is not in the product exactly once, and test files that do not exist."""
    for number, mutation in enumerate(MUTATIONS, 1):
        found = places(ROOT, mutation)
        if len(found) != 1:
            yield f"{number}: {mutation.defect}: found {len(found)} times: {mutation.old}"
        for name in mutation.tests.split():
            if not test_files(ROOT, name):
                yield f"{number}: {mutation.defect}: there is no test_{name}.py"


def main() -> int:
    """Apply the mutations that were asked for and print which of them were caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("numbers", type=int, nargs="*", help="numbers of mutations, from 1 (default: all)")
    parser.add_argument("--check", action="store_true", help="only check that each text is unique")
    given = parser.parse_args()
    wrong = list(misplaced())
    print(*wrong, sep="\n", end="\n" if wrong else "")
    if given.check:
        return bool(wrong)
    numbers = given.numbers or range(1, len(MUTATIONS) + 1)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(Path(folder))
        for number in numbers:
            mutation, started = MUTATIONS[number - 1], time.monotonic()
            result = "not applied" if len(places(copy, mutation)) != 1 else result_of(copy, mutation)
            missed += not result.startswith("caught")
            row = (number, mutation.area, mutation.defect, result)
            print("| " + " | ".join(map(str, row)) + f" | {time.monotonic() - started:.0f} s |", flush=True)
    print(f"{len(list(numbers)) - missed} of {len(list(numbers))} caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
