"""The files of `docs/operate/deploy`: what their tools accept, and what this version has."""

import json
import subprocess
import sys
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from django.conf import settings

from controlplane import env
from controlplane.operations import Operations
from tests.batches.test_frozen_owner import ROWS
from tests.postgres import cluster
from tests.processes import Stack, checks_of, until
from tests.redis_server import redis_with_tls
from tests.supervisor.test_up import ROOT, free_port

FOLDER = Path(__file__).parents[2] / "docs" / "operate" / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ITEMS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())["items"]
PODS = {item["metadata"]["name"]: item["spec"]["template"] for item in ITEMS if "template" in item.get("spec", {})}
CONTAINERS = {name: pod["spec"]["containers"][0] for name, pod in PODS.items()}
OURS = {"prepare": "prepare", "relay": "web", "dispatcher": "web", "celery": "celery", "beat": "beat"}
"""Pods, with the services of `compose.yaml` that are the same program."""
VARIABLES = {env.variable_of(name) for name in env.Environment.model_fields}


def test_compose_accepts_the_file():
    PyCompose.from_json(json.dumps(COMPOSE))
    with pytest.raises(ValueError, match="stop_grace"):
        PyCompose.from_json(json.dumps(COMPOSE).replace("stop_grace_period", "stop_grace"))


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_kubernetes_accepts_the_manifests(version):
    for item in ITEMS:
        kubernetes_validate.validate(item, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(ITEMS[0] | {"dta": {}}, version, strict=True)


def test_what_they_refer_to_is_there():
    ports = {name: {port["name"] for port in one.get("ports", ())} for name, one in CONTAINERS.items()}
    claims = {item["metadata"]["name"] for item in ITEMS if item["kind"] == "PersistentVolumeClaim"}
    for item in ITEMS:
        if item["kind"] == "Service":
            part = item["spec"]["selector"]["part"]
            assert PODS[part]["metadata"]["labels"] == {"part": part}
            assert all(port.get("targetPort", port["name"]) in ports[part] for port in item["spec"]["ports"])
        elif "selector" in item.get("spec", {}):
            assert item["spec"]["selector"]["matchLabels"] == item["spec"]["template"]["metadata"]["labels"]
    for pod in PODS.values():
        own = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"].get("volumes", ())
        }
        assert set(own.values()) <= claims
    assert {"state"} == {mount["name"] for name in OURS for mount in CONTAINERS[name]["volumeMounts"]}


def test_both_run_the_same_with_variables_that_exist():
    (config,) = [item["data"] for item in ITEMS if item["kind"] == "ConfigMap"]
    for name, service in OURS.items():
        there = {variable["name"] for variable in CONTAINERS[name]["env"]} | set(config)
        assert there - {"POD_IP"} <= VARIABLES
        assert set(SERVICES[service]["environment"]) <= VARIABLES
        assert SERVICES[service]["command"] == CONTAINERS[name]["command"]
    queues = {settings.CELERY_TASK_DEFAULT_QUEUE, *(route["queue"] for route in settings.CELERY_TASK_ROUTES.values())}
    assert f"--queues={','.join(sorted(queues))}" in SERVICES["celery"]["command"]


def test_probes_and_options_name_what_there_is():
    web = CONTAINERS["relay"]
    paths = {probe: web[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert set(paths.values()) <= Operations.paths
    assert paths["readiness"] == "/readyz"
    for word in web["command"]:
        module, separator, name = word.rpartition("=")[2].partition(":")
        if separator:
            assert hasattr(import_module(module), name)


def test_streams_end_before_their_process_is_killed():
    relay = CONTAINERS["relay"]
    *_, waits_s = relay["lifecycle"]["preStop"]["exec"]["command"]
    drain_s, compose_s = env.Environment.model_fields["DRAIN_S"].default, SERVICES["web"]["environment"]
    (grace_s,) = [word.split("=")[1] for word in relay["command"] if word.startswith("--timeout-graceful-shutdown=")]
    kubernetes = PODS["relay"]["spec"]["terminationGracePeriodSeconds"], int(waits_s) + drain_s
    compose = int(SERVICES["web"]["stop_grace_period"].rstrip("s")), compose_s["PILOTHOUSE_DRAIN_S"]
    for given_s, streams_s in (kubernetes, compose):
        assert given_s >= streams_s + int(grace_s) + 10, "the ledger is written after them"


@pytest.mark.services
@pytest.mark.nightly
def test_its_commands_run_on_postgresql_and_a_redis_with_a_private_ca(tmp_path):
    (tmp_path / "ca").mkdir()
    with cluster() as database_url, redis_with_tls(tmp_path / "ca") as redis:
        stack = Stack(tmp_path, database_url, f"rediss://:pw@127.0.0.1:{redis.tls}/0?ssl_ca_certs={redis.ca}")
        port = free_port()

        def words(part: str) -> list[str]:
            replaced = [word.replace("/var/lib/pilothouse", str(tmp_path)) for word in SERVICES[part]["command"]]
            return [word.replace("--port=8000", f"--port={port}") for word in replaced]

        def get(path: str) -> Any:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {key}"}
            )
            with urllib.request.urlopen(request, timeout=10) as response:
                return json.load(response)

        try:
            shell, option, script = words("prepare")
            script = script.replace("python", sys.executable)
            subprocess.run(
                [shell, option, script], cwd=ROOT, env=stack.environment, check=True, stdout=subprocess.DEVNULL
            )
            batch = stack.shell(ROWS, url=stack.emulator(), lines=20, tokens=60, sequences=16)
            stack.one("UPDATE accounts_tenant SET operates_fleet = true RETURNING name")
            key = stack.manage("create_key", "acme", "--role", "operator").strip()
            for part in ("celery", "beat", "web"):
                stack.start(*words(part))
            until(lambda: checks_of(port), 120)
            until(lambda: stack.one(f"SELECT status FROM batches_batch WHERE id = {batch}") == ("completed",), 120)
            until(lambda: set(checks_of(port).values()) == {"ok"}, 30)
            parts = {one["name"]: one["state"] for one in get("/api/system")["parts"]}
            assert {parts[name] for name in ("web", "redis", "database", "celery", "beat")} == {"ok"}, parts
            assert get("/api/summary")
            assert "REDIS_URL" not in stack.manage("check", "--deploy")
        finally:
            stack.stop()
