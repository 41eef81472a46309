"""Power settings of the machines of runs: numbers of different ones are not numbers of the same machine.

A setting that a manifest does not have is not known, which is no difference.
"""

from collections.abc import Mapping, Sequence

from harness.base.reason import Reason, because
from harness.records.manifest import Machine, Run

PROFILE = "power profile"
# Keys of `Machine.kernel_parameters`, in the order in which they are named.
POWER_KEYS = (PROFILE, "cpu governor", "cpu energy preference", "gpu power cap")
LEVEL = "gpu performance level"  # of the GPUs


def power_settings(machine: Machine) -> dict[str, str]:
    """Return the power settings of a machine that its manifest has, by name."""
    parameters = machine.kernel_parameters
    settings = {key: parameters[key] for key in POWER_KEYS if parameters.get(key)}
    levels = dict.fromkeys(str(gpu["performance_level"]) for gpu in machine.gpus if gpu.get("performance_level"))
    return settings | ({LEVEL: ", ".join(levels)} if levels else {})


def power_text(machine: Machine) -> str | None:
    """The power settings in words; None: the manifest has none of them."""
    settings = power_settings(machine)
    named = [settings[PROFILE]] if PROFILE in settings else []
    named += [f"{key} {value}" for key, value in settings.items() if key != PROFILE]
    return ", ".join(named) or None


def differing_settings(first: Machine, second: Machine) -> list[str]:
    """The names of the power settings that both machines have, with different values."""
    one_side, other_side = power_settings(first), power_settings(second)
    return [key for key in one_side if key in other_side and one_side[key] != other_side[key]]


def power_note(runs: Sequence[Run]) -> Reason | None:
    """A note on runs whose power settings differ, or are not known of some of them; None: they are alike."""
    machines = {run.id: run.server_machine for run in runs}
    keys = [key for key in (*POWER_KEYS, LEVEL) if len(_values(machines, key)) > 1]
    if keys:
        parts = [
            f"{key}: " + ", ".join(f"{value} in {', '.join(ids)}" for value, ids in _values(machines, key).items())
            for key in keys
        ]
        text = f"the power settings differ, so that a difference may be theirs ({'; '.join(parts)})"
        return because("power_differs", text, settings={key: _values(machines, key) for key in keys})
    unknown = [name for name, machine in machines.items() if power_text(machine) is None]
    if unknown and len(unknown) < len(machines):
        text = f"the power settings of {', '.join(unknown)} are not recorded: whether they are those of the others"
        return because("power_unknown", f"{text} is not known", runs=unknown)
    return None


def _values(machines: Mapping[str, Machine], key: str) -> dict[str, list[str]]:
    """The runs by their value of a setting, without those that do not have it."""
    values: dict[str, list[str]] = {}
    for name, machine in machines.items():
        if (value := power_settings(machine).get(key)) is not None:
            values.setdefault(value, []).append(name)
    return values
