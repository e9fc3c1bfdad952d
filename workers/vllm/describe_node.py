"""`python -m workers.vllm.describe_node`: this machine's GPUs (by `nvidia-smi`) or CPUs as tables of a fleet file."""

import argparse
import re
import socket
import sys

from workers.vllm.hardware import Gpu, HardwareError, Machine, machine

GIB = 2**30
KEPT_BACK = 0.5  # share of a machine's memory that instances on CPUs leave to the rest


def tables(machine: Machine, *, region: str, node: str, address: str) -> str:
    """Return TOML of GPU types and nodes: a node for each kind of GPU, or one of CPUs."""
    kinds: dict[str, list[Gpu]] = {}
    for gpu in machine.gpus:
        kinds.setdefault(gpu.name, []).append(gpu)
    if not kinds:
        memory = int(machine.memory_bytes * KEPT_BACK)
        return _gpu_type("cpu", "CPU", memory, "cpu") + _node(node, region, "cpu", 1, address)
    written = [
        _gpu_type(type_name(gpus[0]), title, min(gpu.memory_bytes for gpu in gpus), "gpu")
        + _node(
            node if len(kinds) == 1 else f"{node}-{type_name(gpus[0])}", region, type_name(gpus[0]), len(gpus), address
        )
        for title, gpus in kinds.items()
    ]
    return "\n".join(written)


def type_name(gpu: Gpu) -> str:
    """Return a short name such as h100-80gb; of a known GPU, that of its size next to what the driver reports."""
    from scheduling.fleet.profile_estimate import GPUS  # brings NumPy, which few commands need

    words = re.sub(r"^(NVIDIA|Tesla|GeForce|\s)+", "", gpu.name).split()
    short = f"{slug(words[0].partition('-')[0])}-{round(gpu.memory_bytes / GIB)}gb"
    known = [name for name in GPUS if name.partition("-")[0] == short.partition("-")[0]]
    return min(known, key=lambda name: abs(GPUS[name].memory_bytes - gpu.memory_bytes), default=short)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "node"


def _gpu_type(name: str, title: str, memory_bytes: int, device: str) -> str:
    return f"""[[gpu_types]]
name = "{name}"
title = "{title}"
device = "{device}"
memory_bytes = {memory_bytes}
on_demand_usd_per_hour = 0

"""


def _node(name: str, region: str, gpu_type: str, count: int, address: str) -> str:
    return f"""[[nodes]]
name = "{name}"
region = "{region}"
gpu_type = "{gpu_type}"
gpu_count = {count}
address = "{address}"
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.vllm.describe_node", description=__doc__)
    parser.add_argument("--region", default="here", help="name of its region (default: %(default)s)")
    parser.add_argument("--name", default=socket.gethostname(), help="name of the node (default: this host's)")
    parser.add_argument("--address", default="127.0.0.1", help="of its instances (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        this_machine = machine()
    except HardwareError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(tables(this_machine, region=options.region, node=slug(options.name), address=options.address))
    return 0


if __name__ == "__main__":
    sys.exit(main())
