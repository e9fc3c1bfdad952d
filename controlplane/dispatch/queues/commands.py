"""Operators' commands to the gateway process that owns the queues, from any process: request and reply over Redis.

A command waits in a list for the owner, which replies into a separate list. A command not taken in time is never carried
out: its sender has already been answered that nothing was done.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
import orjson
import redis
import redis.asyncio as aioredis
from django.conf import settings
from redis.exceptions import RedisError

from controlplane.dispatch.queues.operations import GroupAction, QueueOperations, RunAction
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Owner
from controlplane.jobs.record import Job
from scheduling.fleet.state import FleetState, joined

Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)

KEY: Final = "pilothouse:queues:commands:"
"""Followed by the name of the owner."""
REPLY: Final = "pilothouse:queues:reply:"
LOOK_S: Final = 1.0
PATIENCE_S: Final = 3.0
REPLY_EXPIRES_S: Final = 10


class GatewaySilent(ActionError):
    """No gateway took the command; nothing was done."""


class Reply(msgspec.Struct, Generic[Answer]):
    answer: Answer | None = None
    refused: str = ""


def ask(command: str, **values: Any) -> dict[str, Any]:
    """Send *command* to the owners of the queues with the arguments of `QueueOperations.act`; return the answer of the one
    that has the group.

    Raises ActionError with an owner's objection, GatewaySilent when none answers within PATIENCE_S.
    """
    return _answers(command, values, dict[str, Any])[0]


def ask_of_run(tenant_id: int, application: str, run: str, action: RunAction) -> int:
    """Do *action* on a run; return how many open calls it had. Raises as `ask` does."""
    values = {"tenant_id": tenant_id, "application": application, "run": run, "action": action.value}
    return sum(_answers("run", values, int))


def fleet_state() -> FleetState:
    """Return the state of the fleet from the owners of the queues. Raises as `ask` does."""
    return joined(_answers("snapshot", {}, FleetState))


def _answers(command: str, values: dict[str, Any], kind: type[Answer]) -> list[Answer]:
    """Return the answers of the owners of all shards, without objections unless all object."""
    shards = Owner.objects.filter(role__startswith="shard ").order_by("role")
    owners = list(dict.fromkeys(shards.values_list("name", flat=True))) or [""]
    with ThreadPoolExecutor(len(owners)) as pool:
        asked = [pool.submit(_exchange, owner, command, values, kind) for owner in owners]
    errors = [error for each in asked if (error := each.exception()) is not None]
    replies = [each.result() for each in asked if each.exception() is None]
    answers = [cast(Answer, reply.answer) for reply in replies if not reply.refused]
    if errors and answers and command == "run":
        raise GatewaySilent("Not every gateway answers; some calls of the run are as they were")
    if errors and (not answers or command == "snapshot"):  # a part of the fleet is not its state
        raise errors[0]
    if not answers:
        raise ActionError(replies[0].refused)
    return answers


def _exchange(owner: str, command: str, values: dict[str, Any], kind: type[Answer]) -> Reply[Answer]:
    reply = REPLY + secrets.token_hex(8)
    asked = {"command": command, "reply": reply, "until": time.time() + PATIENCE_S, "values": values}
    try:
        with redis.Redis.from_url(
            settings.REDIS_URL, socket_timeout=PATIENCE_S + 2, socket_connect_timeout=1.0
        ) as client:
            client.rpush(KEY + owner, orjson.dumps(asked))
            client.expire(KEY + owner, REPLY_EXPIRES_S)
            came = cast(tuple[bytes, bytes] | None, client.blpop([reply], timeout=PATIENCE_S))
    except (RedisError, OSError) as error:
        raise GatewaySilent("Redis does not answer; nothing was done") from error
    if came is None:
        raise GatewaySilent("No gateway answers; nothing was done")
    return cast("Reply[Answer]", msgspec.json.decode(came[1], type=Reply[kind]))  # type: ignore[valid-type]


class Commands:
    """Receiver of commands while this process *owns* queues; *name* is its name as an owner."""

    def __init__(
        self,
        redis_url: str,
        name: Callable[[], str],
        operations: QueueOperations,
        owns: Callable[[], bool],
        job: Job,
        snapshot: Callable[[], FleetState],
    ) -> None:
        self.operations = operations
        self.snapshot = snapshot
        self.owns = owns
        self.name = name
        self.job = job
        self._redis = aioredis.from_url(redis_url, socket_timeout=LOOK_S + 2, socket_connect_timeout=1.0)

    async def run(self) -> None:
        while True:
            with self.job:
                if self.owns():
                    came = cast(
                        tuple[bytes, bytes] | None, await self._redis.blpop([KEY + self.name()], timeout=LOOK_S)
                    )
                    if came:
                        await self._take(came[1])
            if not self.job.ok or not self.owns():
                await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _take(self, message: bytes) -> None:
        """Answer one command. Raises what Redis raises."""
        asked: dict[str, Any] = orjson.loads(message)
        if not self.owns() or time.time() > asked["until"]:  # its sender hears that nobody answers
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.rpush(asked["reply"], msgspec.json.encode(self.answer(asked)))
            pipe.expire(asked["reply"], REPLY_EXPIRES_S)
            await pipe.execute()

    def answer(self, asked: dict[str, Any]) -> Reply[Any]:
        values = asked["values"]
        try:
            if asked["command"] == "snapshot":
                return Reply(self.snapshot())
            if asked["command"] == "run":
                application = int(values["tenant_id"]), str(values["application"])
                return Reply(self.operations.act_on_run(application, str(values["run"]), RunAction(values["action"])))
            number, action = int(values["number"]), GroupAction(values["action"])
            return Reply(self.operations.act(number, action, str(values["operator"]), str(values.get("reason") or "")))
        except ActionError as refusal:
            return Reply(refused=str(refusal))
        except Exception as error:
            logger.exception("queues: a command could not be carried out")
            return Reply(refused=f"The gateway could not do it: {type(error).__name__}")
