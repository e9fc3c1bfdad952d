#!/usr/bin/env python3
"""Django's command line for Pilothouse; `manage.py up` runs the whole stack."""

import os
import sys
from pathlib import Path


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    try:
        from django.core.exceptions import ImproperlyConfigured
        from django.core.management import execute_from_command_line
    except ImportError as error:
        raise SystemExit("Django is not installed here: run `make run`, or activate .venv first.") from error
    try:
        if sys.argv[1:2] == ["up"]:
            keep_secret_key()
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        raise SystemExit(str(error)) from error


def keep_secret_key() -> None:
    """`up` needs no set-up: settings refuse to load without a secret key, so it is made before they are."""
    from controlplane.supervisor import state

    state.keep_secret_key(Path(__file__).resolve().parent)


if __name__ == "__main__":
    main()
