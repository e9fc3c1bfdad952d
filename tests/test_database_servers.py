"""Web and Celery through PgBouncer in transaction mode, and on a PostgreSQL that fails over to its replica."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter

import pytest

from tests.batches.test_frozen_owner import ROWS
from tests.gateway.rows import SECRET
from tests.postgres import pgbouncer, replica, server
from tests.processes import Stack, checks_of, until
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.services, pytest.mark.nightly]

LINES = 200
WITHIN_S = 240.0
MISSING_S = 3.0
"""Time without a server that takes writes: what a cluster manager needs to notice and promote."""
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
ANSWER = """
    from controlplane.batches.models import Batch
    batch = Batch.objects.get(pk=values["batch"])
    output = batch.output_file.content.read().decode()
    answer = {"usage": batch.to_dict()["usage"], "output": output}
"""
READ_ONLY = """
    from django.db import InternalError, connection
    from controlplane.database import probe_write
    def alter(what):
        with connection.cursor() as cursor:
            cursor.execute(f"BEGIN READ WRITE; ALTER DATABASE postgres {what}; COMMIT")
        connection.close()
    def writes():
        try:
            probe_write()
        except InternalError:
            return False
        finally:
            connection.close()
        return True
    answer = [writes()]
    alter("SET default_transaction_read_only = on")
    connection.pool.drain()
    answer.append(writes())  # in a session from then
    connection.ensure_connection()
    alter("RESET default_transaction_read_only")
    answer += [writes(), writes()]
"""


@pytest.fixture
def redis_url():
    redis = RedisServer().start()
    yield redis.url
    redis.stop()


class Asking(threading.Thread):
    """A caller that asks one after another, from `with` to its end."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port, self.statuses, self.ended = port, Counter(), threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            self.statuses[status(self.port, "/v1/chat/completions", BODY)] += 1

    def __enter__(self) -> "Asking":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()


def status(port: int, path: str, body: object = None) -> int:
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def start(stack: Stack) -> tuple[int, int]:
    """Return the port of the web process and the batch that it works on."""
    stack.manage("migrate", "--verbosity", "0")
    batch = stack.shell(ROWS, url=stack.emulator(), lines=LINES)
    _, port = stack.web()
    stack.celery()
    assert checks_of(port)["lease"] == "ok"
    return port, batch


def settle(stack: Stack, port: int, batch: int, answered: int) -> None:
    """Wait until all is written, and check that each request and line is there and paid once."""
    until(lambda: stack.one(f"SELECT status FROM batches_batch WHERE id = {batch}") == ("completed",), WITHIN_S)
    until(lambda: checks_of(port)["ledger"] == "ok" and stack.one("SELECT count(*) FROM gateway_ledgerrow")[0], 30)
    ended = stack.shell(ANSWER, batch=batch)
    answers = [json.loads(line) for line in ended["output"].splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(f"{at}" for at in range(LINES))
    until(lambda: stack.one("SELECT count(*) FROM gateway_ledgerrow")[0] >= answered + LINES, 30)
    rows, distinct, output_tokens = stack.one(
        "SELECT count(*), count(DISTINCT request_id), sum(output_tokens) FROM gateway_ledgerrow"
    )
    assert rows == distinct == answered + LINES
    assert output_tokens == answered * 4 + ended["usage"]["output_tokens"] == answered * 4 + LINES * 60
    counted = "SELECT sum(requests) FROM usage_usagehour"
    until(lambda: (stack.one(counted)[0] or 0) >= answered + LINES, 90)
    assert {checks_of(port)[part] for part in ("database", "writes", "ledger", "tasks", "lease")} == {"ok"}


def test_all_works_through_pgbouncer(tmp_path, redis_url):
    with server("timezone=Europe/Berlin") as behind, pgbouncer(behind) as url:
        stack = Stack(tmp_path, f"{url}?pgbouncer=true", redis_url)
        try:
            port, batch = start(stack)
            with Asking(port) as asking:
                until(
                    lambda: stack.one(f"SELECT status FROM batches_batch WHERE id = {batch}")[0] != "in_progress", 120
                )
            assert set(asking.statuses) == {200}, asking.statuses
            settle(stack, port, batch, asking.statuses[200])
            assert status(port, "/api/v1/usage?format=csv") == 200
        finally:
            stack.stop()
        said = (behind.folder / "log").read_text()
    assert "ERROR" not in said.replace('"django_migrations" does not exist', ""), said


def test_a_failover_loses_nothing(tmp_path, redis_url):
    """Its replica is synchronous: what was committed is there."""
    with server() as primary, replica(primary) as standby:
        primary.run("psql", "-h", "127.0.0.1", "-p", str(primary.port), "-U", "pilothouse", "postgres", "-qc",
                    "ALTER SYSTEM SET synchronous_standby_names = '*'")  # fmt: skip
        primary.control("reload")
        stack = Stack(tmp_path, f"postgres://pilothouse@{standby.host},{primary.host}/postgres", redis_url)
        try:
            port, batch = start(stack)
            with Asking(port) as asking:
                done = f"SELECT completed + failed FROM batches_batch WHERE id = {batch}"
                until(lambda: stack.one(done)[0] >= LINES / 6, WITHIN_S)
                primary.stop()
                assert status(port, "/api/requests") == 503
                time.sleep(MISSING_S)
                standby.control("promote")
                began_s = time.monotonic()
                until(lambda: status(port, "/api/requests") == 200 and checks_of(port)["writes"] == "ok", 60)
                print(f"writes again {time.monotonic() - began_s:.1f} s after the promotion")
                assert stack.one(done)[0] < LINES
                until(lambda: stack.one(f"SELECT status FROM batches_batch WHERE id = {batch}")[0] == "completed", 120)
            assert set(asking.statuses) == {200}, asking.statuses
            settle(stack, port, batch, asking.statuses[200])
            assert stack.one("SELECT epoch FROM fleet_owner") == (1,), "it owned all the time"
        finally:
            stack.stop()


def test_a_read_only_session_is_replaced_once_it_has_refused(tmp_path):
    """As after a full disk, when a service has set the database read-only and back again."""
    with server() as only:
        stack = Stack(tmp_path, only.url, "redis://127.0.0.1:1/0")
        try:
            stack.manage("migrate", "--verbosity", "0")
            before, during, *after = stack.shell(READ_ONLY)
        finally:
            stack.stop()
    assert (before, during, after[-1]) == (True, False, True)
