import os
import signal
import time
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from controlplane.supervisor.state import RESTART_FILE, holder

LOOK_S = 0.2


class Command(BaseCommand):
    help = "Restart the processes of `manage.py up` one after the other, on the code that is installed now."
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        result = settings.STATE_DIR / RESTART_FILE
        result.unlink(missing_ok=True)
        if (process := holder(settings.STATE_DIR)) is None:
            raise CommandError(f"No `manage.py up` runs in {settings.STATE_DIR}.")
        os.kill(process, signal.SIGUSR1)
        while not result.exists():
            if holder(settings.STATE_DIR) is None:
                raise CommandError("`manage.py up` has ended.")
            time.sleep(LOOK_S)
        if failure := result.read_text():
            raise CommandError(failure)
