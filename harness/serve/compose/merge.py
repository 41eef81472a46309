"""One Compose file out of a server's and its gateway's."""

import re
from typing import Any

import yaml

from harness.errors import HarnessError


def with_gateway(server: str, gateway: str) -> str:
    """The Compose file of a server with that of its gateway added, both as text."""
    whole, front = yaml.safe_load(server), yaml.safe_load(gateway)
    whole["x-amd-llm-load"]["gateway"] = front.pop("x-amd-llm-load")
    for part, entries in front.items():
        both = whole.setdefault(part, {})
        for name in entries.keys() & both.keys():
            raise HarnessError(
                f"the templates of the server and of its gateway both have $.{part}.{name}",
                next_step="Rename it in one of the two templates in compose/.",
            )
        both.update(entries)
    return yaml.dump(whole, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not plainly a word: what YAML 1.1 reads as text, YAML 1.2 may read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_WORD = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z][\w./-]*", re.IGNORECASE)


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None if _WORD.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
