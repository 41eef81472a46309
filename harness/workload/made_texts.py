"""Prompts of a kind: code, chat and structured answers, of any length, made from a seed.

A draft guesses text of one kind more often than of another, so a question about speculation needs texts of each. The
context and the task of a prompt are of the same kind, and each task asks for a long answer: a server that must not stop
at the end of an answer repeats itself there, which is easy to guess.
"""

import random
import re
from collections.abc import Callable, Sequence

_PIECE = re.compile(r"\d|_?[^\W\d_]+|[^\w\s]|_")  # a word, digit or sign: about one token in usual vocabularies
_MIN_CONTEXT = 40  # tokens: less is no text to work on

_NOUNS = ("order", "ticket", "parcel", "sensor", "invoice", "booking", "reading", "member", "route", "device", "lesson",
          "recipe")  # fmt: skip
_FIELDS = ("weight", "price", "rank", "age", "length", "status", "owner", "delay", "volume", "score")
_VERBS = ("select", "collect", "merge", "check", "count", "sort", "update", "reject", "export", "archive")
_FUNCTIONS = (
    """def {verb}_{noun}s({noun}s, max_{field}):
    \"\"\"Return each {noun} whose {field} is at most {number}.\"\"\"
    found = []
    for {noun} in {noun}s:
        if {noun}.{field} <= max_{field}:
            found.append({noun})
    return found
""",
    """def {verb}_{noun}_{field}({noun}s):
    total = {number}
    for index, {noun} in enumerate({noun}s):
        if {noun} is None:
            raise ValueError(f"{noun} {{index}} is missing")
        total += {noun}.{field}
    return total / max(1, len({noun}s))
""",
    """class {Noun}{Field}:
    def __init__(self, {field}, {noun}=None):
        self.{field} = {field}
        self.{noun} = {noun}

    def {verb}(self, limit={number}):
        if self.{noun} is None or self.{field} > limit:
            return None
        return self.{noun}.{verb}(self.{field})
""",
    """def {verb}_by_{field}({noun}s, *, reverse=False):
    groups = {{}}
    for {noun} in {noun}s:
        groups.setdefault({noun}.{field} // {number}, []).append({noun})
    return dict(sorted(groups.items(), reverse=reverse))
""",
)
_CODE_TASKS = (
    "Write this module again in full, with type hints and a docstring for each function. Answer with code alone.",
    "Write the whole module again and name each loop variable `item`. Change nothing else. Answer with code alone.",
    "Write a test for each function of this module, with three cases each. Answer with code alone.",
    "Write this module again, so that each function logs its name and its result. Answer with code alone.",
)

_PEOPLE = ("my neighbour", "a friend from work", "my aunt", "the new trainer", "a cook", "our guide", "the caretaker",
           "a student")  # fmt: skip
_ACTS = ("told me", "wrote", "is sure", "wonders", "doubts", "noticed", "asked me whether it is true", "learned")
_TOPICS = ("bread keeps longer in a linen bag", "the river path floods in spring", "old windows can be sealed cheaply",
           "a heat pump needs little care", "tomatoes want wind and sun", "short walks help against a stiff back",
           "night trains are coming back", "a used bicycle is good enough", "bees find the balcony by scent",
           "a choir needs no perfect voices", "paint dries badly in frost", "cats choose their own chair")  # fmt: skip
_REASONS = ("and I would like to know why", "although I did not try it here", "but the costs are unclear to me",
            "which surprised the whole house", "so we want to try it next month", "because the old way took too long",
            "and two others think the opposite", "yet I read something else last week")  # fmt: skip
_CHAT_TASKS = (
    "Explain in at least 500 words what you think of the last of these points, with examples of your own.",
    "Write a long and friendly letter, at least 500 words, that answers three of these points.",
    "Tell a story of at least 500 words in which two of these people meet and disagree.",
    "Which of these points would you try first? Give your reasons, the risks and a plan, in at least 500 words.",
)

_NAMES = ("Amal", "Bruno", "Celia", "Daniel", "Edda", "Faruk", "Greta", "Hiro", "Ines", "Jonas", "Kemal", "Lotte")
_CITIES = ("Aarhus", "Bilbao", "Cluj", "Dakar", "Erfurt", "Faro", "Ghent", "Haifa", "Iasi", "Jaipur", "Kazan", "Lyon")
_GOODS = ("lamps", "ropes", "kettles", "maps", "tents", "brushes", "pumps", "scales", "blankets", "hooks")
_PAID = ("by card", "in cash", "by invoice", "by voucher")
_STRUCTURED_TASKS = (
    "Return all orders as a JSON list. Each object has the keys id, name, city, goods (a list of objects with name and "
    "count), day and paid. Answer with JSON alone.",
    "Return a JSON object that has each city as a key and a list of its orders as the value, with id, name, goods, day "
    "and paid for each of them. Answer with JSON alone.",
)

_Choose = Callable[[Sequence[str]], str]


def _code_block(choose: _Choose, number: Callable[[int], int]) -> str:
    words = {"verb": choose(_VERBS), "noun": choose(_NOUNS), "field": choose(_FIELDS), "number": str(number(900))}
    words |= {"Noun": words["noun"].title(), "Field": words["field"].title()}
    return choose(_FUNCTIONS).format(**words) + "\n\n"


def _chat_block(choose: _Choose, number: Callable[[int], int]) -> str:
    text = f"{choose(_PEOPLE)} {choose(_ACTS)}: {choose(_TOPICS)}, {choose(_REASONS)}."
    return text[0].upper() + text[1:] + ("\n\n" if number(4) == 0 else " ")


def _structured_block(choose: _Choose, number: Callable[[int], int]) -> str:
    goods = f"{2 + number(30)} {choose(_GOODS)} and {2 + number(9)} {choose(_GOODS)}"
    day = f"2027-{1 + number(12):02}-{1 + number(28):02}"
    return (
        f"Order {1000 + number(9000)}: {choose(_NAMES)} from {choose(_CITIES)} takes {goods} on {day}, paid "
        f"{choose(_PAID)}.\n"
    )


_BLOCKS = {"code": _code_block, "chat": _chat_block, "structured": _structured_block}
_TASKS = {"code": _CODE_TASKS, "chat": _CHAT_TASKS, "structured": _STRUCTURED_TASKS}


def made_context(kind: str, tokens: int, seed: int, place: int | str) -> str:
    """Return a text of a kind with `tokens` words, digits and signs. Texts differ by `seed` and `place`."""
    draw = random.Random(f"{seed}:{kind}:{place}").random  # the only method whose results Python promises to keep
    parts: list[str] = []
    missing = tokens
    while missing > 0:
        block = _BLOCKS[kind](lambda texts: texts[int(draw() * len(texts))], lambda count: int(draw() * count))
        ends = [piece.end() for piece in _PIECE.finditer(block)]
        parts.append(block if len(ends) <= missing else block[: ends[missing - 1]])
        missing -= len(ends)
    return "".join(parts).rstrip()


def made_prompt(kind: str, tokens: int, seed: int, index: int) -> str:
    """Return a context and a task of a kind, together about `tokens` long, and never shorter than a useful prompt."""
    task = _TASKS[kind][index % len(_TASKS[kind])]
    length = max(_MIN_CONTEXT, tokens - token_count(task))
    return f"{made_context(kind, length, seed, index)}\n\n{task}"


def token_count(text: str) -> int:
    """Return about how many tokens a made text has: its words, digits and signs."""
    return len(_PIECE.findall(text))
