"""The first requests of a load: when all are refused for what they ask, every other will be, and it need not go on."""

from collections.abc import Sequence

from harness.failures.scan import Failure, explain_message

FIRST = 5  # requests, warm-up included


def mistake_of(first: Sequence[str | None]) -> Failure | None:
    """The mistake that failed the first requests and will fail the rest as well; None: others may succeed.

    `first`: the kind of error and the message of each, as `http: status 404: ...`; None of one that did not fail.
    """
    causes = [explain_message(said) for said in first if said is not None]
    known = [cause for cause in causes if cause is not None and cause.scenario]
    return known[0] if known and len(known) == len(first) else None
