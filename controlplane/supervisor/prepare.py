"""Preparation before the first request: tables, static files, demo rows, emulated instances, a way to sign in.

`manage.py up` runs this as a child (`python -m controlplane.supervisor.prepare STEP…`), after Redis, so that it reads
the settings that the other children read. It prints one JSON object a finished step.
"""

import asyncio
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import django

if TYPE_CHECKING:
    from controlplane.fleet.models import Instance

ACTOR = "manage.py up"


def database() -> str:
    from django.core.management import call_command
    from django.db import connection
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    missing = len(executor.migration_plan(executor.loader.graph.leaf_nodes()))
    call_command("migrate", interactive=False, verbosity=0)
    applied = "up to date" if not missing else f"{missing} migration{'s' if missing > 1 else ''} applied"
    return f"{connection.display_name} {connection.settings_dict['NAME']}, {applied}"


def static() -> str:
    from django.conf import settings
    from django.core.management import call_command

    output = io.StringIO()
    call_command("collectstatic", interactive=False, verbosity=1, stdout=output)
    drop_stale_copies(Path(settings.STATIC_ROOT))
    return output.getvalue().strip().split("\n")[-1].partition(" copied to")[0].rstrip(".") + " collected"


def drop_stale_copies(folder: Path) -> int:
    """Remove compressed copies that are older than their files; how many.

    PILOTHOUSE_DEBUG collects files without compressing them: browsers would continue with what a run without it compressed.
    """
    stale = [copy for copy in folder.rglob("*.gz") if copy.with_suffix("").exists()]
    stale = [copy for copy in stale if copy.stat().st_mtime < copy.with_suffix("").stat().st_mtime]
    for copy in stale:
        copy.unlink()
    return len(stale)


def demo() -> str:
    from controlplane.fleet.models import Instance, Model, Region
    from controlplane.planning.demo import seed_all

    seed_all()
    counts = [(Region, "region"), (Model, "model"), (Instance, "instance")]
    return ", ".join(f"{model._default_manager.count()} {word}s" for model, word in counts)


def emulated() -> str:
    """Ask for every emulated instance that should run: emulated servers end with the process that emulates them."""
    from controlplane.fleet.lifecycle.states import InstanceState
    from controlplane.fleet.models import Instance, Launcher

    return _start_again(list(Instance.objects.filter(launcher=Launcher.EMULATED).exclude(state=InstanceState.STOPPED)))


def vllm() -> str:
    """Ask for the vLLM servers that ran here when the stack ended, for they ended with it; empty if there are none."""
    from controlplane.fleet.lifecycle import hosts
    from controlplane.fleet.lifecycle.states import ALIVE
    from controlplane.fleet.models import Instance, Launcher
    from workers.tasks.fleet import launcher_for

    rows = Instance.objects.filter(launcher=Launcher.PROCESS, state__in=ALIVE)
    ran = [row for row in rows.select_related("deployment__model", "node") if not hosts.obstacle(row)]
    ended = [instance for instance in ran if not asyncio.run(launcher_for(instance).alive(instance.name))]
    return _start_again(ended) if ended else ""


def _start_again(ended: list["Instance"]) -> str:
    from django.db import transaction

    from controlplane.fleet.lifecycle.states import ALIVE, ActionError, InstanceState
    from controlplane.fleet.models import CommandState, InstanceCommand
    from controlplane.fleet.services import move, start
    from controlplane.jobs.selectors import last_sign_of_life
    from controlplane.usage.paid_time import ENDED_AT

    # The worker that had claimed these ended with the last run too.
    InstanceCommand.objects.filter(instance__in=ended, state=CommandState.RUNNING).update(state=CommandState.PENDING)
    ended_at = last_sign_of_life()
    inputs: dict[str, object] = {ENDED_AT: ended_at.isoformat()} if ended_at else {}
    asked, refused = 0, []
    for instance in ended:
        try:
            with transaction.atomic():
                if instance.state in ALIVE:
                    reason = "its server ended with the stack's last run"
                    drained = instance.state == InstanceState.DRAINING
                    move(instance, InstanceState.STOPPED, actor=ACTOR, reason=reason, inputs=inputs)
                    if drained:
                        continue  # it was on its way out
                start(instance, ACTOR, "the stack starts")
            asked += 1
        except ActionError as error:
            refused.append(str(error))
    return "; ".join([f"{asked} instance{'' if asked == 1 else 's'} asked to start", *refused])


def link() -> str:
    """A one-time sign-in link for the first admin of the fleet, who is made (without a password) if there is none."""
    from controlplane.accounts.models import Role, User
    from controlplane.accounts.services import create_sign_in_link

    users = User.objects.filter(is_active=True, service_role="").order_by("-is_superuser", "pk")
    admin = next((user for user in users if user.has_fleet_role(Role.ADMIN)), None)
    if admin is None:
        admin = User.objects.create_superuser("admin")
    return f"/sign-in/{create_sign_in_link(admin, actor=ACTOR)}/"


STEPS: dict[str, Callable[[], str]] = {step.__name__: step for step in (database, static, demo, emulated, vllm, link)}


def main(names: list[str]) -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    django.setup()
    for name in names:
        began = time.monotonic()
        text = STEPS[name]()
        sys.stdout.write(json.dumps({"step": name, "text": text, "took_s": round(time.monotonic() - began, 2)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
