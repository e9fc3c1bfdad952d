"""Rollouts of changed deployments."""

import asyncio

import orjson

from controlplane.fleet.models import Instance, ModelTask, Rollout
from controlplane.fleet.rollouts import services as rollouts
from controlplane.fleet.rollouts.selectors import open_rollouts
from controlplane.planning.plans import waiting
from workers.vllm.client import VllmClient, VllmError
from workers.vllm.tasks import EMBEDDINGS, GENERATION

PROBE_S = 10.0


def advance_rollouts() -> int:
    """Advance every rollout by one move, in a transaction each; return how many are in progress."""
    rows, count = open_rollouts(), 0
    outcomes = waiting.outcomes() if rows else None
    for row in rows:
        advanced = rollouts.advance(row, outcomes)
        count += advanced.ended_at is None
        if advanced.probe == rollouts.WANTED and advanced.starting is not None:
            said = asyncio.run(_probe(advanced.starting))
            Rollout.objects.filter(pk=advanced.pk, probe=rollouts.WANTED).update(probe=said[:255])
    return count


async def _probe(instance: Instance) -> str:
    """Ask *instance* for one token, or for a vector, or else whether it is well; return `ok`, or what failed."""
    model = instance.deployment.model
    asked = {
        ModelTask.GENERATE: (GENERATION[-1], {"model": model.name, "prompt": "probe", "max_tokens": 1}),
        ModelTask.EMBED: (EMBEDDINGS, {"model": model.name, "input": "probe"}),
    }.get(ModelTask(model.task))
    try:
        async with VllmClient(instance.url, api_key=instance.token, timeout_s=PROBE_S) as client:
            if asked is not None:
                await client.prefill(asked[0], orjson.dumps(asked[1]))
            elif not await client.health():
                return "/health does not answer"
    except VllmError as error:
        return str(error)
    return rollouts.OK
