"""From which level on is one server better than another? Their lines over the levels, and the interval of the crossing.

At each level that both have, the difference of the mean logarithms of their runs says who is better; between two levels
it is a straight line over the logarithm of the level. The crossing is where it changes its sign. Its interval is a
bootstrap over runs: of each server the deviations of the runs from their level's mean are pooled over the levels, made
larger by the degrees of freedom that the means took, and drawn anew.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

CrossingKind = Literal["from", "until", "always", "never", "cannot_tell"]
Floats = NDArray[np.float64]

MASS = 0.95
_DRAWS = 2000


class CrossingAnswer(msgspec.Struct, frozen=True):
    """Where `side` is better than `base`.

    from: at `level` and above, until: below `level`, which is between two measured levels, with its interval
    low..high. always, never: at all levels measured. cannot_tell: the runs do not show which of these it is.
    `levels` are the levels measured, `ratios` side over base at each.
    """

    kind: CrossingKind
    level: float | None
    low: float | None
    high: float | None
    levels: list[int]
    ratios: list[float]


def crossing(
    base: Mapping[int, Sequence[float]], side: Mapping[int, Sequence[float]], *, higher_is_better: bool = True
) -> CrossingAnswer:
    """Compare two servers by their runs at each level, {level: one value of each run}; all values positive.

    Levels that only one has do not count. With fewer than two levels, or a server without two runs at any level,
    nothing can be told. ValueError: a value that is not positive.
    """
    levels = sorted(level for level in base.keys() & side.keys() if base[level] and side[level])
    samples = [[np.asarray(runs[level], dtype=np.float64) for level in levels] for runs in (side, base)]
    if any((runs <= 0).any() for server in samples for runs in server):
        raise ValueError("a crossing needs positive values")
    logs = [[np.log(runs) for runs in server] for server in samples]
    means = np.array([[runs.mean() for runs in server] for server in logs])
    plain = means[0] - means[1] if levels else np.empty(0)
    ratios = [math.exp(value) for value in plain]
    spare = [sum(len(runs) - 1 for runs in server) for server in logs]
    if len(levels) < 2 or min(spare) < 1:
        return CrossingAnswer("cannot_tell", None, None, None, levels, ratios)
    axis, sign = np.log(np.array(levels, dtype=np.float64)), 1.0 if higher_is_better else -1.0
    dice = np.random.default_rng(20261124)
    drawn = sign * (_drawn_means(logs[0], means[0], dice) - _drawn_means(logs[1], means[1], dice))
    kinds = _kinds(drawn)
    kind: CrossingKind = _kinds(sign * plain[None])[0].item()
    agree = np.isin(kinds, [kind, "always"] if kind in ("from", "until") else [kind])
    if kind == "cannot_tell" or agree.mean() < (1 + MASS) / 2:
        return CrossingAnswer("cannot_tell", None, None, None, levels, ratios)
    if kind in ("always", "never"):
        return CrossingAnswer(kind, None, None, None, levels, ratios)
    # A server that is always better crosses at or beyond the end of the levels.
    end = axis[0] if kind == "from" else axis[-1]
    at = np.where(kinds[agree] == "always", end, _zeros(axis, drawn[agree]))
    low, high = np.exp(np.quantile(at, [(1 - MASS) / 2, (1 + MASS) / 2]))
    level = float(np.exp(_zeros(axis, sign * plain[None])[0]))
    return CrossingAnswer(kind, level, float(low), float(high), levels, ratios)


def _drawn_means(logs: Sequence[Floats], means: Floats, dice: np.random.Generator) -> Floats:
    """Draws x levels: means of runs as they might have been."""
    deviations = np.concatenate([runs - mean for runs, mean in zip(logs, means, strict=True)])
    spare = sum(len(runs) - 1 for runs in logs)
    deviations = deviations * math.sqrt(len(deviations) / spare)
    # The spread itself is an estimate from few runs: Student's t in place of a normal distribution.
    wide = np.sqrt(spare / dice.chisquare(spare, _DRAWS))[:, None]
    columns = [
        mean + dice.choice(deviations, (_DRAWS, len(runs))).mean(axis=1) for runs, mean in zip(logs, means, strict=True)
    ]
    return means + (np.stack(columns, axis=1) - means) * wide


def _kinds(rows: Floats) -> NDArray[np.str_]:
    """What lines of differences (lines x levels) say, larger being better; where one crosses zero more often, its
    last crossing counts."""
    better = rows > 0
    return np.select(
        [better.all(axis=1), ~better.any(axis=1), better[:, -1], better[:, 0]],
        ["always", "never", "from", "until"],
        "cannot_tell",
    )


def _zeros(axis: Floats, rows: Floats) -> Floats:
    """Where each line last changes its sign; of one that does not, some place."""
    changes = (rows[:, 1:] > 0) != (rows[:, :-1] > 0)
    place = changes.shape[1] - 1 - np.argmax(changes[:, ::-1], axis=1)
    line = np.arange(len(rows))
    left, right = rows[line, place], rows[line, place + 1]
    share = left / np.where(left == right, 1.0, left - right)
    return np.asarray(axis[place] + share * (axis[place + 1] - axis[place]))
