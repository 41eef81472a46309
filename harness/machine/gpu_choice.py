"""Which of a machine's GPUs a server works with."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import HarnessError

Card = Mapping[str, Any]  # as harness.machine.facts.gpus tells of it


def working(cards: Sequence[Card]) -> list[Card]:
    """Cards of their own where there are any: the graphics unit of the processor beside them serves no model."""
    own = [card for card in cards if card.get("integrated") is False]
    return own or list(cards)


# In the order in which they are applied: the runtime counts all GPUs, HIP those that the runtime shows.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def shown(cards: Sequence[Card], devices: Sequence[str], environment: Mapping[str, str]) -> list[Card]:
    """The GPUs that a container is given, in the order in which vLLM counts them.

    `devices`: as in a Compose file; single render nodes among them leave out the others. `environment`: of the
    container, for `VISIBLE`. Without either the GPUs are those that are `working`. Raises HarnessError for what is not
    the number of a GPU.
    """
    paths = [str(device).split(":")[0] for device in devices]
    nodes = [path for path in paths if path.startswith("/dev/dri/renderD")]
    named = bool(nodes) and "/dev/dri" not in paths
    found = [card for card in cards if not named or card["render_node"] in nodes]
    for name in VISIBLE:
        if (text := environment.get(name)) is None:
            continue
        named, numbers = True, [number.strip() for number in text.split(",")]
        missing = [number for number in numbers if not number.isdigit() or int(number) >= len(found)]
        if missing:
            raise HarnessError(f"{name} names '{missing[0]}', and there are {len(found)} GPUs here, counted from 0")
        found = [found[int(number)] for number in numbers]
    return found if named else working(found)
