"""What five flows visit, on a small fleet: `python -m tests.flows [name ...]`; with names also where they go.

Each runs twice before, for imports, kernels and caches, then once more under `sys.setprofile`. Counted are the project's
own functions (a kernel called from Python is none; a lambda belongs to the function around it) in the order of their first
call, so that loops count once. A *stay* is a run of functions in one module, a *return* a stay in a module that was left
before: stays = modules + returns. A *climb* is a call of a higher layer (libraries, then apps as in `tests.lint.layers`).
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import Any

import django

from tests.lint.layers import APPS

ROOT = str(Path(__file__).parent.parent)
PACKAGES = ("scheduling.", "forecasting.", "controlplane.", "workers.")
TOOLS = ("scheduling.compiled", "scheduling.struct_type", "scheduling.struct_of_arrays", "forecasting.compiled")


def height(module: str) -> int:
    return max(at * f"{module}.".startswith(f"controlplane.{app}.") for at, row in enumerate(APPS, 1) for app in row)


def visited(run: Callable[[], object]) -> list[tuple[str, str, bool]]:
    """Return (module, function, whether it was a climb) of what *run* calls, in order of the first call."""
    visits: dict[object, tuple[str, str, bool]] = {}

    def module(frame: Any) -> str:
        name, here = str(frame.f_globals.get("__name__")), frame.f_code.co_filename.startswith(ROOT)
        return name if here and name.startswith(PACKAGES) and name not in TOOLS else ""

    def note(frame: Any, event: str, _: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event == "call" and code not in visits and code.co_name[0] != "<" and (own := module(frame)):
            while caller is not None and not module(caller):
                caller = caller.f_back
            visits[code] = own, code.co_qualname, caller is not None and height(own) > height(module(caller))

    sys.setprofile(note)
    run()
    sys.setprofile(None)
    return [*visits.values()]


def take() -> Callable[[], object]:
    from tests.bench._dispatched import Served

    return partial(Served("preserve", "qlm").batch_us, 1)


def simulate() -> Callable[[], object]:
    from controlplane.simulation.running import run_small

    return run_small


def make_plans() -> Callable[[], object]:
    from controlplane.gateway.models import MinuteRow
    from controlplane.planning.forecasts.services import make_forecasts
    from controlplane.planning.models import ScalingPolicy
    from controlplane.planning.plans.services import make_plans
    from tests.inventory import Inventory

    inventory, now = Inventory(), datetime.now(UTC).replace(second=40, microsecond=0)
    inventory.make_instance(node=inventory.node)
    one = MinuteRow(model=inventory.language_model.name, region="us-east", requests=9)
    one.slo_class, one.prompt_tokens, one.output_tokens = inventory.slo_class.name, 60_000, 9_000
    for ago in range(1, 41):
        one.pk, one.minute = None, now - timedelta(minutes=ago, seconds=40)
        one.save()
    make_forecasts(now)
    ScalingPolicy.objects.create(model=inventory.language_model, strategy="pilothouse")
    return partial(make_plans, now)


def what_if() -> Callable[[], object]:
    from controlplane.simulation.whatif import services, working
    from tests.simulation.whatif import rows

    working.send_workers = lambda *_: 0  # no broker
    qlm = {"name": "QLM", "changes": [{"kind": "policy", "part": "bundle", "value": "qlm"}]}
    services.submit(rows.draft("flows", qlm, seeds=3), "flows")
    return lambda: (working.work(), working.work())


def length() -> Callable[[], object]:
    from controlplane.lengths.length_service import LengthService
    from forecasting.lengths import LengthPrior, LengthQuery

    service, loop = LengthService(LengthPrior()), asyncio.new_event_loop()
    loop.run_until_complete(service.start())
    asked = (LengthQuery(f"Write a letter to neighbour {number} about summer.", 20, "m") for number in count())
    return lambda: loop.run_until_complete(service.predict(next(asked), lambda query: query, 60))


if __name__ == "__main__":
    from django.test.utils import setup_databases

    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    logging.disable()
    setup_databases(verbosity=0, interactive=False)
    flows = {flow.__name__: flow for flow in (take, simulate, make_plans, what_if, length)}
    for name in sys.argv[1:] or flows:
        run = flows[name]()
        run(), run()
        visits = visited(run)
        stays = [(module, [*each]) for module, each in groupby(visits, lambda visit: visit[0])]
        modules, climbs = len({visit[0] for visit in visits}), sum(visit[2] for visit in visits)
        counts = f"{len(visits)} functions, {modules} modules, {len(stays)} stays, {len(stays) - modules} returns"
        for module, each in stays if sys.argv[1:] else ():
            print(f"    {module}: {', '.join('^' * climb + function for _, function, climb in each)}")
        print(f"{name}: {counts}, {climbs} climbs")
