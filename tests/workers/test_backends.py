"""Actuators: processes and a Docker daemon on a socket."""

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from workers.backends.actuators import ActuatorError, BackendSpec, has_docker, is_left_behind, listens, owner_of
from workers.backends.docker import OWNER, Docker
from workers.backends.processes import MARK, Processes
from workers.vllm.processes import read, started_ticks

SERVER = shlex.join([sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"])


def exits(code):
    return shlex.join([sys.executable, "-c", code, "{port}"])


def test_a_process_listens_on_the_port_that_it_is_given(monkeypatch):
    monkeypatch.setenv("PILOTHOUSE_SECRET_KEY", "secret")
    processes = Processes(owner_of("test"))
    started = processes.start(BackendSpec("web", command=SERVER))
    try:
        assert listens(started.address)
        assert processes.runs(started.handle)
        environment = read(int(started.handle), "environ")
        assert f"{MARK}={processes.owner}".encode() in environment
        assert b"secret" not in environment
    finally:
        processes.stop(started.handle)
    assert not processes.runs(started.handle)
    assert not listens(started.address)
    processes.stop(started.handle)  # it has ended


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (BackendSpec("one", command=exits("import sys; sys.exit('no model')")), "one ended with status 1: no model"),
        (
            BackendSpec("one", command=exits("import time; time.sleep(60)"), start_limit_s=0.2),
            "did not listen within 0.2 s",
        ),
        (BackendSpec("one", command="sleep 60"), "does not say {port}"),
        (BackendSpec("one", command="/no/such/program {port}"), "cannot be started"),
        (BackendSpec("one", command="run 'it {port}"), "cannot be read: No closing quotation"),
    ],
)
def test_a_process_that_cannot_be_started_leaves_nothing(spec, says):
    processes = Processes(owner_of("test"))
    with pytest.raises(ActuatorError, match=says.replace("{", r"\{")):
        processes.start(spec)
    assert not processes._started


def test_what_a_dead_process_left_behind_is_ended():
    owner = owner_of("sweep-test")
    left = f"sweep-test:{os.getpid()}:{started_ticks(os.getpid()) + 1}"
    orphan = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], MARK: left})
    own = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], MARK: owner})
    try:
        assert Processes(owner).sweep() == 1
        assert orphan.wait(5) != 0
        assert own.poll() is None
    finally:
        for process in (own, orphan):
            process.kill()
            process.wait(5)


def test_whose_marks_are_left_behind():
    own = owner_of("here")
    assert not is_left_behind(own, own)
    assert is_left_behind(f"here:{os.getpid()}:1", own)
    assert not is_left_behind(f"there:{os.getpid()}:1", own)
    for strange in ("", "here", "here:x:y"):
        assert not is_left_behind(strange, own)


class Daemon(BaseHTTPRequestHandler):
    """As much of Docker's API as is used; a container's port is one that the test listens on."""

    containers: dict = {}
    port = 0
    calls: list = []

    def answer(self, status, value=None):
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_call(self):
        url = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        self.calls.append((self.command, url.path, body))
        parts = url.path.strip("/").split("/")
        if parts[1] == "create":
            if body["Image"] == "missing":
                return self.answer(404, {"message": "No such image: missing"})
            name = f"c{len(self.calls)}"
            self.containers[name] = body
            return self.answer(201, {"Id": name})
        if parts[1] == "json":
            label = json.loads(parse_qs(url.query)["filters"][0])["label"][0]
            listed = [
                {"Id": name, "Labels": one["Labels"]} for name, one in self.containers.items() if label in one["Labels"]
            ]
            return self.answer(200, listed)
        if self.command == "DELETE":
            return self.answer(204 if self.containers.pop(parts[1], None) else 404, None)
        if parts[-1] == "start":
            return self.answer(204)
        one = self.containers.get(parts[1])
        if one is None:
            return self.answer(404, {"message": "no such container"})
        ports = {port: [{"HostIp": "127.0.0.1", "HostPort": str(self.port)}] for port in one.get("ExposedPorts", {})}
        running = one["Image"] != "exits"
        return self.answer(
            200, {"State": {"Running": running, "ExitCode": 0 if running else 3}, "NetworkSettings": {"Ports": ports}}
        )

    do_GET = do_POST = do_DELETE = handle_call

    def log_message(self, *_):
        pass

    def address_string(self):
        return "unix"


@pytest.fixture
def daemon(tmp_path):
    path = str(tmp_path / "docker.sock")

    class UnixServer(HTTPServer):
        address_family = socket.AF_UNIX

        def server_bind(self):
            Path(path).unlink(missing_ok=True)
            self.socket.bind(path)

    Daemon.containers, Daemon.calls = {}, []
    with socket.create_server(("127.0.0.1", 0)) as listener, UnixServer(path, Daemon) as server:
        Daemon.port = listener.getsockname()[1]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield path
        server.shutdown()


def test_a_container_is_created_started_and_removed(daemon):
    docker = Docker(daemon, owner_of("test"))
    started = docker.start(BackendSpec("py", image="python:3.11", command="serve 8000", container_port=8000))
    assert started.address == f"127.0.0.1:{Daemon.port}"
    assert docker.runs(started.handle)
    (_, _, body) = Daemon.calls[0]
    assert (body["Image"], body["Cmd"], body["Labels"][OWNER]) == ("python:3.11", ["serve", "8000"], docker.owner)
    assert body["HostConfig"]["PortBindings"] == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]}
    docker.stop(started.handle)
    assert not docker.runs(started.handle)
    assert docker.start(BackendSpec("py", image="python:3.11")).address == ""


@pytest.mark.parametrize(("image", "says"), [("missing", "404: No such image"), ("exits", "ended with status 3")])
def test_a_container_that_cannot_be_started_is_removed(daemon, image, says):
    with pytest.raises(ActuatorError, match=says):
        Docker(daemon, owner_of("test")).start(BackendSpec("py", image=image))
    assert not Daemon.containers


def test_containers_of_a_dead_process_are_removed(daemon):
    docker = Docker(daemon, owner_of("test"))
    kept = docker.start(BackendSpec("py", image="python:3.11"))
    Daemon.containers["left"] = {"Labels": {OWNER: "test:1:1"}, "Image": "x"}
    Daemon.containers["other"] = {"Labels": {OWNER: "elsewhere:1:1"}, "Image": "x"}
    assert docker.sweep() == 1
    assert set(Daemon.containers) == {kept.handle, "other"}


def test_no_daemon(tmp_path):
    assert not has_docker("")
    assert not has_docker(str(tmp_path / "none.sock"))
    with pytest.raises(ActuatorError, match="does not answer"):
        Docker(str(tmp_path / "none.sock"), "x").start(BackendSpec("py", image="python"))
