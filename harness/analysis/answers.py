"""The quality of a cell's answers, and whether prompts had the planned length.

A server that answers nonsense fast must not look better than one that answers well.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from harness.rundir.records import Request
from harness.summary import Answers, Comparison, Numbers, PromptLengths, Reason, Row, because, median_of_known


class AnswerTally(Struct, kw_only=True):
    """Counted over the successful measured requests of a cell; its prompts, over those that ended inside its window."""

    checked: int = 0  # answers that were to have a form
    valid: int = 0  # and have it
    labelled: int = 0  # those of which the right label is known
    right: int = 0
    embedded: int = 0  # answers that are vectors
    vectors: int = 0
    prompt_ended: int = 0  # prompt tokens of requests that ended inside the window
    prompt_unknown: int = 0  # those of them that were not counted
    asked: int = 0  # tokens of the prompts whose length was planned and counted by the server
    got: int = 0
    beyond: Counter[int] = msgspec.field(default_factory=Counter)  # requests by got - asked

    def add(self, request: Request) -> None:
        self.checked += request.answer_valid is not None
        self.valid += bool(request.answer_valid)
        self.labelled += request.answer_right is not None
        self.right += bool(request.answer_right)
        if request.vectors is not None:
            self.embedded += 1
            self.vectors += request.vectors
        if request.asked_prompt_tokens is not None and request.prompt_tokens is not None:
            self.asked += request.asked_prompt_tokens
            self.got += request.prompt_tokens
            self.beyond[request.prompt_tokens - request.asked_prompt_tokens] += 1

    def add_ended(self, request: Request) -> None:
        """Count a successful request that ended inside the window, one of the warm-up as well."""
        self.prompt_ended += request.prompt_tokens or 0
        self.prompt_unknown += request.prompt_tokens is None


def answers_of(parts: Sequence[AnswerTally]) -> Answers | None:
    """How many answers were valid and right; None where no form was asked for."""
    checked, valid, labelled, right = (
        sum(getattr(part, name) for part in parts) for name in ("checked", "valid", "labelled", "right")
    )
    if not checked:
        return None
    return Answers(
        checked=checked,
        valid=valid,
        valid_share=valid / checked,
        labelled=labelled,
        right=right if labelled else None,
        right_share=right / labelled if labelled else None,
    )


def vectors_of(parts: Sequence[AnswerTally]) -> int | None:
    return sum(part.vectors for part in parts) if any(part.embedded for part in parts) else None


def prompts_of(parts: Sequence[AnswerTally]) -> PromptLengths | None:
    """Planned against counted prompt lengths; None where none was planned, or the server counts none."""
    beyond = sum((part.beyond for part in parts), Counter[int]())
    if not beyond:
        return None
    usual, alike = min(beyond.items(), key=lambda one: (-one[1], abs(one[0])))
    return PromptLengths(
        requests=beyond.total(),
        asked=sum(part.asked for part in parts),
        got=sum(part.got for part in parts),
        added=usual,
        otherwise=beyond.total() - alike,
    )


def input_tok_s(parts: Sequence[AnswerTally], window_s: float | None, cells: Sequence[Numbers]) -> float | None:
    """Prompt tokens of the requests that ended inside the window / window; of several cells the median."""
    if cells:
        return median_of_known(cell.input_tok_s for cell in cells)
    if not window_s or any(part.prompt_unknown for part in parts):
        return None
    return sum(part.prompt_ended for part in parts) / window_s


def differences(rows: Sequence[Row], comparison: Comparison | None) -> list[Reason]:
    """What a reader of a comparison must know: of two compared rows, one has more valid or more right answers."""
    named = {row.name: row.pooled.answers for row in rows}
    found = comparison.verdicts if comparison is not None else []
    notes = [
        difference(side, [named.get(side)], base, [named.get(base)])
        for side, base in dict.fromkeys((verdict.side, verdict.baseline) for verdict in found)
    ]
    return [note for note in notes if note is not None]


def difference(
    side: str, answers: Sequence[Answers | None], baseline: str, others: Sequence[Answers | None]
) -> Reason | None:
    """That the answers of two sides, each of one or more runs, are not worth the same; None: they are."""
    pairs = {
        "valid": [_sum(answers, "valid", "checked"), _sum(others, "valid", "checked")],
        "right": [_sum(answers, "right", "labelled"), _sum(others, "right", "labelled")],
    }
    unequal = {
        word: [mine, other]
        for word, (mine, other) in pairs.items()
        if mine[1] and other[1] and mine[0] * other[1] != other[0] * mine[1]
    }
    return because("answers_differ", side=side, baseline=baseline, **unequal) if unequal else None


def _sum(answers: Sequence[Answers | None], number: str, of: str) -> list[int]:
    known = [one for one in answers if one is not None]
    return [sum(getattr(one, number) or 0 for one in known), sum(getattr(one, of) for one in known)]
