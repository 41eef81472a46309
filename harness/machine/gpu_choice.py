"""Which of a machine's GPUs a server works with."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import HarnessError

Card = Mapping[str, Any]  # as harness.machine.facts.gpus tells of it


def working(cards: Sequence[Card]) -> list[Card]:
    """Cards of their own where there are any: the graphics unit of the processor beside them serves no model."""
    own = [card for card in cards if card.get("integrated") is False]
    return own or list(cards)


def shown(cards: Sequence[Card], devices: Sequence[str] = (), numbers: Sequence[int | str] | None = None) -> list[Card]:
    """The GPUs that a container is given, in the order in which vLLM counts them.

    `devices`: as in a Compose file; single render nodes among them leave out the others. `numbers`: of
    HIP_VISIBLE_DEVICES. What neither of the two names is `working`. Raises HarnessError for a number that none has.
    """
    paths = [str(device).split(":")[0] for device in devices]
    nodes = [path for path in paths if path.startswith("/dev/dri/renderD")]
    named = bool(nodes) and "/dev/dri" not in paths
    found = [card for card in cards if not named or card["render_node"] in nodes]
    if numbers is None:
        return found if named else working(found)
    missing = [number for number in numbers if not str(number).strip().isdigit() or int(number) >= len(found)]
    if missing:
        raise HarnessError(f"gpus names {missing[0]}, and there are {len(found)} GPUs here, counted from 0")
    return [found[int(number)] for number in numbers]
