"""Questions to the user at a terminal."""

import sys
from collections.abc import Mapping

from harness.errors import HarnessError


def ask(question: str, option: str, answers: Mapping[str, str]) -> str:
    """One of the answers, by its number or name; Enter takes the first. Raises HarnessError without a terminal."""
    if not sys.stdin.isatty():
        raise HarnessError(
            f"{option} is missing, and there is no terminal to ask at", next_step=f"Choose: {', '.join(answers)}."
        )
    names = list(answers)
    print(question)
    for number, name in enumerate(names, 1):
        print(f"  {number}  {name}: {answers[name]}")
    while True:
        try:
            given = input(f"number or name [{names[0]}]: ").strip()
        except EOFError:
            raise KeyboardInterrupt from None
        if not given or given in answers:
            return given or names[0]
        if given.isdecimal() and 1 <= int(given) <= len(names):
            return names[int(given) - 1]
        print(f"'{given[:100]}' is not one of them.")
