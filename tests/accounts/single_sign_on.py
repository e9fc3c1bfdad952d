"""What a process with single sign-on does, given by its environment: run by `test_single_sign_on.py` for each visit in turn.

`python -m tests.accounts.single_sign_on` reads visits as JSON: who comes and what the issuer says of them; it prints what
became of each.
"""

import json
import os
import sys
from urllib.parse import urlsplit

import django
import requests

os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
django.setup()

from django.core.management import call_command  # noqa: E402
from django.test import Client  # noqa: E402

from controlplane.accounts.models import Tenant, User  # noqa: E402
from controlplane.events.models import Event  # noqa: E402
from controlplane.fleet.models import SloClass  # noqa: E402


def visit(issuer: str, subject: str, claims: dict, *, closed: bool = False, forged: bool = False) -> dict:
    """Have *subject* sign in with *claims*; return what the browser ends with, and what is stored."""
    User.objects.filter(email=claims.get("email")).update(is_active=not closed)
    requests.put(f"{issuer}/users/{subject}", json=claims, timeout=5).raise_for_status()
    client = Client(headers={"host": "localhost"})
    link = (
        client.get("/sign-in/?next=/alerts/").content.decode().split('<a class="button wide" href="')[1].split('"')[0]
    )
    to_issuer = client.get(link)
    assert to_issuer.status_code == 302, to_issuer.content
    back = requests.post(to_issuer["Location"], data={"sub": subject}, allow_redirects=False, timeout=5)
    at = urlsplit(back.headers["Location"])
    answer = client.get(
        at.path, dict(part.split("=", 1) for part in at.query.split("&")) if not forged else {"code": "x"}
    )
    page = client.get("/alerts/")
    user = User.objects.filter(email=claims.get("email")).first()
    return {
        "status": answer.status_code,
        "to": answer.headers.get("Location", ""),
        "error": answer.content.decode().partition('id="error">')[2].partition("<")[0],
        "page": page.status_code,
        "asked": to_issuer["Location"],
        "user": user and user.username,
        "roles": sorted(f"{each.role}@{each.tenant.name}" for each in user.memberships.all()) if user else [],
        "events": list(Event.objects.order_by("pk").values_list("kind", "actor")),
    }


def main() -> None:
    call_command("migrate", verbosity=0)
    slo_class = SloClass.objects.create(
        name="interactive", title="Interactive", kind="interactive", ttft_target_ms=1000
    )
    for name, operates in (("ops", True), ("acme", False)):
        Tenant.objects.create(name=name, operates_fleet=operates, default_slo_class=slo_class)
    User.objects.create_user("alice", "alice@here.example", "a password of hers")
    print(json.dumps([visit(os.environ["PILOTHOUSE_OIDC_ISSUER"], **each) for each in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
