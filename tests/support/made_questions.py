"""`python -m tests.support.made_questions > harness/data/questions.jsonl` makes the questions with a known answer.

Each is made by a template from random values, and its answer is computed from the same values. Another seed
(`--seed 7`) makes another set, for `prompts: {kind: file}`.
"""

import argparse
import datetime
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

COUNT, SEED = 1000, 42
_NAMES = ("Ana", "Bilal", "Chen", "Dora", "Emeka", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena")
_THINGS = ("apples", "bolts", "chairs", "drums", "eggs", "forks", "gloves", "hats", "inks", "jars", "keys", "lamps")
_CITIES = ("Accra", "Bergen", "Cork", "Delhi", "Exeter", "Fukuoka", "Graz", "Hanoi", "Izmir", "Jena", "Kyiv", "Lima")
_ONLY = "Answer with {} alone."


def arithmetic(draw: random.Random) -> tuple[str, Any]:
    a, b, c = draw.randint(12, 97), draw.randint(12, 97), draw.randint(3, 19)
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    text, value = draw.choice((
        (f"What is {a} + {b} * {c}?", a + b * c),
        (f"What is ({a} + {b}) * {c}?", (a + b) * c),
        (f"What is {a * c} / {c} - {b}?", a - b),
        (f"What is the remainder of {a * b} divided by {c}?", a * b % c),
        (f"{name} has {a} boxes with {c} {thing} each and gives {b} {thing} away. How many are left?", a * c - b),
    ))  # fmt: skip
    return f"{text} {_ONLY.format('the number')}", str(value)


def dates(draw: random.Random) -> tuple[str, Any]:
    day = datetime.date(draw.randint(1990, 2030), draw.randint(1, 12), draw.randint(1, 28))
    days = draw.randint(2, 75)
    later = day + datetime.timedelta(days)
    text, value = draw.choice((
        (f"Which date is {days} days after {day}? {_ONLY.format('the date as YYYY-MM-DD')}", str(later)),
        (f"Which date is {days} days before {day}? {_ONLY.format('the date as YYYY-MM-DD')}",
         str(day - datetime.timedelta(days))),
        (f"How many days are there from {day} to {later}? {_ONLY.format('the number')}", str(days)),
        (f"Write {day:%B} {day.day}, {day.year} as YYYY-MM-DD. {_ONLY.format('the date')}", str(day)),
    ))  # fmt: skip
    return text, value


def sorting(draw: random.Random) -> tuple[str, Any]:
    numbers = draw.sample(range(10, 999), draw.randint(4, 7))
    things = draw.sample(_THINGS, draw.randint(4, 6))
    order = draw.choice(("ascending", "descending"))
    rank = draw.randint(2, 3)
    text, value = draw.choice((
        (f"Sort in {order} order: {', '.join(map(str, numbers))}.",
         ", ".join(map(str, sorted(numbers, reverse=order == "descending")))),
        (f"Sort alphabetically: {', '.join(things)}.", ", ".join(sorted(things))),
        (f"Write in reverse order: {', '.join(things)}.", ", ".join(reversed(things))),
    ))  # fmt: skip
    if draw.random() < 0.25:
        ranked = sorted(numbers, reverse=True)[rank - 1]
        return f"Which is number {rank} by size, the largest first: {', '.join(map(str, numbers))}? " + _ONLY.format(
            "the number"
        ), str(ranked)
    return f"{text} {_ONLY.format('the list, separated by commas,')}", value


def extraction(draw: random.Random) -> tuple[str, Any]:
    name, city, thing = draw.choice(_NAMES), draw.choice(_CITIES), draw.choice(_THINGS)
    order, price = f"{draw.choice('ABCDEFGH')}{draw.randint(100, 999)}-{draw.randint(10, 99)}", draw.randint(20, 900)
    day = datetime.date(2026, draw.randint(1, 12), draw.randint(1, 28))
    note = f"Order {order}: {name} of {city} asks for {draw.randint(2, 40)} {thing} by {day}, for {price} euros in all."
    wanted, value = draw.choice((
        ("the order number", order), ("the city", city), ("the ordered product", thing),
        ("the price in euros, as a number", str(price)), ("the date as YYYY-MM-DD", str(day)),
        ("the customer's name", name),
    ))  # fmt: skip
    return f"{note}\n\nWhat is {wanted}? {_ONLY.format('it')}", value


def choice(draw: random.Random) -> tuple[str, Any]:
    sizes = dict(zip(draw.sample(_NAMES, 4), draw.sample(range(20, 90), 4), strict=True))
    first = draw.choice(("oldest", "youngest"))
    ranked = sorted(sizes, key=lambda name: sizes[name], reverse=first == "oldest")
    middle, letters = draw.randint(0, 1), "ABCD"
    options = draw.sample(sorted(sizes), 4)
    facts = ". ".join(f"{name} is {age}" for name, age in sizes.items())
    listed = " ".join(f"{letter}) {name}" for letter, name in zip(letters, options, strict=True))
    wanted = f"the {first}" if middle == 0 else f"the second {first}"
    answer = letters[options.index(ranked[middle])]
    return f"{facts}. Who is {wanted}? {listed}\n{_ONLY.format('the letter')}", answer


def as_json(draw: random.Random) -> tuple[str, Any]:
    name, city, age = draw.choice(_NAMES), draw.choice(_CITIES), draw.randint(18, 80)
    things = draw.sample(_THINGS, 2)
    text, value = draw.choice((
        (f"{name} from {city} is {age} years old. Write it as a JSON object with the keys name, city and age",
         {"name": name, "city": city, "age": age}),
        (f"{name} buys {things[0]} and {things[1]}. Write it as a JSON object with the keys name and items, a list",
         {"name": name, "items": things}),
        (f"Write a JSON object with the keys min, max and sum of the numbers {age}, {age + 4} and {age - 7}",
         {"min": age - 7, "max": age + 4, "sum": 3 * age - 3}),
    ))  # fmt: skip
    return f"{text}. {_ONLY.format('the JSON')}", json.dumps(value)


def code(draw: random.Random) -> tuple[str, Any]:
    a, b, word = draw.randint(3, 9), draw.randint(10, 30), draw.choice(_CITIES)
    text, value = draw.choice((
        (f"n = 0\nfor i in range({a}):\n    n += i * {a}\nprint(n)", sum(i * a for i in range(a))),
        (f"print([x for x in range({b}) if x % {a} == 0][-1])", [x for x in range(b) if x % a == 0][-1]),
        (f"print('{word}'[::-1].lower())", word[::-1].lower()),
        (f"print(len('{word}' * {a}) + {b})", len(word * a) + b),
        (f"a, b = {a}, {b}\nwhile b:\n    a, b = b, a % b\nprint(a)", _gcd(a, b)),
    ))  # fmt: skip
    return f"What does this Python program print?\n\n{text}\n\n{_ONLY.format('what it prints')}", str(value)


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


KINDS: dict[str, Callable[[random.Random], tuple[str, Any]]] = {
    "arithmetic": arithmetic, "dates": dates, "sorting": sorting, "extraction": extraction, "choice": choice,
    "json": as_json, "code": code,
}  # fmt: skip


def questions(seed: int = SEED, count: int = COUNT) -> Iterator[dict[str, str]]:
    """Yield different questions, the kinds in turn."""
    draw, seen, kinds = random.Random(f"questions {seed}"), set[str](), list(KINDS)
    while len(seen) < count:
        kind = kinds[len(seen) % len(kinds)]
        question, answer = KINDS[kind](draw)
        if question not in seen:
            seen.add(question)
            yield {"kind": kind, "prompt": question, "answer": answer}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=SEED)
    for line in questions(parser.parse_args().seed):
        print(json.dumps(line))
