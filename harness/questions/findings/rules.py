"""What rules are made of: the facts of a row, a rule with its texts, and settings as a server's user writes them."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from harness.base.command_line import command_line, option_words
from harness.base.errors import HarnessError
from harness.base.files import RUNS_FOLDER, SCENARIOS, inline_yaml, open_file
from harness.base.reason import Reason, because
from harness.base.redact import HIDDEN
from harness.base.units import milliseconds
from harness.engines import Engine, engines, find_engine
from harness.engines.settings import (
    ENVIRONMENT,
    EXTRA_ARGUMENTS,
    changed_variables,
    known_options,
    load_command,
    running_setting,
    with_linked,
)
from harness.numbers.summary import Action, CellSummary, Row, RunFinding, Summary
from harness.questions.capacity.record import CAPACITY_FILE, read_capacity
from harness.records.columns import Floats, Rows
from harness.records.directory import INPUTS, read_inputs, server_options, work_options
from harness.records.manifest import QUICK, ServedBy
from harness.records.run_data import RunData
from harness.records.samples import MetricsSample, ServerLoad
from harness.run.running_server import combination_words, made_user
from harness.scenario import Load, Sweep, max_concurrency
from harness.scenario.plan import load_in_file

MAX_LOG_BYTES = 1_000_000
# What rows of the same requests may differ in: how many are sent at once, and for how long.
_AMOUNTS = {"users", "batch_size", "in_flight", "requests", "processes", "duration_s", "drain_s", "ramp_s"}


class RuleResult(NamedTuple):
    """What a rule found in a row; see RunFinding."""

    cost: float | None  # None: no number of this run shows it
    measured: str
    why: str
    actions: Sequence[Action]
    values: dict[str, Any]


class AdviceRule(NamedTuple):
    """A rule: its check of a row, and its texts. `when` and `actions` are for docs/findings.md."""

    code: str
    when: str
    means: str
    actions: str
    check: "Callable[[RowFacts], RuleResult | None]"
    requests: int = 0  # successful ones of a row, below which its times show nothing
    loss: str = ""  # what rules with the same cost have in common: their times are one time
    misleads: bool = False  # the run's own numbers mean something else than they say: listed first

    def finding(self, row: "RowFacts") -> RunFinding | None:
        result = self.check(row) if row.row.pooled.succeeded >= self.requests else None
        if result is None:
            return None
        return RunFinding(
            code=self.code,
            rows=[row.name],
            measured=result.measured,
            means=self.means,
            why=result.why,
            actions=list(result.actions),
            cost=None if result.cost is None else min(1.0, max(0.0, result.cost)),
            values=result.values,
        )


def rule(
    *, when: str, means: str, actions: str, requests: int = 0, loss: str = "", misleads: bool = False
) -> "Callable[[Callable[[RowFacts], RuleResult | None]], AdviceRule]":
    """Make a rule of a check of a row, whose name is the code of the finding."""
    return lambda check: AdviceRule(check.__name__, when, means, actions, check, requests, loss, misleads)


def gain(metric: str, factor: float, text: str) -> Reason:
    """What an action is expected to change: a metric, its value after / before, and the same in words."""
    return because("gain", text, metric=metric, factor=factor)


def _most_at_once(rows: Rows) -> int:
    """How many requests were in flight at the same time at most."""
    starts, ends = np.sort(rows.sent_s), np.sort(rows.sent_s + rows.ended_s)
    in_flight = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, "right")
    return int(in_flight.max(initial=0))


def _from_here(path: Path) -> Path:
    """Return a path relative to the working directory, where it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def shorter(metric: str, title: str, before_s: float, factor: float) -> Reason:
    """The gain of a time that becomes `factor` times as long."""
    text = f"{title} of about {milliseconds(before_s * factor)} instead of {milliseconds(before_s)} ms"
    return gain(metric, factor, text)


class RowFacts(Struct, frozen=True, dict=True):
    """What is known of a row: its numbers, load, server, samples and neighbours."""

    data: RunData
    summary: Summary
    row: Row
    run_rows: "list[RowFacts]" = []  # of all rows that were measured, this one included

    @property
    def name(self) -> str:
        return self.row.name

    @cached_property
    def load(self) -> Load:
        return self.data.run.scenario.loads[self.row.load]

    @property
    def load_key(self) -> str:
        """The key of the load in the scenario's file, which has none of a part, a stage or a row of a sweep."""
        name, swept = load_in_file(self.row.load), self.data.run.scenario.swept or Sweep()
        row = swept.loads.get(name)
        return f"loads.{name if row is None else row.of}"

    @property
    def server_key(self) -> str:
        """The key of the server in the scenario's file, which has none of a row of a sweep."""
        name, swept = self.row.server, self.data.run.scenario.swept or Sweep()
        row = swept.servers.get(name)
        return f"servers.{name if row is None else row.of}"

    @cached_property
    def in_flight(self) -> int:
        """The most requests that the load has in flight; of a live load, whose users change, that it had."""
        if self.data.run.status == "live":
            return max((_most_at_once(self.data.cells[name].rows) for name in self.row.cells), default=0)
        return max_concurrency(self.load)

    @cached_property
    def cells(self) -> list[CellSummary]:
        return [cell for cell in self.summary.cells if cell.id in self.row.cells and cell.failed is None]

    def most(self, field: str) -> float | None:
        """The largest value of the server's metrics over the cells."""
        loads: list[ServerLoad] = [cell.server_load for cell in self.cells]
        return max((value for load in loads if (value := getattr(load, field)) is not None), default=None)

    @cached_property
    def samples(self) -> list[MetricsSample]:
        """The samples of the server's metrics between the first and the last measured request of each cell."""
        samples = []
        for name in self.row.cells:
            cell, rows = self.data.cells[name], self.data.cells[name].counted
            zero_s = cell.clock.wall_s(0.0)
            if len(rows) and zero_s is not None:
                begin_s, end_s = zero_s + float(rows.sent_s.min()), zero_s + float((rows.sent_s + rows.ended_s).max())
                samples += [sample for sample in self.data.metrics.get(name, []) if begin_s <= sample.wall_s <= end_s]
        return samples

    def part_of(self, stage: Literal["prefill", "decode"]) -> float | None:
        """The share of the requests' time in a stage, by the server's times or else the first token; None: unknown."""
        split, numbers = self.row.time, self.row.pooled
        if split is not None and (stage_s := split.prefill_s if stage == "prefill" else split.decode_s) is not None:
            return stage_s / split.e2e_s
        if not numbers.e2e.mean or numbers.ttft.mean is None:
            return None
        first = min(1.0, numbers.ttft.mean / numbers.e2e.mean)
        return first if stage == "prefill" else 1 - first

    @cached_property
    def queued_part(self) -> float:
        """The share of the requests' time in the server's queue: by its times, else by its samples."""
        split = self.row.time
        if split is not None and split.queue_s is not None:
            return split.queue_s / split.e2e_s
        running, waiting = (
            sum(sample.values.get(name, 0.0) for sample in self.samples) for name in ("running", "waiting")
        )
        return waiting / (running + waiting) if running else 0.0

    @cached_property
    def drafts(self) -> tuple[float, float]:
        """How many tokens speculation drafted while the row was measured, and how many of them were accepted."""
        drafted = accepted = 0.0
        for _, samples in groupby(self.samples, key=lambda sample: sample.cell):
            counters = [sample.values for sample in samples if "drafted_tokens" in sample.values]
            if len(counters) > 1:
                drafted += counters[-1]["drafted_tokens"] - counters[0]["drafted_tokens"]
                accepted += counters[-1].get("accepted_tokens", 0.0) - counters[0].get("accepted_tokens", 0.0)
        return drafted, accepted

    @cached_property
    def tokens(self) -> Floats:
        """Prompt and answer of each successful request in tokens, where they are known; increasing."""
        counted = [self.data.cells[name].counted for name in self.row.cells]
        together = np.concatenate([*((rows.prompt_tokens + rows.output_tokens)[rows.good] for rows in counted), []])
        return np.sort(together[~np.isnan(together)])

    @cached_property
    def kv_tokens(self) -> int | None:
        """The tokens that the KV cache holds; None: not known."""
        startup = self.served.startup
        if startup is None:
            return None
        if startup.kv_cache_tokens is None and startup.kv_cache_blocks and startup.kv_block_size:
            return startup.kv_cache_blocks * startup.kv_block_size
        return startup.kv_cache_tokens

    @cached_property
    def sequences_that_fit(self) -> int | None:
        """How many of the row's longer requests (p95) the KV cache holds at once; None: not known."""
        if self.kv_tokens is None or not len(self.tokens):
            return None
        return max(1, int(self.kv_tokens / float(np.percentile(self.tokens, 95))))

    @cached_property
    def neighbours(self) -> "list[RowFacts]":
        """The valid rows of this server with the same requests, of which more or fewer are sent at once."""
        rows = [
            other for other in self.run_rows if other.row.server == self.row.server and other.row.load != self.row.load
        ]
        valid = [other for other in rows if other.row.invalid is None]
        fields = [name for name in Load.__struct_fields__ if name not in _AMOUNTS]
        return [
            other for other in valid if all(getattr(other.load, name) == getattr(self.load, name) for name in fields)
        ]

    @cached_property
    def served(self) -> ServedBy:
        """The server of the last cell that had one."""
        served = [cell.served_by for cell in self.data.run.cells if cell.id in self.row.cells and cell.served_by.url]
        return served[-1] if served else ServedBy(url="")

    @cached_property
    def engine(self) -> Engine | None:
        """The engine that computes; None: not known."""
        name = None if self.served.startup is None else self.served.startup.engine
        named = next((engine for engine in engines() if engine.name == name), None)
        return named or (None if self.served.template is None else find_engine(self.served.template))

    @cached_property
    def front(self) -> Engine | None:
        """The server type that is configured: that of the engine, or the one that started it."""
        if self.served.template is not None:
            return find_engine(self.served.template)
        fronts = (engine for engine in engines() if engine.options and engine.options.known_by in self.served.effective)
        return next(fronts, None) or self.engine

    @cached_property
    def shares_context(self) -> bool:
        """Whether the engine's slots share its context, so that each has a part of it."""
        templates = [] if self.engine is None else self.engine.templates.values()
        return any(template.context is not None and template.context.slots is not None for template in templates)

    @property
    def title(self) -> str:
        """The engine in a sentence."""
        return "the server" if self.engine is None else self.engine.title

    def setting(self, name: str) -> Any:
        """A setting of the engine, by its name in the engine's file; None: not known."""
        if self.engine is None:
            return None
        return running_setting(self.engine, name, self.served.effective, self.served.arguments)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The environment that the scenario gives the server's container."""
        given = self.data.run.scenario.servers[self.row.server].variables.get("environment")
        return dict(given) if isinstance(given, dict) else {}

    def variable(self, name: str) -> str | None:
        """A variable of the environment, of the scenario or else of the image; None: it is not set, or not known."""
        contents = self.served.contents
        value = self.environment.get(name, None if contents is None else contents.environment.get(name))
        return None if value is None else str(value)

    @cached_property
    def log(self) -> str:
        """The start of the server's log, of the first cell of this server that has one."""
        cells = [cell.id for cell in self.data.run.cells if cell.server == self.row.server]
        paths = [self.data.folder / "logs" / f"{cell}.server.log" for cell in cells]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return ""
        with open_file(path) as file:
            return file.read(MAX_LOG_BYTES).decode("utf-8", "replace")

    def whole(self, name: str) -> int | None:
        """A setting that is a positive whole number; None: not known."""
        value = self.setting(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def default(self, name: str) -> int | None:
        """The engine's own number for a setting that is not given; None: not known."""
        spelled = None if self.engine is None else self.engine.settings.get(name)
        value = None if spelled is None or spelled.tune is None else spelled.tune.default
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def action(
        self, do: str, changes: dict[str, Any] | None = None, *, settings: dict[str, str] | None = None,
        gain: Reason | None = None, risk: str = "", about: str = "", verify: str = "",
    ) -> Action:  # fmt: skip
        """An action: `changes` of the engine's settings, by name (None: to the value of the engine's file), or other
        `settings`. `about`: the key in which the next run will differ.
        """
        engine_settings = {} if self.engine is None else self.engine.settings
        has = {
            name: engine_settings[name].value if value is None else value
            for name, value in (changes or {}).items()
            if name in engine_settings
        }
        about = about or ("" if changes is None else "effective" if self.served.template is None else "variables")
        return Action(
            do=do,
            settings=(settings or {}) | self._spell(has),
            commands=self._spell_load(has),
            changes=has,
            gain=gain,
            risk="; ".join(filter(None, [risk, *(engine_settings[name].risk for name in has)])),
            verify=verify or (self.verify(about) if about else self.run_again),
        )

    def warm_up(self, do: str, gain: Reason | None = None) -> Action:
        """A warm-up until the server is steady."""
        settings = {"the scenario": "warmup: {until: steady}"}
        return self.action(do, settings=settings, gain=gain, risk="the run takes longer")

    def can_try(self, changes: dict[str, Any]) -> bool:
        """Whether `harness tune RUN` can try these settings: it can start the server again, or set the running one."""
        if self.engine is None or self.front is None or not (self.data.folder / INPUTS).exists():
            return False
        tuned = [spelled.tune for name in changes if (spelled := self.engine.settings.get(name)) is not None]
        is_settable = self.served.template is not None or self.front.options is not None
        return is_settable and any(tune is not None and not tune.answers for tune in tuned)

    def verify(self, about: str) -> str:
        """The commands that measure the same again and compare. `about`: the key in which the runs will differ."""
        compare = ["harness", "compare", self.data.run.id, "NEW", "--about", about, *self.where]
        return f"{self.run_again}; {command_line(*compare)}"

    @property
    def is_quick(self) -> bool:
        """Whether the requests are those of `harness quick`, which say nothing about the user's own."""
        return self.data.run.scenario_name == QUICK and self.served.template is None

    @property
    def where(self) -> list[object]:
        """The option that names the folder of the run, if it is not the usual one."""
        return [] if self._runs_folder is None else ["--runs", self._runs_folder]

    @property
    def run_again(self) -> str:
        run, is_capacity = self.data.run, (self.data.folder / CAPACITY_FILE).exists()
        work = [] if is_capacity else [*option_words(work_options(self._inputs))]
        search = self._capacity_options
        url = self.served.url if self.served.template is None else ""  # of a server that ran already
        access = self._access_words(run.scenario.api_key_env)
        server = ["--url", url, *access] if url else []
        if url and self.is_quick:
            if work or "--metrics-url" in access:  # `harness quick` has neither: it was `harness run --url`
                return command_line("harness", "run", *work, *server)
            return command_line("harness", "quick", url, *combination_words(run.scenario), *access)
        user = made_user(run.scenario)
        if is_capacity and server and user is not None:  # it was made for the running server
            return command_line("harness", "capacity", *server, "--user", user, *search)
        kind = "capacity" if is_capacity else "run"
        server = ["--url", url, *self._access_words(None)] if url else self.where  # the scenario names its key itself
        return command_line("harness", kind, self._scenario_word, *work, *server, *search)

    @cached_property
    def _capacity_options(self) -> list[str]:
        """What a capacity search was asked, as its options; none for another run, or where its file is damaged."""
        try:
            report = read_capacity(self.data.folder)
        except (HarnessError, OSError):
            return []
        return [] if report is None else report.options

    def _access_words(self, key_name: str | None) -> list[object]:
        """The options by which a command measures the server, which ran already, in the same way. `key_name`: of the
        environment variable with its key.
        """
        recorded = server_options(self._inputs)
        ca = {"--ca": _from_here(Path(recorded["--ca"]))} if "--ca" in recorded else {}
        given = {"--model": self.data.run.scenario.model, "--api-key-env": key_name} | recorded | ca
        return [*option_words(given), *self.where]

    @property
    def _scenario_word(self) -> str | Path:
        """The scenario as a command takes it: the name of one that ships, else the file that was run."""
        run = self.data.run
        path = self._inputs.get("scenario")
        if not isinstance(path, str):
            return Path(f"{run.scenario_name}.yaml")
        if Path(path).parent == SCENARIOS:
            return run.scenario_name
        return _from_here(Path(path))

    @cached_property
    def _inputs(self) -> dict[str, Any]:
        return read_inputs(self.data.folder)

    @property
    def _runs_folder(self) -> Path | None:
        """The folder of a run that is not in the usual one; None: it is, or it was imported or filed."""
        folder = self.data.folder.resolve().parent
        return _from_here(folder) if self._inputs and folder != RUNS_FOLDER.resolve() else None

    def _spell(self, changes: dict[str, Any]) -> dict[str, str]:
        """By place the text that makes these changes, as this server is configured."""
        if self.engine is None or self.front is None or not changes:
            return {}
        if self.front.options is not None:
            return {} if self.served.template is None else self._lines(self._options_with(changes))
        wanted = with_linked(self.front, self.engine, changes)
        variables = self._known_variables
        changed = changed_variables(self.front, self.engine, variables, wanted)
        words = [] if EXTRA_ARGUMENTS in variables else changed.pop(EXTRA_ARGUMENTS, [])
        lines = self._lines({name: value for name, value in changed.items() if name in variables})
        return lines | ({f"arguments of {self.title}": command_line(*words)} if words else {})

    @cached_property
    def _known_variables(self) -> dict[str, Any]:
        """The variables that the template of the server has, with their values."""
        if self.served.template is None:
            return {}
        from harness.serve.template import all_variables  # imports Docker's client, which most reports do not need

        server = self.data.run.scenario.servers[self.row.server]
        return all_variables(replace(server, template=self.served.template))

    def _lines(self, variables: dict[str, Any]) -> dict[str, str]:
        """By place the lines of a scenario that give these variables of the server."""
        lines = [f"{name}: {inline_yaml(value)}" for name, value in variables.items()]
        return {f"{self.server_key}.variables": "\n".join(lines)} if lines else {}

    def _spell_load(self, changes: dict[str, Any]) -> dict[str, str]:
        """By place the command that loads the model with these changes."""
        if self.front is None or not (options := self._options_with(changes)):
            return {}
        scenario, is_ours = self.data.run.scenario, self.served.template is not None
        url, key_env = (None, None) if is_ours else (self.served.url, scenario.api_key_env)
        return load_command(self.front, url, key_env, self.served.model or scenario.model, options)

    def _options_with(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The options of a load: those in use with these changes; empty where they change nothing, or are secret."""
        if self.engine is None or self.front is None or self.front.options is None or not changes:
            return {}
        used = self.served.effective.get(self.front.options.known_by)
        options = known_options(self.front, used if isinstance(used, dict) else {})
        wanted = with_linked(self.front, self.engine, changes)
        changed = changed_variables(self.front, self.engine, options, wanted)
        changed = {name: "" if value is None else value for name, value in changed.items() if name != ENVIRONMENT}
        entry = options | changed
        return {} if entry == options or HIDDEN in str(entry) else entry  # a secret argument, which is in no file
