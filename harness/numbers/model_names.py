"""Whether the model that answers name is the one that requests asked for, or may be one of its other names."""

import re
from collections.abc import Iterator

import numpy as np

from harness.base.reason import Reason, because
from harness.base.units import count
from harness.numbers.validity import Evidence, name_counts
from harness.records.manifest import ServedBy
from harness.scenario import model_at

MIN_PART = 3  # characters of a name that is found inside a word of another
# Settings that servers report with a name of the model.
_NAMED_BY = ("model", "model_path", "served_model_name", "checkpoint")
_FILE = re.compile(r"[/~]|\.{1,2}/|[a-z]:\\|.*\.(?:gguf|bin|safetensors|onnx)$", re.IGNORECASE)


def other_model_notes(evidence: Evidence) -> Iterator[Reason]:
    """A note where all answers to requests for a model name one that is not known to be the same.

    Answers that name several models are a reason for INVALID. A server that the harness started has its own model.
    """
    served, good = None if evidence.ran is None else evidence.ran.served_by, evidence.good
    if served is None or served.template is not None or served.gateway is not None or evidence.imported:
        return
    # Requests take the models of a load in turn.
    period = len(evidence.load.model or ("",)) if isinstance(evidence.load.model, list) else 1
    turns: dict[str | None, list[int]] = {}
    for turn in range(period):
        turns.setdefault(model_at(evidence.load, turn) or served.model, []).append(turn)
    for model, own in turns.items():
        named = name_counts(good.model.where(np.isin(good.index % period, own)))
        answered = next(iter(named), None)
        if model is None or answered is None or len(named) > 1 or may_name(served, model, answered):
            continue
        text = f"requests asked for the model {model}, and {count(named.total(), 'answer')} named {answered}: it is "
        text += "another name of the same model, or another model answered, as behind a router that falls back"
        yield because("other_model", text, asked=model, answered=answered, answers=named.total())


def may_name(served: ServedBy, asked: str, answered: str) -> bool:
    """Whether a name in answers may be one of the model that was asked for.

    File names count: a server that has its model from a file may answer with its name, whatever it was asked for.
    """
    names = [asked, *served.model_aliases]
    for key in _NAMED_BY:
        value = served.effective.get(key)
        names += [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]
    return _FILE.match(answered) is not None or any(_are_alike(name, answered) for name in names)


def _are_alike(first: str, other: str) -> bool:
    """Whether one name has the other: Qwen/Qwen3-0.6B-GGUF:Q4_0 that of Qwen3-0.6B-Q4_0."""
    bases = [_plain(re.split(r"[/\\]", name)[-1]) for name in (first, other)]
    return any(
        base in (_plain(name) if len(base) >= MIN_PART else map(_plain, re.split(r"[^a-z0-9]", name.lower())))
        for base, name in zip(bases, (other, first), strict=True)
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]|gguf", "", name.lower())
