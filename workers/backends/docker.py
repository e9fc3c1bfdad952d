"""Backends as containers, by the HTTP API of a Docker daemon on its Unix socket (Engine API 1.41 and later).

Images are not pulled: a pull may take minutes, and the host's operator decides what is on it.
"""

import http.client
import json
import socket
import time
from typing import Any, Final
from urllib.parse import urlencode

from workers.backends.actuators import HOST, POLL_S, ActuatorError, BackendSpec, Started, is_left_behind, listens

OWNER: Final = "pilothouse.owner"
"""Label of our containers; its value is the owner."""
CALL_S: Final = 30.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=CALL_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Docker:
    """The containers of *owner* (`actuators.owner_of`), at the daemon on the socket *path*."""

    def __init__(self, path: str, owner: str) -> None:
        self.path, self.owner = path, owner

    def start(self, spec: BackendSpec) -> Started:
        """Create and start a container, and wait until its port accepts connections. Raises ActuatorError."""
        port = f"{spec.container_port}/tcp"
        body: dict[str, Any] = {"Image": spec.image, "Labels": {OWNER: self.owner, "pilothouse.backend": spec.name}}
        if spec.command:
            body["Cmd"] = spec.arguments
        if spec.container_port:
            body |= {
                "ExposedPorts": {port: {}},
                "HostConfig": {"PortBindings": {port: [{"HostIp": HOST, "HostPort": ""}]}},
            }
        handle = str(self._call("POST", "/containers/create", body)["Id"])
        try:
            self._call("POST", f"/containers/{handle}/start")
            return self._ready(spec, handle, port)
        except ActuatorError:
            self.stop(handle)
            raise

    def _ready(self, spec: BackendSpec, handle: str, port: str) -> Started:
        until_s = time.monotonic() + spec.start_limit_s
        while time.monotonic() < until_s:
            seen = self._call("GET", f"/containers/{handle}/json")
            if not seen["State"]["Running"]:
                raise ActuatorError(f"{spec.name} ended with status {seen['State'].get('ExitCode')}")
            bound = (seen.get("NetworkSettings", {}).get("Ports") or {}).get(port) or []
            address = f"{HOST}:{bound[0]['HostPort']}" if bound else ""
            if not spec.container_port or (address and listens(address)):
                return Started(handle, address)
            time.sleep(POLL_S)
        raise ActuatorError(f"{spec.name} did not listen within {spec.start_limit_s:g} s")

    def runs(self, handle: str) -> bool:
        """Whether the container runs; false without an answer of the daemon."""
        try:
            return bool(self._call("GET", f"/containers/{handle}/json")["State"]["Running"])
        except ActuatorError:
            return False

    def stop(self, handle: str) -> None:
        """Remove the container by force, with its volumes."""
        try:
            self._call("DELETE", f"/containers/{handle}?force=true&v=true")
        except ActuatorError:
            return  # it is gone, or its daemon is: `sweep` looks again

    def sweep(self) -> int:
        """Remove containers that a dead process of this installation started; return how many."""
        labelled = urlencode({"all": "true", "filters": json.dumps({"label": [OWNER]})})
        ours = self._call("GET", f"/containers/json?{labelled}")
        left = [each for each in ours if is_left_behind(str(each["Labels"].get(OWNER, "")), self.owner)]
        for each in left:
            self.stop(str(each["Id"]))
        return len(left)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = _Connection(self.path)
        try:
            connection.request(
                method,
                path,
                json.dumps(body) if body is not None else None,
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            text, status = answer.read(), answer.status
        except (OSError, http.client.HTTPException) as error:
            raise ActuatorError(f"Docker at {self.path} does not answer: {error}") from error
        finally:
            connection.close()
        try:
            value = json.loads(text) if text.strip() else {}
        except ValueError:
            value = {"message": text[:200].decode("utf-8", "replace")}
        if status >= 400:
            raise ActuatorError(f"Docker answered {status}: {value.get('message', '')}")
        return value
