"""The tables of combinations, and the page to paste into a forum: what ran, on which machine, and how fast."""

from collections.abc import Iterator, Sequence

from harness.base.units import NOTHING, count, figures, format_date, gib
from harness.engines import engines
from harness.hardware.bounds import run_model
from harness.questions.quick.decide import MIN_CACHED, CombinationNumbers, CombinationsReport, Repeated
from harness.records.manifest import CellRun, Run
from harness.report.elements import LIMITED, Bullet, Bullets, Element, Fact, Facts, Grid, Paragraph, TableColumn
from harness.report.manifest_facts import machine_facts, measured_with, server_facts
from harness.report.sections import simulated_note

UNKNOWN = "not known"
_TIMES = (
    TableColumn(
        "ttft", "TTFT ms", "Time to the first token: the median of a repeat, the mean of the repeats.",
        "first chunk − request sent; 50th percentile", group="name",
    ),
    TableColumn(
        "tpot", "TPOT ms", "Time of each token after the first: the median of a repeat, the mean of the repeats.",
        "(last chunk − first) ÷ (tokens − 1); 50th percentile", group="name",
    ),
)  # fmt: skip
_ANSWERS = TableColumn("answers", "Answers", "Complete answers of all repeats.", "successful requests", group="name")
_ALONE = (
    TableColumn(
        "test", "Test", "pp512: the speed of a prompt of 512 tokens; tg128: of an answer of 128; @ d8192: after a "
        "context of 8,192 tokens that was in the cache.", "its loads’ keys prompts and output_tokens", group="name",
    ),
    TableColumn(
        "rate", "t/s", "Tokens a second of one user. pp: of the prompt, until the first token; tg: of the answer, "
        "after it. ±: the 95 % interval over the repeats.",
        "pp: mean uncached prompt tokens ÷ mean TTFT; tg: output tokens after the first ÷ time from the first to "
        "the last", group="name",
    ),
    *_TIMES,
    TableColumn(
        "prompt", "Prompt tokens", "As the server counts them, with the context and the chat template: the median.",
        "usage.prompt_tokens", group="name",
    ),
    _ANSWERS,
)  # fmt: skip
_TOGETHER = (
    TableColumn("users", "Load", "Users at once, or requests a second.", "loads.users, loads.arrivals", group="name"),
    TableColumn("test", "Test", "Prompt and answer of each request, as in the other table.", "", group="name"),
    TableColumn(
        "together", "tok/s together", "Output tokens a second of all users, the wait for first tokens included.",
        "output tokens ÷ time", group="name",
    ),
    TableColumn(
        "user_rate", "tok/s per user", "Output tokens a second that each user gets after the first token.",
        "output tokens after the first ÷ time from the first to the last", group="name",
    ),
    *_TIMES,
    _ANSWERS,
)  # fmt: skip


def combination_elements(combinations: Sequence[CombinationNumbers]) -> list[Element]:
    """Return the tables: one of one user, in tests of prompt and answer; one of several users, and of rates."""
    alone = [combination for combination in combinations if combination.users == 1]
    tests = [row for combination in alone for row in _tests(combination)]
    shared = [_shared(combination) for combination in combinations] if len(alone) < len(combinations) else []
    return [
        *([Grid(id="tests", title="One user", columns=_ALONE, rows=tests)] if tests else []),
        *([Grid(id="loads", title="Users and rates", columns=_TOGETHER, rows=shared)] if shared else []),
        Paragraph(_legend(combinations), "fine"),
        *_notes(combinations),
    ]  # fmt: skip


def combinations_page(report: CombinationsReport) -> list[Element]:
    """Return the page that the terminal shows."""
    return [
        Paragraph(f"{report.model} at {report.url}", "title"),
        *_state(report),
        *combination_elements(report.combinations),
        Paragraph("Next", "heading"),
        Bullets([Bullet(what, code=command) for command, what in report.next.items()]),
    ]


def forum_page(report: CombinationsReport) -> list[Element]:
    """Return the page to paste into a forum: the same tables below what ran and where."""
    facts = [Fact(f"{name}:", UNKNOWN if text is None else text) for name, text in report.facts.items()]
    return [
        Paragraph(report.model, "title"),
        *_state(report),
        Facts(facts),
        *combination_elements(report.combinations),
    ]


def lead_of_combinations(combinations: Sequence[CombinationNumbers]) -> str:
    """Return the answer in a sentence, of one prompt and context: one user, and the most of all together."""
    alone = next(
        (combination for combination in combinations if combination.users == 1 and combination.tg is not None), None
    )
    first = alone or next((combination for combination in combinations if combination.tok_s is not None), None)
    if first is None:
        return "No speed: no request was answered."
    alike = [
        combination
        for combination in combinations
        if (combination.prompt, combination.depth) == (first.prompt, first.depth) and combination.tok_s is not None
    ]
    most = max(alike, key=_together, default=first)
    parts = [] if alone is None else [f"{_text(alone.tg)} tok/s for one user"]
    if alone is not None and alone.pp is not None:
        parts.append(f"{_text(alone.pp)} tok/s of its prompt")
    if most is not alone and most.users == 1:
        parts.append(f"{_text(most.tok_s)} tok/s for one user, the wait for the first token included")
    elif most is not alone:
        load = f"{'at' if most.users is None else 'with'} {_load_text(most)}"
        parts.append(f"{_text(most.tok_s)} tok/s together {load}")
    return f"{_test('both', first)}: {', '.join(parts)}"


def _together(combination: CombinationNumbers) -> float:
    return 0.0 if combination.tok_s is None else combination.tok_s.value


def facts_to_paste(run: Run, ran: CellRun, *, is_here: bool) -> dict[str, str | None]:
    """Return what ran, and on which machine; None: not known. `is_here`: the server's machine is known.

    The machine's name is left out: it is of no use to others.
    """
    served, host = ran.served_by, machine_facts(run)
    if not is_here:
        host = dict.fromkeys(host)
    image = server_facts(served)
    memory = host["RAM"] and f"{host['RAM']} RAM"
    return {
        "Machine": ", ".join(filter(None, (host["GPU"], host["CPU"], memory))) or None,
        "GPU memory": host["GPU memory"],
        "Power": host["Power"],
        "Kernel": host["Kernel"],
        "ROCm": image["ROCm of the image"] or host["ROCm of the host"],
        "Engine": ", ".join(filter(None, [_engine_name(ran), served.version, served.image])) or None,
        "Model": served.model or run.scenario.model,
        "Weights": _weights(ran),
        "Date": format_date(run.started_wall_s),
        "Measured with": measured_with(run),
    }


def _engine_name(ran: CellRun) -> str | None:
    name = None if ran.served_by.startup is None else ran.served_by.startup.engine
    return next((engine.title for engine in engines() if engine.name == name), None)


def _weights(ran: CellRun) -> str | None:
    """The quantization, or the type of the weights, as the server reports it, and their size."""
    effective, size = ran.served_by.effective, run_model(ran)
    kinds = (effective.get(key) for key in ("quantization", "model_ftype", "dtype"))
    kind = next((str(text) for text in kinds if text and str(text).lower() != "none"), None)
    return ", ".join(filter(None, [kind, None if size is None else gib(size.weights_bytes)])) or None


def _state(report: CombinationsReport) -> Iterator[Element]:
    yield Paragraph(lead_of_combinations(report.combinations), "lead")
    yield from simulated_note(report.simulated)
    if not report.valid:
        yield Paragraph("do not trust these numbers", "bad", "INVALID")
        yield Bullets([Bullet(text, "bad") for text in report.reasons])


def _test(kind: str, combination: CombinationNumbers) -> str:
    """The name of a test: pp512, tg128, pp512+tg128, each with its context."""
    names = {
        "pp": f"pp{combination.prompt}",
        "tg": f"tg{combination.output}",
        "both": f"pp{combination.prompt}+tg{combination.output}",
    }
    return names[kind] + (f" @ d{combination.depth}" if combination.depth else "")


def _tests(combination: CombinationNumbers) -> Iterator[list[str]]:
    prompt, limited = (
        NOTHING if combination.prompt_tokens is None else f"{combination.prompt_tokens:,}",
        combination.client_limited,
    )
    pp, tg, ttft, tpot = (
        _text(number, is_limited=field in limited)
        for number, field in (
            (combination.pp, "ttft"),
            (combination.tg, "tpot"),
            (combination.ttft_ms, "ttft"),
            (combination.tpot_ms, "tpot"),
        )
    )
    yield [_test("pp", combination), pp, ttft, "", prompt, _answers(combination)]
    yield [_test("tg", combination), tg, "", tpot, "", ""]


def _shared(combination: CombinationNumbers) -> list[str]:
    numbers = (
        (combination.tok_s, "output_tok_s"),
        (combination.tg, "tpot"),
        (combination.ttft_ms, "ttft"),
        (combination.tpot_ms, "tpot"),
    )
    texts = [_text(number, is_limited=field in combination.client_limited) for number, field in numbers]
    return [_load_text(combination), _test("both", combination), *texts, _answers(combination)]


def _load_text(combination: CombinationNumbers) -> str:
    return count(combination.users, "user") if combination.users is not None else f"{combination.rate:g} requests/s"


def _answers(combination: CombinationNumbers) -> str:
    return f"{combination.answers}, {combination.failed} FAILED" if combination.failed else f"{combination.answers}"


def _text(number: Repeated | None, *, is_limited: bool = False) -> str:
    """The number with its interval, and the sign where the load generator limited it: "94.2 ± 1.3"."""
    if number is None:
        return NOTHING
    value = figures(number.value) + LIMITED * is_limited
    if number.plus_minus is None:
        return value
    return f"{value} ± " + ("over 100 %" if number.plus_minus > number.value else figures(number.plus_minus, 2))


def _legend(combinations: Sequence[CombinationNumbers]) -> str:
    repeats = max((combination.repeats for combination in combinations), default=0)
    interval = f"±: the 95 % interval of the mean over {repeats} repeats (Student's t, the wider side)."
    if repeats < 2:
        interval = "One repeat has no interval; --repeats 3 gives one."
    depth = (
        " @ d: after a context that a request before put into the cache."
        if any(combination.depth for combination in combinations)
        else ""
    )
    limited = (
        f" {LIMITED}: the load generator was late."
        if any(combination.client_limited for combination in combinations)
        else ""
    )
    return (
        f"{interval} pp: uncached prompt tokens / TTFT of one request at a time, over HTTP. tg: after the first token, "
        f"with the prompt before it.{depth}{limited}"
    )


def _notes(combinations: Sequence[CombinationNumbers]) -> Iterator[Element]:
    if texts := combination_notes(combinations):
        yield Bullets([Bullet(text, "inconclusive") for text in texts])


def combination_notes(combinations: Sequence[CombinationNumbers]) -> list[str]:
    """Return what is missing, or is not what it seems."""
    deep = [combination for combination in combinations if combination.depth and combination.users == 1]
    lost = [
        combination
        for combination in deep
        if combination.cached_share is not None and combination.cached_share < MIN_CACHED
    ]
    unknown = [combination for combination in deep if combination.cached_share is None]
    short = [
        combination
        for combination in combinations
        if combination.answer_tokens is not None and combination.answer_tokens < combination.output
    ]
    notes = []
    if any(combination.tg is None and combination.answers > combination.failed for combination in combinations):
        notes.append(
            "tg and TPOT are not known where an answer came in fewer than 5 pieces, with no interval where only one "
            "repeat has them: a longer --output has more pieces."
        )
    if lost:
        worst = min(lost, key=lambda combination: combination.cached_share or 0.0)
        notes.append(
            f"The server had {100 * (worst.cached_share or 0.0):.0f} % of a context of {worst.depth:,} tokens in its "
            "cache, so pp at that depth is not known, and TTFT includes computing the rest."
        )
    if unknown:
        notes.append("The server does not report cached tokens, so pp @ d is not known; TTFT is.")
    if short:
        combination = min(short, key=lambda candidate: (candidate.answer_tokens or 0) / candidate.output)
        notes.append(
            f"Answers ended after {combination.answer_tokens} of {combination.output} tokens (median); --ignore-eos "
            "gives all of them the same length, where the server can."
        )
    return notes
