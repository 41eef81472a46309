"""What one line asks for: prompts, contexts, users and rates, read from the words of the command line, and their loads.

The words are those of other tools too. One that means something else there is refused with the word to use.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.units import count, duration, read_count
from harness.run.running_server import running_scenario
from harness.scenario import MAX_USERS, SERVER_TOKENIZER, Scenario

T = TypeVar("T")

PROMPT, OUTPUT, USERS, REPEATS, BUDGET = "512", "128", "1", 3, "30min"  # where an option is not given
ANSWERS = (4, 2, 1)  # of each user in a repeat: as many as the time allows
RATE_S = 20.0  # of a rate, its requests are sent in about this time
MIN_RATE_REQUESTS = 8
MAX_COMBINATIONS = 200
MAX_REQUESTS = 10_000_000  # of a load, as in a scenario
_MAX_TOKENS = 1_000_000
_MAX_RATE = 10_000.0
_KIBI = 1024  # of a length such as 8k: contexts are powers of two

_LEAVE_OUT = "Leave it out."
_OF_SERVER = (
    "Set it where the server is started, and compare two runs: harness compare OLD NEW. To search: harness tune."
)
# Words that other tools have, with what they are here: (what, what to do).
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "-ngl", "--n-gpu-layers", "-t", "--threads", "-b", "--batch-size", "-ub", "--ubatch-size", "-fa",
            "--flash-attn", "-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "-sm", "--split-mode", "-mg",
            "--main-gpu", "-ts", "--tensor-split", "-nkvo", "--no-kv-offload", "-mmp", "--mmap", "-dev", "--device",
        ),
        ("a setting of the server, which already runs", _OF_SERVER),
    ),
    **dict.fromkeys(
        ("-m", "-hf", "--hf-repo", "--served-model-name"),
        ("the server has its model", "Name it as the server does, where it has several: --model NAME."),
    ),
    "-pg": ("a request has its prompt and its answer, and both are timed", "Write --prompt 512 --output 128."),
    "-o": ("a format is an option of its own", "Write --json or --markdown."),
    **dict.fromkeys(
        ("--backend", "--backend-type", "--endpoint-type", "--endpoint", "--request-type"),
        (
            "requests go to /v1/chat/completions",
            "Leave it out; another endpoint is a key of a scenario: `endpoint: completions`.",
        ),
    ),
    **dict.fromkeys(
        ("--dataset-name", "--dataset-path", "--dataset", "--data", "--book-url"),
        (
            "prompts are random words, of the length of --prompt",
            "Write --prompt 512 --output 128; prompts of your own are in a scenario: harness init.",
        ),
    ),
    "--random-range-ratio": (
        "each prompt has the length of --prompt",
        "Leave it out; lengths that vary are in a scenario: harness init.",
    ),
    "--burstiness": (
        "arrivals are random (Poisson), which is 1",
        "Leave it out; others are in a scenario: `arrivals: {rate: 2, spacing: gamma, burstiness: 0.5}`.",
    ),
    **dict.fromkeys(
        ("--profile", "--rate-type", "--strategy"),
        ("users and a rate are options of their own", "Write --users 4 for 4 at once, --rate 4 for 4 a second."),
    ),
    **dict.fromkeys(
        ("--max-seconds", "--max-duration"),
        ("a combination is a number of requests", "Write --requests 64; --budget 10min bounds the time of all."),
    ),
    **dict.fromkeys(("--host", "--port"), ("the address is one word", "Write harness quick http://HOST:PORT.")),
    **dict.fromkeys(
        ("--percentile-metrics", "--metric-percentiles", "--goodput"),
        ("the report has all percentiles that the requests carry", "Leave it out; for SLOs: harness report --check."),
    ),
    **dict.fromkeys(
        (
            "--save-result", "--save-detailed", "--result-dir", "--result-filename", "--output-path", "--output-dir",
            "--outputs", "--save-all",
        ),
        ("each run is kept, with all requests", "Leave it out; --runs DIR names the folder."),
    ),
    **dict.fromkeys(
        ("--tokenizer", "--processor", "--trust-remote-code", "--tokenizer-mode"),
        ("the server counts the tokens", _LEAVE_OUT),
    ),
    **dict.fromkeys(
        ("--num-warmups", "--no-warmup", "--warmup"),
        ("each combination starts with a request of each user, which does not count", _LEAVE_OUT),
    ),
    **dict.fromkeys(
        ("--no-cache", "--adapt-prompt", "--enable-prefix-caching"),
        ("each prompt is new to the cache, and a context of --depth is in it", _LEAVE_OUT),
    ),
    "--latency-mode": ("nothing is subtracted from a time", _LEAVE_OUT),
    "--api-key": (
        "a key in a command can be read by every user of this machine",
        "Export it, and name its variable: --api-key-env NAME.",
    ),
}  # fmt: skip
# Together they mean something else: at most so many of the requests that arrive.
_TOGETHER = ("--max-concurrency", "--request-rate")
_LISTS = ("-p", "--pp", "--prompt", "-d", "--depth", "--concurrency", "--users", "--tg", "-n", "--output", "--rate")


class Combinations(NamedTuple):
    """What is measured: each prompt with each context and each number of users, then with each rate."""

    prompts: Sequence[int]  # tokens, as the following
    depths: Sequence[int]
    output: int
    users: Sequence[int]
    rates: Sequence[float]  # requests a second
    repeats: int
    requests: int | None  # of each combination and repeat; None: as many as the time allows
    fixed: bool  # whether each answer has the length of `output`
    budget_s: float

    @property
    def number(self) -> int:
        return len(self.prompts) * len(self.depths) * (len(self.users) + len(self.rates))


def own_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line in our form: numbers after an option of a list are one word.

    Raises HarnessError for a word that means something else in another tool.
    """
    names = [word.partition("=")[0] for word in words]
    for name in names:
        if name in REFUSED:
            what, next_step = REFUSED[name]
            raise HarnessError(f"{name}: {what}", next_step=next_step)
    if set(_TOGETHER) <= set(names) and "inf" not in words and "--request-rate=inf" not in words:
        raise HarnessError(
            f"{' and '.join(_TOGETHER)}: users and rates are measured one after the other here, not as a limit of the "
            "requests in flight",
            next_step="Write --users 16 and --rate 4, or a scenario with `users` and `arrivals`: harness init.",
        )
    for name, word in zip(words, words[1:], strict=False):
        if name == "--runs" and word.isdecimal():
            raise HarnessError(
                f"--runs: it names the folder of the runs here (got {word})", next_step=f"Write --repeats {word}."
            )
    joined: list[str] = []
    in_list = False
    for word in words:
        if in_list and re.fullmatch(r"[\d.]+[kK]?", word) and not joined[-1].startswith("-"):
            joined[-1] += f",{word}"
            continue
        in_list = word in _LISTS or (in_list and not word.startswith("-") and joined[-1] in _LISTS)
        joined.append(word)
    return joined


def refuse_two_names(words: Sequence[str], names: Mapping[str, Sequence[str]]) -> None:
    """Raise HarnessError where an option is given by two of its names with different values. `names`: by parameter."""
    texts: dict[str, list[str]] = {}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, text = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        texts.setdefault(name, []).append(text if equals else after)
    for parameter, read in READERS.items():
        given = {name: ",".join(texts[name]) for name in names[parameter] if name in texts}
        if len(given) > 1 and len({read(name, text) for name, text in given.items()}) > 1:
            shown = " and ".join(f"{name} {text}" for name, text in given.items())
            raise HarnessError(
                f"{' and '.join(given)}: two names of one option with different values (got {shown})",
                next_step=f"Give one of them; the name here is {names[parameter][0]}.",
            )


def read_combinations(
    prompt: Sequence[str],
    output: Sequence[str],
    depth: Sequence[str],
    users: Sequence[str],
    rate: Sequence[str],
    *,
    repeats: int | None,
    requests: str | None,
    fixed: bool,
    budget_s: float,
) -> Combinations:
    """Return what the options ask for. Raises HarnessError for a value that cannot be."""
    number = None if requests is None else _read_requests("--requests", requests)
    rates = _read_list("--rate", rate, _read_rate)
    endless = [value for value in rates if math.isinf(value)]
    counts = _read_list("--users", users, _read_users)
    if endless and not counts:
        if number is None:
            raise HarnessError(
                "--rate: inf sends all requests at once, and their number is not given",
                next_step="Write --users 64 for 64 at once.",
            )
        counts = [number]
    rates = [value for value in rates if not math.isinf(value)]
    lengths = _read_list("--output", output or [OUTPUT], _read_tokens)
    if len(lengths) > 1:
        raise HarnessError(
            f"--output: one length is expected (got {', '.join(map(str, lengths))})",
            next_step="Run the command once for each length.",
        )
    wanted = Combinations(
        prompts=_read_list("--prompt", prompt or [PROMPT], _read_tokens),
        depths=_read_list("--depth", depth or ["0"], _read_depth),
        output=lengths[0],
        users=counts or ([] if rates else [int(USERS)]),
        rates=rates,
        repeats=repeats or REPEATS,
        requests=number,
        fixed=fixed,
        budget_s=budget_s,
    )
    if wanted.number > MAX_COMBINATIONS:
        raise HarnessError(
            f"the options make {wanted.number:,} combinations; at most {MAX_COMBINATIONS} are measured",
            next_step="Give fewer values of --prompt, --depth, --users or --rate.",
        )
    if number is not None and counts and number < max(counts):
        raise HarnessError(
            f"--requests: {count(max(counts), 'user')} at once need as many requests or more (got {number:,})",
            next_step=f"Give --requests {max(counts)} or more, or fewer --users.",
        )
    return wanted


def refuse_too_long(wanted: Combinations, context: int | None, template: int) -> None:
    """Raise HarnessError where a request is longer than the server's context. `context`: its tokens; None: not known.
    `template`: tokens that chat template and salt add.
    """
    parts = {"--depth": max(wanted.depths), "--prompt": max(wanted.prompts), "--output": wanted.output}
    needed = sum(parts.values()) + template
    if context is None or needed <= context:
        return
    # What is longest may be made shorter, but a context only as far as prompt and answer leave room for one.
    room = context - needed
    options = sorted(parts, key=lambda option: (option == "--depth" and room + parts[option] > 0, parts[option]))
    option = options[-1]
    shown = [f"{tokens:,} ({name})" for name, tokens in parts.items() if tokens]
    shown += [f"{template:,} (chat template and salt)"] * (template > 0)
    shorter = f"Write {option} {room + parts[option]} or less" if room + parts[option] > 0 else "Write shorter ones"
    raise HarnessError(
        f"{option}: a request has {' + '.join(shown)} = {needed:,} tokens, and the server's context is {context:,} "
        f"tokens for one request (got {parts[option]:,})",
        next_step=f"{shorter}, or start the server with a longer context.",
    )


def _read_list(option: str, given: Sequence[str], read: Callable[[str, str], T]) -> list[T]:
    words = [word for text in given for word in text.split(",")]
    return list(dict.fromkeys(read(option, word.strip()) for word in words))


def _read_tokens(option: str, given: str) -> int:
    match = re.fullmatch(r"(\d{1,9}|\d{1,9}\.\d{1,6}(?=[kK]))([kK]?)", given)
    tokens = float(match[1]) * (_KIBI if match[2] else 1) if match else 0
    if not 1 <= tokens <= _MAX_TOKENS or tokens != int(tokens):
        raise HarnessError(
            f"{option}: tokens from 1 to {_MAX_TOKENS:,} are expected (got '{given[:100]}')",
            next_step=f"Write {option} 512, or several: {option} 512,2k (2k is 2,048 tokens).",
        )
    return int(tokens)


def _read_depth(option: str, given: str) -> int:
    return 0 if given == "0" else _read_tokens(option, given)


def _read_users(option: str, given: str) -> int:
    return read_count(option, given, MAX_USERS, f"{option} 4, or several: {option} 1,4,16")


def _read_requests(option: str, given: str) -> int:
    return read_count(option, given, MAX_REQUESTS, f"{option} 64")


def _read_rate(option: str, given: str) -> float:
    if given.lower() in ("inf", "infinity"):
        return math.inf
    rate = float(given) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", given) else 0.0
    if not 0.001 <= rate <= _MAX_RATE:
        raise HarnessError(
            f"{option}: requests a second from 0.001 to {_MAX_RATE:,.0f} are expected (got '{given[:100]}')",
            next_step=f"Write {option} 2, or several: {option} 0.5,1,2.",
        )
    return rate


def _set_of(read: Callable[[str, str], object]) -> Callable[[str, str], object]:
    return lambda option, text: frozenset(read(option, part.strip()) for part in text.split(","))


READERS: dict[str, Callable[[str, str], object]] = {  # of the options that have several names, by parameter
    "prompt": _set_of(_read_tokens),
    "output": _set_of(_read_tokens),
    "depth": _set_of(_read_depth),
    "users": _set_of(_read_users),
    "rate": _set_of(_read_rate),
    "requests": _read_requests,
    "repeats": lambda _, text: text,
    "base_url": lambda _, text: text.rstrip("/"),
}


def combinations_scenario(
    wanted: Combinations, model: str, key_name: str | None = None, *, exact: bool = False
) -> dict[str, Any]:
    """Return the scenario of these combinations, as a file has it. Each has `ANSWERS[0]` answers of each user.

    `exact`: the server counts the tokens of a text, so that prompts can have the exact length.
    """
    tokenizer = {"tokenizer": SERVER_TOKENIZER} if exact else {}
    question = "How fast is this server by length of the prompt, context, users and rate?"
    prompts = {"tokens": wanted.prompts[0], **tokenizer}
    more = {"repeats": wanted.repeats, "prompts": prompts}
    return running_scenario(question, model, dict(_loads(wanted, tokenizer)), key_name, **more)


def _loads(wanted: Combinations, tokenizer: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the loads in their order: all of closed loops, then all of rates; contexts and prompts from short to long
    as given.
    """
    common = {"user": "batch", "output_tokens": wanted.output, "output": "fixed" if wanted.fixed else "natural"}
    shapes = [(depth, prompt) for depth in wanted.depths for prompt in wanted.prompts]
    for depth, prompt in shapes:
        prompts = {"tokens": prompt, "system_tokens": depth, **tokenizer}
        for users in wanted.users:
            requests = wanted.requests or users * ANSWERS[0]
            load = {"users": users, "requests": requests, "prompts": prompts}
            yield load_name(prompt, wanted.output, depth, f"u{users}"), common | load
    for depth, prompt in shapes:
        prompts = {"tokens": prompt, "system_tokens": depth, **tokenizer}
        for rate in wanted.rates:
            requests = wanted.requests or max(MIN_RATE_REQUESTS, math.ceil(rate * RATE_S))
            load = {"users": min(requests, MAX_USERS), "requests": requests, "arrivals": {"rate": rate}}
            name = load_name(prompt, wanted.output, depth, f"r{rate:.9g}".replace(".", "p"))
            yield name, common | load | {"prompts": prompts}


def load_name(prompt: int, output: int, depth: int, ending: str) -> str:
    return "-".join([f"pp{prompt}", f"tg{output}", *([f"d{depth}"] if depth else []), ending])


def fit_answers(
    scenario: Scenario, wanted: Combinations, estimate: Callable[[Scenario], float]
) -> tuple[Scenario, float]:
    """Return the scenario with as many answers of each user as the budget allows, and the estimated seconds.

    Raises HarnessError where even one answer takes too long.
    """
    about_s = 0.0
    for answers in ANSWERS if wanted.requests is None else ANSWERS[:1]:
        fitted = scenario if wanted.requests is not None else _with_answers(scenario, answers)
        about_s = estimate(fitted)
        if about_s <= wanted.budget_s:
            return fitted, about_s
    raise HarnessError(
        f"--budget: the time of {count(wanted.number, 'combination')} x {count(wanted.repeats, 'repeat')} is about "
        f"{duration(about_s)} by the speed of one request (got {duration(wanted.budget_s)})",
        next_step="Give fewer values, a shorter --output or fewer --repeats, or a longer --budget.",
    )


def _with_answers(scenario: Scenario, answers: int) -> Scenario:
    loads = {
        name: replace(load, requests=load.users * answers) if load.arrivals is None else load
        for name, load in scenario.loads.items()
    }
    return replace(scenario, loads=loads)


def plan_text(scenario: Scenario, wanted: Combinations, about_s: float) -> str:
    """Return what is about to run, how long it takes, and in which order."""
    what = f"{count(wanted.number, 'combination')} x {count(wanted.repeats, 'repeat')}"
    first = ", ".join([*list(scenario.loads)[:3], *(["..."] if len(scenario.loads) > 3 else [])])
    return (
        f"{what}: about {duration(about_s)} by the speed of one request; after {duration(wanted.budget_s)} (--budget) "
        f"no repeat starts. Order: {first}; every second repeat backwards."
    )
