"""What is measured of a cell or a row: its Numbers, and what they are made of."""

import statistics
from collections.abc import Iterable
from typing import Literal, NamedTuple

from msgspec import Struct

from harness.base.reason import Reason


class Percentile(NamedTuple):
    """A percentile of a latency."""

    permille: int
    needed: int  # requests, for 99 % confidence; the rule is stats.samples_needed, and a test compares them

    @property
    def percent(self) -> int:
        return self.permille // 10

    @property
    def share(self) -> float:
        return self.permille / 1000


# The percentiles of a latency, the lowest first. Each list of statistics follows from this one.
PERCENTILES = {
    "p50": Percentile(500, 11), "p90": Percentile(900, 64), "p95": Percentile(950, 130), "p99": Percentile(990, 662),
}  # fmt: skip
NEEDED = {name: percentile.needed for name, percentile in PERCENTILES.items()}
TAIL_PERCENTILES = tuple(name for name in reversed(PERCENTILES) if name != "p50")  # the highest first


def median_of_known(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None if all are unknown."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


class LogSpread(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The logarithms of latencies, or of latencies relative to a bound, and their ends: "far below the bound"."""

    n: int  # requests with a value
    mean: float  # of the logarithms
    sd: float
    min: float | None  # no request has less; None: not known
    max: float | None  # no request has more, or was older when it was cut; None: a request failed
    open: int = 0  # requests that were cut, or whose latency is not known


class Distribution(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exact statistics of a sample, in its own unit. A percentile that the sample cannot carry is None.

    The chunk gaps of one request are not independent, so the number of requests decides which of their percentiles the
    sample carries.
    """

    n: int  # values in the sample
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    # The 90 % interval of each percentile: bounds below it fail; with 60 requests, bounds above it pass. None: no bound
    # on that side. Failed requests are above every bound. Also that of the mean where requests are censored or unknown,
    # and the ages of the youngest and the oldest cut request (`cut`). Without an entry: chunk gaps, and numbers that
    # another tool computed.
    intervals: dict[str, tuple[float | None, float | None]] = {}
    censored: int = 0  # requests that were cut before this latency ended; percentiles count them (Kaplan-Meier)
    unknown: int = 0  # other requests without it, such as the TTFT of an answer that was not streamed
    at_most: int = 0  # other requests of which an upper bound is known, as for the TPOT of an answer in one piece
    above: float | None = None  # age of the oldest cut request, if no value is larger: the maximum, and percentiles
    # that are None although the sample carries them, are above it
    effect: float | None = None  # so many dependent requests count as one in the intervals (design effect)
    blocks: int | None = None  # of requests, whose means it is also estimated from if there are 8 or more
    spread: LogSpread | None = None  # None: no value, numbers of another tool, or a summary of an earlier version

    @property
    def known_count(self) -> int:
        """Requests that a percentile is of."""
        return self.n + self.censored


NO_SAMPLE = Distribution(n=0)


class SloAttainment(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The number of sent requests that met every SLO of a set.

    Failed requests did not, nor did unfinished and abandoned ones whose age reached a bound.
    """

    met: int
    unknown: int = 0  # cut before an SLO was met or missed, or without a latency that an SLO bounds
    attainment: float | None = None  # met / (sent - unknown)
    goodput: float | None = None  # requests that met every SLO and ended inside the window / window
    effect: float | None = None  # so many dependent requests count as one; None: a summary of an earlier version
    spread: LogSpread | None = None  # of the latencies relative to their bounds, of several bounds the worst


class ScheduleKept(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the schedule of an open loop was kept, in requests; for an own locustfile in arrivals. None: not known."""

    planned: int | None = None  # with a time in the schedule
    sent: int = 0
    never_sent: int | None = None  # because all users were busy until the end
    asked_per_s: float | None = None
    achieved_per_s: float | None = None


class Answers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The successful answers that were asked for in a form: how many have it, and how many are right."""

    checked: int
    valid: int
    valid_share: float | None = None  # valid / checked
    labelled: int = 0  # answers whose right label is known
    right: int | None = None
    right_share: float | None = None  # right / labelled
    # Where the right answers are known, of the questions that were asked again: in so large a share of the pairs of
    # answers to one question the two differ. None: none was asked again.
    changed_share: float | None = None
    cut_share: float | None = None  # of the answers to such questions, by max_tokens: neither right nor wrong
    doubt: Reason | None = None  # why the answers to such questions say nothing about the model


class PromptLengths(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Planned prompt lengths and the server's count, over the successful requests that have both."""

    requests: int
    asked: int  # planned tokens in total
    got: int  # the server's count in total
    added: int  # got - asked of most requests: the tokens of the chat template, if lengths are exact
    otherwise: int  # requests with another difference


class Bundle(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How answers came that something between the model and this client bundled; medians over the answers."""

    pieces: float  # groups of chunks that came together
    first_tokens: float | None  # of the first piece; None: not known
    tokens: float  # of the answer
    answers: int
    via: str | None = None  # the headers `server` and `via` of most of them


class Numbers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The numbers of a set of measured requests. Times in seconds; formulas in docs/method.md."""

    sent: int
    succeeded: int
    failed: int  # any error but `unfinished` and `abandoned`
    unfinished: int
    abandoned: int = 0  # the user left: neither a success nor a failure
    errors: dict[str, int] = {}  # by kind
    resent: int = 0  # requests that were sent twice, because the server closed the kept connection
    connect_retried: int = 0  # requests whose connection needed a second SYN, so waited 1 s or more
    retry_after: int = 0  # requests after which the server asked for a wait (Retry-After of 429 and 503)
    retry_after_s: float | None = None  # the total of these waits, at most 60 s each
    prompt_tokens: int | None = None  # of the successful requests; None if one of them was not counted
    output_tokens: int | None = None  # likewise
    cached_tokens: int | None = None  # as the server reports them
    reasoning_tokens: float | None = None  # of the output tokens, see harness.numbers.formulas; None: there were none
    tool_calls: int | None = None  # in the answers; None: no request had tools
    tool_calls_valid: int | None = None
    wall: float | None = None  # seconds; fixed amount of work: first sent to last ended; None for a timed load
    window: Literal["wall", "timed"] | None = None  # of the rates: the wall time or the measured time
    window_s: float | None = None
    output_tok_s: float | None = None  # output tokens generated inside the window / window
    input_tok_s: float | None = None  # prompt tokens of the requests that ended inside the window / window
    requests_per_s: float | None = None  # successful requests that ended inside the window / window
    ttft: Distribution = NO_SAMPLE
    ttfo: Distribution = NO_SAMPLE
    tpot: Distribution = NO_SAMPLE
    e2e: Distribution = NO_SAMPLE
    gap: Distribution = NO_SAMPLE
    send_lag: Distribution = NO_SAMPLE
    connect: Distribution = NO_SAMPLE  # of the requests that opened a connection, before they were sent
    ttft_sched: Distribution = NO_SAMPLE  # from schedule; open loops only
    e2e_sched: Distribution = NO_SAMPLE
    schedule: ScheduleKept | None = None  # of an open loop
    tokens_per_chunk: float | None = None
    answer_tok_s: float | None = None  # output tokens of an answer / its E2E latency, the median
    bundle: Bundle | None = None  # if most answers came in bundles, see harness.numbers.formulas
    vectors: int | None = None  # of embeddings
    answers: Answers | None = None  # if a form was asked for
    prompts: PromptLengths | None = None  # if their length was planned
    slos: dict[str, SloAttainment] = {}  # by the SLOs of a check, such as "ttft<=1s, tpot<=50ms"

    @property
    def error_rate(self) -> float | None:
        """Failed / sent. A request that the end of the run cut is sent, but not failed."""
        return self.failed / self.sent if self.sent else None

    @property
    def valid_share(self) -> float | None:
        return None if self.answers is None else self.answers.valid_share

    @property
    def right_share(self) -> float | None:
        return None if self.answers is None else self.answers.right_share
