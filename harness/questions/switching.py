"""What a change of model costs on a server with several models: the time to the first token after it."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean
from typing import NamedTuple

import numpy as np

from harness.base.files import open_file
from harness.base.reason import Reason, because
from harness.base.units import count, figures
from harness.engines import find_engine
from harness.numbers import formulas
from harness.numbers.comparison import ALPHA
from harness.numbers.stats import difference_of, t_quantile
from harness.numbers.summary import CellSummary
from harness.records.run_data import RunData
from harness.scenario import model_at

MAX_LOG_BYTES = 50_000_000
MIN_REQUESTS = 5  # with a change, and without, of a single run: fewer may be alike although the times differ


class ModelRequest(NamedTuple):
    """A measured request that got a first token."""

    cell: str  # or those of a mix that ran together
    model: str
    changed: bool  # the request before it was for another model
    ttft_s: float


class SwitchCost(NamedTuple):
    """The mean extra time to the first token after a change, with its 95 % interval, in seconds."""

    mean_s: float
    low_s: float | None  # None: too few requests for an interval
    high_s: float | None
    shown: str  # the interval in words, or why it has no interval
    repeated: bool


def switching_answers(data: RunData, cells: Sequence[CellSummary]) -> list[Reason]:
    """Return a sentence for each server and load, or mix, with requests for several models."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for cell in cells:
        if data.run.scenario.loads[cell.load].model is not None and not cell.problems and cell.again is None:
            runs = groups.setdefault((cell.server, cell.mix or cell.load), {})
            runs.setdefault(cell.group or cell.id, []).append(cell.id)
    answers = []
    for (server, load), runs in groups.items():
        requests = [request for group, names in runs.items() for request in _requests(data, group, names)]
        if (answer := _answer(server, requests, _logged(data, server, runs))) is not None:
            loads = {name for _, name in groups}
            text = f"{load}: {answer.text}" if len(loads) > 1 else answer.text
            answers.append(because("model_switch", text, load=load, **answer.values))
    return answers


def _requests(data: RunData, group: str, names: Sequence[str]) -> list[ModelRequest]:
    """The requests of cells that ran together, in the order of sending; those of the warm-up only show the model."""
    sent: list[tuple[float, str, bool, float]] = []
    for name in names:
        cell, load = data.cells[name], data.run.scenario.loads[data.planned[name].load]
        rows, counted = cell.rows, set(cell.counted.place.tolist())
        ttfts = np.where(rows.good, formulas.ttft(rows), math.nan).tolist()
        columns = zip(rows.sent_s.tolist(), rows.index.tolist(), rows.place.tolist(), ttfts, strict=True)
        for sent_s, index, place, ttft_s in columns:
            wall_s = cell.clock.wall_s(sent_s)
            sent.append((sent_s if wall_s is None else wall_s, model_at(load, index) or "", place in counted, ttft_s))
    sent.sort()
    models = [model for _, model, _, _ in sent]
    return [
        ModelRequest(group, model, model != before, ttft_s)
        for before, (_, model, is_counted, ttft_s) in zip([models[:1] and models[0], *models], sent, strict=False)
        if is_counted and not math.isnan(ttft_s)
    ]


def _logged(data: RunData, server: str, runs: Mapping[str, Sequence[str]]) -> dict[str, list[float]]:
    """The seconds of each eviction and load that a server's log has from the time of some cells."""
    engine = find_engine(data.run.scenario.servers[server].template)
    times = [data.run.ran[cell] for names in runs.values() for cell in names]
    by_kind: dict[str, list[float]] = {}
    for path in [
        data.folder / "logs" / f"{cell_run.id}.server.log" for cell_run in data.run.cells if cell_run.server == server
    ]:
        if engine is None or not engine.log.changes or not path.is_file():
            continue
        begun_s = dict.fromkeys(engine.log.changes, math.nan)
        with open_file(path) as file:
            for line in file.read(MAX_LOG_BYTES).decode("utf-8", "replace").splitlines():
                for kind, (start, end) in engine.log.changes.items():
                    if start in line:
                        begun_s[kind] = _stamp_s(line)
                    elif end in line and not math.isnan(took_s := _stamp_s(line) - begun_s[kind]):
                        if any(
                            cell_run.started_wall_s <= begun_s[kind] <= (cell_run.ended_wall_s or math.inf)
                            for cell_run in times
                        ):
                            by_kind.setdefault(kind, []).append(took_s)
                        begun_s[kind] = math.nan
    return by_kind


def _stamp_s(line: str) -> float:
    """The Unix time of the Docker Engine's stamp before a line; NaN without one."""
    try:
        return datetime.fromisoformat(f"{line.split('Z ', 1)[0][:26]}+00:00").timestamp()
    except ValueError:
        return math.nan


def _answer(server: str, requests: Sequence[ModelRequest], logged: Mapping[str, Sequence[float]]) -> Reason | None:
    """The mean extra time to the first token after a change of model. None without changes, or without others."""
    same = [request.ttft_s for request in requests if not request.changed]
    changed = [request for request in requests if request.changed]
    if not same or not changed:
        return None
    cost, alone_s = _cost(requests), fmean(same)
    waited = [request for request in changed if request.ttft_s > _longest_without_load_s(same)]
    by_model_s = {
        model: fmean(request.ttft_s for request in changed if request.model == model) - alone_s
        for model in sorted({request.model for request in changed})
    }
    after, difference = _ms(fmean(request.ttft_s for request in changed)), _ms(cost.mean_s)
    models = {request.model for request in requests}
    stay = sorted(by_model_s.keys() - {request.model for request in waited})
    if not waited:
        kept = "both" if len(models) == 2 else f"all {len(models)}"
        text = f"{server}: {kept} models stay loaded, no change waited (of {len(changed)}): the first token comes "
        text += f"after {after}, and after {_ms(alone_s)} without a change (difference {difference}; {cost.shown})"
    else:
        to = ", ".join(f"{_ms(extra_s)} to {name}" for name, extra_s in by_model_s.items())
        text = f"{server}: a change of model costs {difference} ({cost.shown}): the first token comes after "
        text += f"{after} instead of {_ms(alone_s)}; {len(waited)} of {count(len(changed), 'change')} waited for the "
        text += f"model, which had been evicted ({to}); "
        few = "one model is" if len(models) == 2 else f"fewer than {len(models)} models are"
        text += f"{', '.join(stay)} stayed loaded" if stay else f"{few} loaded at a time"
    if logged:
        means = [f"{kind} took {_ms(fmean(took_s))} (mean of {len(took_s)})" for kind, took_s in logged.items()]
        text += f"; by the server's log, each {' and each '.join(means)}"
    values = {"side": server, "cost_s": cost.mean_s, "low_s": cost.low_s, "high_s": cost.high_s}
    values |= {"changes": len(changed)}
    values |= {"logged_s": {kind: fmean(took_s) for kind, took_s in logged.items()}}
    values |= {"waited": len(waited), "stay": stay, "same_s": alone_s, "by_model_s": by_model_s}
    return because("model_switch", f"{text}.", **values, provisional=not cost.repeated)


def _longest_without_load_s(same: Sequence[float]) -> float:
    """A time to the first token beyond it is no noise of requests without a change: Tukey's far fence, in seconds."""
    low_s, middle_s, high_s = np.percentile(same, [25, 50, 75]).tolist()
    return float(max(high_s + 3 * (high_s - low_s), 1.5 * middle_s))


def _cost(requests: Sequence[ModelRequest]) -> SwitchCost:
    """The mean over runs of the cost in each, with Student's interval; of a single run by `_cost_of_requests`."""
    runs: dict[str, tuple[list[float], list[float]]] = {}
    for request in requests:
        runs.setdefault(request.cell, ([], []))[request.changed].append(request.ttft_s)
    costs = [fmean(changed) - fmean(same) for same, changed in runs.values() if same and changed]
    if len(costs) < 2:
        return _cost_of_requests(
            *([request.ttft_s for request in requests if request.changed is side] for side in (False, True))
        )
    mean_s, half_s = fmean(costs), t_quantile(1 - ALPHA / 2, len(costs) - 1) * _error_s(costs)
    return SwitchCost(mean_s, mean_s - half_s, mean_s + half_s, _interval_text(mean_s, half_s), repeated=True)


def _cost_of_requests(same: Sequence[float], changed: Sequence[float]) -> SwitchCost:
    """The difference of two means of a single run, with Welch's interval: both means are uncertain."""
    mean_s, basis = fmean(changed) - fmean(same), "one run, not repeated"
    few = [count(len(changed), "change")] * (len(changed) < MIN_REQUESTS)
    few += [f"{count(len(same), 'request')} without a change"] * (len(same) < MIN_REQUESTS)
    if few:
        shown = f"{basis}; no 95 % interval: {' and '.join(few)}, at least {MIN_REQUESTS} are needed"
        return SwitchCost(mean_s, None, None, shown, repeated=False)
    half_s = difference_of(0.0, [(_error_s(times), len(times) - 1) for times in (changed, same)]).half_width()
    shown = f"{basis}; {_interval_text(mean_s, half_s)}"
    return SwitchCost(mean_s, mean_s - half_s, mean_s + half_s, shown, repeated=False)


def _error_s(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _interval_text(mean_s: float, half_s: float) -> str:
    return f"95 % interval {_ms(mean_s - half_s)} to {_ms(mean_s + half_s)}"


def _ms(seconds: float) -> str:
    return f"{figures(1000 * seconds)} ms" if abs(seconds) < 1 else f"{figures(seconds)} s"
