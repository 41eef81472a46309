"""The sum over all that is asked of a server: two runs are compared only if theirs agree."""

import hashlib
from pathlib import Path

import msgspec

from harness.scenario.lengths import Lengths, Pairs, read_pairs
from harness.scenario.scenario import SERVER_TOKENIZER, Load, Prompts, Scenario, taken_together
from harness.workload.prompt_file import read_rows
from harness.workload.prompts import messages, output_tokens, trace_digest
from harness.workload.vocabulary import one_token_words

_TIMED_REQUESTS = 1000  # of a load that has no fixed number, so many go into the hash


def workload_sha256(scenario: Scenario, folder: Path) -> str:
    """The hash of all that is asked of a server in this scenario, without the salt, whose words differ by cell.

    Per load: the parameters that shape it, and its measured requests (the first 1000 where time limits them) in the
    groups that are sent together: bursts or conversations. Words that a server's own tokenizer chooses are not known
    yet; that they are chosen is part of the sum.
    """
    prompts = scenario.prompts
    rows = read_rows(folder / prompts.file) if prompts.file else []
    pairs = pairs_of(prompts.tokens, folder)
    words = local_words(prompts, folder)
    by_row = any(row.max_tokens is not None for row in rows)
    digest = hashlib.sha256()
    if prompts.tokenizer is not None:
        digest.update(b"tokens counted by the server" if prompts.tokenizer == SERVER_TOKENIZER else b"tokens counted")
    for name, load in sorted(scenario.loads.items()):
        digest.update(msgspec.json.encode([name, scenario.seed, _shape(load)]))
        if load.trace is not None:
            digest.update(trace_digest(load.trace, scenario.seed, folder))
            continue
        number, group = load.requests or _TIMED_REQUESTS, taken_together(load)
        for first in range(0, number, group):
            indices = range(first, min(first + group, number))
            together = [messages(prompts, scenario.seed, index, None, rows, pairs, words) for index in indices]
            digest.update(msgspec.json.encode(together))
        if by_row or not isinstance(load.output_tokens, int):
            most = pairs_of(load.output_tokens, folder)
            digest.update(
                msgspec.json.encode([output_tokens(load, scenario.seed, i, rows, most) for i in range(number)])
            )
    return digest.hexdigest()


def pairs_of(lengths: int | Lengths, folder: Path) -> Pairs:
    """The lines of the file that lengths come from, if they come from one. Raises HarnessError."""
    return read_pairs(folder / lengths.file) if isinstance(lengths, Lengths) and lengths.file else ()


def local_words(prompts: Prompts, folder: Path) -> tuple[str, ...]:
    """The words that a local tokenizer takes for one token each; none where there is no such. Raises HarnessError."""
    if prompts.tokenizer is None or prompts.tokenizer == SERVER_TOKENIZER:
        return ()
    return one_token_words(folder / prompts.tokenizer)


def _shape(load: Load) -> dict[str, object]:
    keys = ("user", "users", "requests", "duration_s", "batch_size", "turns", "think_s", "output_tokens", "output")
    shape = {key: getattr(load, key) for key in keys}
    shape |= {} if load.endpoint == "chat" else {"endpoint": load.endpoint}
    shape |= {} if load.answer is None else {"answer": load.answer}
    behaviour = ("think", "abandon", "regenerate", "in_flight", "agent", "rag", "stages")
    shape |= {key: value for key in behaviour if (value := getattr(load, key))}
    return shape if load.arrivals is None else shape | {"arrivals": load.arrivals}
