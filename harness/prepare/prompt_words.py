"""The words that prompts of an exact length are made of, found once before the load."""

from harness.errors import HarnessError
from harness.prepare.experiment import Experiment
from harness.scenario.scenario import SERVER_TOKENIZER
from harness.serve import Endpoint
from harness.serve.tokenize import counter
from harness.workload import local_words
from harness.workload.vocabulary import words_of

_known: dict[tuple[str, str], tuple[str, ...]] = {}  # by run and server, however often that starts


def counted_words(
    experiment: Experiment, run_id: str, server: str, endpoint: Endpoint | None, api_key: str | None
) -> tuple[str, ...]:
    """Those that are one token each, by the tokenizer that the scenario names; none where it names none.

    Raises HarnessError, ServerError. No endpoint: there is no server that could be asked.
    """
    prompts = experiment.scenario.prompts
    if prompts.tokenizer != SERVER_TOKENIZER:
        return local_words(prompts, experiment.folder)
    if endpoint is None:
        raise HarnessError(
            f"prompts.tokenizer: '{server}' has no server that could count tokens",
            next_step="Name a local tokenizer.json.",
        )
    if (run_id, server) not in _known:
        model = endpoint.served_by.model or experiment.scenario.model
        count = counter(endpoint.url, model, api_key, endpoint.ask_engine)
        _known[run_id, server] = words_of(count, f"the server '{server}'")
    return _known[run_id, server]
