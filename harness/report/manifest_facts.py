"""What a run ran on and with, as facts for people: the part of run.json that decides its numbers."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from harness.base.command_line import command_line
from harness.base.units import format_date, gib
from harness.hardware.gpu_table import gpu_title
from harness.numbers.power_settings import POWER_KEYS, power_text
from harness.records.manifest import Machine, Run, ServedBy

UNKNOWN = "not recorded"
_DRIVER = "amdgpu version"


def describe_gpus(machine: Machine) -> str | None:
    """The GPUs of a machine with their targets: "2x Radeon RX 7900 XTX gfx1100"; None without one."""
    gpus = Counter(filter(None, map(gpu_title, machine.gpus)))
    return ", ".join(name if number == 1 else f"{number}x {name}" for name, number in gpus.items()) or None


def describe_machine(machine: Machine) -> str | None:
    """The GPUs of a machine, else its CPU; None: neither is known."""
    return describe_gpus(machine) or machine.cpu


def machine_facts(run: Run) -> dict[str, str | None]:
    """The facts of the server's machine; None: the manifest does not have it."""
    machine = run.server_machine
    parameters = {key: value for key, value in machine.kernel_parameters.items() if key not in (*POWER_KEYS, _DRIVER)}
    return {
        "GPU": describe_gpus(machine),
        "GPU memory": "; ".join(filter(None, map(_memory_split, machine.gpus))) or None,
        "CPU": machine.cpu,
        "RAM": None if machine.ram_bytes is None else gib(machine.ram_bytes),
        "Power": power_text(machine),
        "Kernel": machine.kernel,
        "Kernel parameters": ", ".join(f"{key}={value}" if value else key for key, value in parameters.items()) or None,
        "amdgpu driver": machine.kernel_parameters.get(_DRIVER),
        "ROCm of the host": machine.rocm,
        "Docker": machine.docker,
    }


def server_facts(served: ServedBy) -> dict[str, str | None]:
    """The facts of a server; None: the manifest does not have it."""
    size, startup, contents = served.model_size, served.startup, served.contents
    weights = None if size is None else f"{size.name}, {gib(size.weights_bytes)}"
    return {
        "Image": served.image,
        "Image digest": served.image_digest,
        "Engine": " ".join(filter(None, (startup.engine if startup else None, served.version))) or None,
        "ROCm of the image": contents.rocm if contents else None,
        "Model as served": served.model,
        "Weights": weights,
        "Quantization": str(served.effective.get("quantization") or "") or None,
        "Arguments": command_line(*served.arguments) if served.arguments else None,
    }


def measured_with(run: Run) -> str:
    """The suite with its version, as far as the manifest has it."""
    return f"amd-llm-load {run.versions.get('amd-llm-load', '')}".strip()


def manifest_facts(run: Run) -> dict[str, str]:
    """All facts of a run by name, those of its servers with the server's name."""
    facts: dict[str, str | None] = {"Run": run.id, "Date": format_date(run.started_wall_s), "Model": run.scenario.model}
    facts |= machine_facts(run)
    if run.remote is not None:
        facts["Load generator"] = ", ".join(filter(None, (run.machine.name, run.machine.cpu)))
    by_server = {cell.server: cell.served_by for cell in reversed(run.served)}
    for server in run.scenario.servers:
        if server in by_server:
            facts |= {f"{name} ({server})": text for name, text in server_facts(by_server[server]).items()}
    facts["Measured with"] = measured_with(run)
    return {name: text or UNKNOWN for name, text in facts.items()}


def _memory_split(gpu: Mapping[str, Any]) -> str | None:
    """VRAM of a card; of an APU the part that the firmware reserves (UMA), and the GTT."""
    vram, gtt = gpu.get("vram_bytes"), gpu.get("gtt_bytes")
    if not isinstance(vram, int):
        return None
    if not gpu.get("integrated") or not isinstance(gtt, int):
        return f"{gib(vram)} VRAM"
    return f"{gib(vram)} VRAM (UMA) and {gib(gtt)} GTT"
