"""Findings about how the text reaches the client, which change what its times mean."""

from harness.base.measured import Bundle
from harness.base.units import count, figures
from harness.engines import engines
from harness.numbers.summary import Action
from harness.questions.findings.rules import RowFacts, RuleResult, rule

_PROXIES = {  # by a word of the headers `server` and `via`: what switches its buffering off, and where
    "nginx": ("nginx", "proxy_buffering off;"),
    "openresty": ("nginx", "proxy_buffering off;"),
    "caddy": ("Caddyfile, reverse_proxy", "flush_interval -1"),
}


@rule(
    when="the first piece of most answers has two tokens or more, or most answers of 16 tokens or more come in one or "
    "two pieces; tool calls and answers within 0.1 s do not count",
    means="The server or a proxy collects tokens and sends many at once. Users wait for text that exists already, and "
    "the time to the first token is not that of the model. TPOT counts only what came after the first piece.",
    actions="no buffering in what is between the client and the engine (nginx: `proxy_buffering off`)",
    misleads=True,
)
def stream_bundled(row: RowFacts) -> RuleResult | None:
    bundle = row.row.pooled.bundle
    if bundle is None or any(limit.what == "shared_reads" for cell in row.cells for limit in cell.limits):
        return None  # the load generator may have joined the chunks itself
    pieces = f"an answer of {figures(bundle.tokens)} tokens came in {count(round(bundle.pieces), 'piece')}"
    first = "at its end" if bundle.pieces <= 1 else "of which the first may have many tokens"
    if bundle.pieces > 1 and bundle.first_tokens is not None:
        first = f"the first with about {count(round(bundle.first_tokens), 'token')}"
    whole = row.row.pooled.answer_tok_s
    speed = "" if whole is None else f"; {figures(whole)} tok/s over the whole answer, with the wait for its start"
    sender = f"the answers come through {bundle.via}" if bundle.via else "no header names what is in between"
    return RuleResult(
        cost=None,
        measured=f"{pieces}, {first}{speed}",
        why=f"a proxy, a gateway or the server's own stream interval; {sender}",
        actions=[_unbuffered(row, bundle)],
        values={"pieces": bundle.pieces, "first_tokens": bundle.first_tokens, "tokens": bundle.tokens,
                "via": bundle.via, "answer_tok_s": whole},
    )  # fmt: skip


def _unbuffered(row: RowFacts, bundle: Bundle) -> Action:
    """The action that lets each token pass when it is there."""
    via = (bundle.via or "").lower()
    proxy = next((setting for word, setting in _PROXIES.items() if word in via), None)
    engine = next((engine for engine in engines() if engine.unbuffered and engine.title.lower() in via), None)
    if engine is not None and engine.unbuffered:
        proxy = (engine.title, engine.unbuffered)
    if proxy is not None:
        where, text = proxy
        return row.action("Switch the buffering off", settings={where: text}, about="variables")
    ways = [f"{engine.title}: `{engine.unbuffered}`" for engine in engines() if engine.unbuffered]
    do = "Send the load straight to the engine, and compare; then switch off buffering in what is in between "
    do += f"({'; '.join(['nginx: `proxy_buffering off;`', *ways])})"
    return row.action(do, about="variables")


RULES = (stream_bundled,)
