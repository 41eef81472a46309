"""What a scenario should know of Lemonade before it runs, and what is no mistake."""

from harness.scenario.lengths import most_of, unread
from harness.scenario.scenario import Load, Scenario, Server, at_once
from harness.serve.compose.template import variable_of
from harness.serve.compose.values import tag_of
from harness.serve.lemonade import MOST, pool_size
from harness.serve.lemonade.arguments import MOST_TOKENS


def hints(scenario: Scenario, threads: int | None) -> list[str]:
    """Sentences for `harness check`; `threads` of the processor that Lemonade will run on, None where not known."""
    servers = {name: server for name, server in scenario.servers.items() if server.template == "lemonade"}
    return [
        hint
        for name, server in servers.items()
        for load_name, load in scenario.loads.items()
        for hint in _of(f"{name} under {load_name}", server, load, threads)
    ]


def _of(where: str, server: Server, load: Load, threads: int | None) -> list[str]:
    found = []
    size = MOST if threads is None else pool_size(threads, tag_of(str(variable_of(server, "image"))))
    if at_once(load) > size:
        found.append(
            f"{where}: {at_once(load):,} requests will be in flight, and Lemonade serves {size} at once"
            f"{' at most' if threads is None else ' on this machine'}: above that its own queue is measured, "
            "not the engine's"
        )
    ctx_size = variable_of(server, "ctx_size")
    most = 0 if load.endpoint == "embeddings" or unread(load.output_tokens) else most_of(load.output_tokens)
    if isinstance(ctx_size, int) and most >= ctx_size:
        found.append(
            f"{where}: answers of {most:,} tokens do not fit into the ctx_size of {ctx_size:,}: every request will fail"
        )
    elif most > MOST_TOKENS:
        found.append(
            f"{where}: for answers of more than {MOST_TOKENS:,} tokens Lemonade has vLLM count each prompt first, "
            "which is measured with it"
        )
    return found
