"""Which requests met every SLO: counted request by request, for each set of SLOs that a check asks about."""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from harness.analysis import derive
from harness.analysis.derive import add_up
from harness.columns import LATENCIES
from harness.rundir.records import Request
from harness.scenario.check_syntax import Slo
from harness.summary import Attained, Numbers, median_of_known

# Whether all chunks came in one read or not: an SLO is about each request.
_OF_SLO = {column.check: derive.FORMULAS[column.field] for column in LATENCIES if column.slo} | {"tpot": derive.tpot_s}


class SloTally(msgspec.Struct, kw_only=True):
    """Counts of one cell's measured requests, by the name of the set."""

    sets: Mapping[str, tuple[Slo, ...]] = {}
    met: Counter[str] = msgspec.field(default_factory=Counter)
    met_ended: Counter[str] = msgspec.field(default_factory=Counter)  # of those that ended inside the window
    unknown: Counter[str] = msgspec.field(default_factory=Counter)
    left: Counter[str] = msgspec.field(default_factory=Counter)  # abandoned before any SLO was missed

    def add(self, request: Request) -> None:
        """Count a successful measured request; others met nothing."""
        for name, slos in self.sets.items():
            met = meets(request, slos)
            self.met[name] += met is True
            self.unknown[name] += met is None

    def add_ended(self, request: Request) -> None:
        """Count a successful request that ended inside the window, one of the warm-up as well."""
        for name, slos in self.sets.items():
            self.met_ended[name] += meets(request, slos) is True

    def add_abandoned(self, request: Request) -> None:
        for name, slos in self.sets.items():
            self.left[name] += not missed_before_leaving(request, slos)

    def merge(self, other: "SloTally") -> None:
        """Add those of another part of the file, which has the same sets."""
        add_up(self, other, given=("sets",))


def meets(request: Request, slos: Sequence[Slo]) -> bool | None:
    """Whether a successful request met every SLO. None: it missed none, but has a latency that is not known.

    An answer of a single token has no time per further token, and misses no bound on it; nor has one in a single chunk,
    such as a label and the end of sequence, which is a token and no chunk.
    """
    known = True
    for slo in slos:
        value = _OF_SLO[slo.latency](request)
        if value is None:
            known = known and slo.latency == "tpot" and (request.output_tokens == 1 or len(request.chunks_s) == 1)
        elif not (operator.le if slo.operator == "<=" else operator.lt)(value, slo.bound_s):
            return False
    return True if known else None


def missed_before_leaving(request: Request, slos: Sequence[Slo]) -> bool:
    """Whether an abandoned request had missed an SLO when the user left: one who leaves a slow one was not served."""
    for slo in slos:
        if slo.latency == "tpot":
            continue  # how many tokens came by then is not known
        value = _OF_SLO[slo.latency](request)
        if value is None:  # it had not come by then
            value = request.ended_s + (derive.late_s(request) if slo.latency.endswith("_sched") else 0.0)
        if value > slo.bound_s:
            return True
    return False


def attained(
    parts: Sequence[SloTally], sent: int, window_s: float | None, cells: Sequence[Numbers] = ()
) -> dict[str, Attained]:
    """What was attained by one cell, or by several pooled: then a goodput is the median over `cells`."""
    found: dict[str, Attained] = {}
    for name in parts[0].sets if parts else ():
        met, unknown = sum(part.met[name] for part in parts), sum(part.unknown[name] for part in parts)
        left = sum(part.left[name] for part in parts)
        if cells:
            goodput = median_of_known(cell.slos[name].goodput_req_s for cell in cells if name in cell.slos)
        else:
            goodput = None if not window_s else sum(part.met_ended[name] for part in parts) / window_s
        found[name] = Attained(
            met=met,
            left=left,
            unknown=unknown,
            attainment=met / (sent - left) if sent > left and not unknown else None,
            goodput_req_s=None if unknown else goodput,
        )
    return found
