"""What only the nightly run does: `make test-nightly` sets NIGHTLY=1 (CONTRIBUTING.md says what that adds)."""

import math
import os

NIGHTLY = bool(os.environ.get("NIGHTLY"))


def draws(full: int) -> int:
    """The number of draws of a simulation: a tenth of them for each commit."""
    return full if NIGHTLY else full // 10


def scatter(share: float, trials: int, errors: float = 3.5) -> float:
    """How far a share that is seen in `trials` draws may be from the true one: so many standard errors."""
    return errors * math.sqrt(share * (1 - share) / trials)


def room(share: float, trials: int) -> float:
    """Two standard errors of the fewer draws for each commit; no room nightly, where the bound itself must hold."""
    return 0.0 if NIGHTLY else scatter(share, trials, 2)
