"""Live prewarming (Hermes section 3.4): `scheduling.control.prewarming` once a second, delivered to the gateway.

The texts of system prompts are the gateway's (`controlplane.gateway.upstream.prewarming`); here a prompt is the hash of its
last whole block.
"""

from collections import Counter
from typing import cast

from controlplane.dispatch import port
from controlplane.dispatch.fleet import LiveFleet, system_prompt
from controlplane.dispatch.live_fleet.topology import Replica, Request
from controlplane.dispatch.runs import ApplicationRuns
from controlplane.dispatch.stages import Arrival, Stage
from scheduling.applications.prewarming import LikelyCall
from scheduling.control.prewarming import Prewarming
from scheduling.control.system_prompts import Prompt


class LivePrewarming(Stage):
    def __init__(self, fleet: LiveFleet, runs: ApplicationRuns) -> None:
        self.fleet, self.runs = fleet, runs
        self.control = Prewarming(fleet, runs.control)
        self.counts = self.control.counts
        """By kind, what was `warmed` and what of it was `used` by a call afterwards."""
        self.counts |= {"container": Counter(), "dnn": Counter()}

    def figures(self) -> dict[str, list[int]]:
        """Return what was warmed and what of it was used, of kinds of which anything was."""
        return {kind: [of["warmed"], of["used"]] for kind, of in self.counts.items() if of["warmed"]}

    def sweep(self) -> None:
        self.control.act()

    def run_of(self, call: LikelyCall) -> tuple[str, str]:
        """Return the application and the run of *call*."""
        run = self.runs.standings.by_number[call.run]
        return cast("tuple[int, str]", run.application)[1], str(run.name)

    def admit(self, arrival: Arrival) -> None:
        """Record the system prompt of a request, and that its unit has it."""
        asked = arrival.asked
        if (name := system_prompt(asked)) is None:
            return
        adapter = self.fleet.topology.adapter_number(asked.adapter)
        blocks = asked.prefix_hashes[: asked.system_blocks]
        prompt = Prompt(blocks, asked.block_tokens, asked.model, adapter, asked.regions)
        unit = ((asked.tenant_id, asked.application), asked.unit) if asked.application and asked.unit else None
        self.control.prompts.record(name, prompt, unit)

    def placed(self, request: Request, replica: Replica) -> None:
        self.control.placed(replica.slot, request.adapter, system_prompt(request.asked))

    def warmed(self, record: port.PrefixWarmed) -> None:
        """Record the end of a request that warmed a system prompt."""
        replica = next((one for one in self.fleet.topology.replicas.values() if one.name == record.instance), None)
        warming = self.control.prompts.warming.get(replica.slot) if replica is not None else None
        if replica is not None and warming is not None and warming.prompt == record.prefix:
            restarted = replica.spec.state_changed_at != record.ready_at
            self.control.prompts.end(replica.slot, failed=bool(record.failure) or restarted)
