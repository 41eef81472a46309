"""Load testing of LLM servers on AMD hardware: from a scenario file to a verdict.

The public API for notebooks and scripts is what `__all__` names; see docs/python-api.md. All other names are private.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.api import LoadedRun, compare, load_run, plan, summarize
    from harness.base.errors import HarnessError, RunError
    from harness.numbers.comparison import Comparison
    from harness.numbers.summary import Summary
    from harness.questions.plan.decide import Forecast

__version__ = "0.1.0"  # as the top entry of CHANGELOG.md; without .dev0 once that is released
__all__ = [
    "Comparison", "Forecast", "HarnessError", "LoadedRun", "RunError", "Summary", "compare", "load_run", "plan",
    "summarize",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import the API only when it is used: load processes and the command line start without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harness import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
