"""`harness report SEARCH --check`: what a stored capacity search says about other SLOs. Nothing is run or written.

Each probe for the SLOs is cut into blocks again and decided for the new ones. A probe that ended
before these were decided counts for neither side, so it never bounds the answer. Requests in flight are not stored:
only ended requests, and those that the end of a probe cut, count.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.reason import Reason, because
from harness.base.units import count
from harness.numbers.summarize import Summarized
from harness.questions.capacity.blocks import RAMP_BLOCK_ANSWERS, BlockCutter, parse_slos
from harness.questions.capacity.decide import search_levels, slo_answer, with_broken
from harness.questions.capacity.level import SLO_PURPOSES, MeasuredProbe, Probe, blocks_needed
from harness.questions.capacity.page import format_loads, slo_reason
from harness.questions.capacity.record import CAPACITY_FILE, CapacityAnswer, CapacityReport, ServerCapacity
from harness.records.records import Request
from harness.records.run_data import RunData
from harness.scenario.check_syntax import Check
from harness.scenario.plan import load_of_part

STEP_S = 0.5  # between two cuts, as in the search


def parse(texts: Sequence[str], capacity: CapacityReport) -> list[Check]:
    """Parse checks as `harness capacity` does. Raises HarnessError."""
    return parse_slos(texts, [member.load for member in capacity.members])


def with_answers(
    analysis: Summarized, capacity: CapacityReport, slos: Sequence[Check]
) -> tuple[Summarized, CapacityReport]:
    """The same with the answers for the SLOs, in the summary and in the search."""
    if not slos:
        return analysis, capacity
    answers = [server_answer(analysis.data, capacity, server, slos) for server in capacity.servers]
    reasons = [reason for _, server_reasons in answers for reason in server_reasons]
    return analysis._replace(summary=replace(analysis.summary, what_if=reasons)), replace(
        capacity, servers=[replace(server, slo=slo) for server, (slo, _) in zip(capacity.servers, answers, strict=True)]
    )


def server_answer(
    data: RunData, capacity: CapacityReport, server: ServerCapacity, slos: Sequence[Check]
) -> tuple[CapacityAnswer, list[Reason]]:
    """The largest load of a server that meets the SLOs, and in words, with the probes that ended too early for them."""
    asked = [slo.text for slo in slos]
    stored = [probe for probe in server.probes if probe.purpose in SLO_PURPOSES]
    levels = search_levels(capacity.max_level, capacity.at_least_level)
    for measured in stored:
        is_planned = all(
            cell in data.planned and data.planned[cell].load in data.run.scenario.loads for cell in measured.cells
        )
        if measured.level not in levels or not measured.cells or not is_planned:
            raise HarnessError(
                f"{data.folder / CAPACITY_FILE}: a probe does not fit the run (level {measured.level})",
                next_step="Restore the file, or run `harness capacity` again.",
            )
    probes = [replay(data, probe, slos) for probe in stored]
    results = [probe.result(measured.cells) for probe, measured in zip(probes, stored, strict=True)]
    # Of several servers in a file from before, the SLOs of all but the first are not known.
    stored_slos = server.slos or (capacity.slos if len(capacity.servers) == 1 else [])
    if asked == stored_slos and server.slo is not None:  # the search saw the requests in flight, too
        answer, results, probes = server.slo, stored, []
    else:
        plain_answer = slo_answer(probes, capacity.max_level, capacity.at_least_level, complete=True)
        answer = with_broken(plain_answer, results, slos)
    text = f"{server.server}, {', '.join(asked)}: "
    reason = slo_reason(capacity, asked, answer, results, what_if=True)
    values = {**reason.values, "server": server.server, "slos": asked}
    return answer, [replace(reason, text=text + reason.text, values=values), *_too_short(capacity, server, probes)]


def _too_short(capacity: CapacityReport, server: ServerCapacity, probes: Sequence[Probe]) -> Iterator[Reason]:
    """For each level without a decision its longest probe."""
    decided = {probe.level for probe in probes if probe.state in ("pass", "fail", "died")}
    longest = {probe.level: probe for probe in sorted(probes, key=lambda probe: len(probe.blocks))}
    for level, probe in sorted(longest.items()):
        if level not in decided and probe.state == "stopped":
            had, needed = len(probe.blocks), blocks_needed(probe.shares, len(probe.blocks))
            text = f"{server.server}: the probe at {format_loads(capacity, probe.level)} ended too early to prove "
            text += f"anything, after {count(had, 'block')} of {needed} or more: only the estimate uses it"
            values = {"loads": capacity.loads_at(probe.level), "blocks": had, "needed": needed}
            yield because("what_if_too_short", text, server=server.server, **values)


def replay(data: RunData, measured: MeasuredProbe, slos: Sequence[Check]) -> Probe:
    """Decide the records of a stored probe for other SLOs. `stopped`: it ended too early for them."""
    names = [data.planned[cell].load for cell in measured.cells]
    loads = {load_of_part(name): data.run.scenario.loads[name] for name in names}
    is_ramp = measured.purpose == "ramp"
    cutter = BlockCutter(slos, loads, flush_s=0.0, answers=RAMP_BLOCK_ANSWERS if is_ramp else None)
    probe = Probe(measured.level, slos, purpose=measured.purpose, cutter=cutter)
    requests = sorted((request for cell in measured.cells for request in _requests(data, cell)), key=_end_s)
    # Later blocks have no requests that began in them.
    cut = [_end_s(request) for request in requests if request.error == "unfinished"]
    stopped_s = min(cut, default=max(map(_end_s, requests), default=0.0))
    for step, group in groupby(requests, key=lambda request: math.ceil(_end_s(request) / STEP_S)):
        probe.add_records(list(group))
        for block in probe.cutter.cut(min(step * STEP_S, stopped_s)):
            probe.add(block, probe.cutter.answer_s)
    failed = any(data.run.ran[cell].problems for cell in measured.cells if cell in data.run.ran)
    probe.end("died" if measured.state == "died" else "stopped")
    if failed and measured.state != "died":
        probe.state = "invalid"
    elif measured.unheld is not None:
        probe.fail(measured.unheld)
    return probe


def _requests(data: RunData, cell: str) -> Iterator[Request]:
    """The records of a cell, on the cell's clock."""
    cell_data = data.cells.get(cell)
    if cell_data is None:
        return
    for request in cell_data.fetch(np.sort(cell_data.rows.place).tolist()):
        yield replace(request, sent_s=request.sent_s + cell_data.clock.offset_s(request.process))


def _end_s(request: Request) -> float:
    return request.sent_s + request.ended_s
