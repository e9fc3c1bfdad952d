"""Single sign-on against an OpenID Connect issuer of another author, in a process that its environment configures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import oidc_provider_mock
import pytest
from django.core.exceptions import ImproperlyConfigured

from controlplane.env import group_roles

ROOT = Path(__file__).parents[2]
CLAIMS = {"email": "alice@example.com", "preferred_username": "alice"}


def test_people_get_the_roles_of_their_groups_at_each_sign_in(tmp_path):
    both = CLAIMS | {"groups": ["sre", "all of acme", "unknown"]}
    visits = [
        {"subject": "a1", "claims": both},
        {"subject": "a1", "claims": CLAIMS | {"groups": ["leads"]}},
        {"subject": "a1", "claims": CLAIMS | {"groups": ["unknown"]}},
        {"subject": "a1", "claims": both, "closed": True},
        {"subject": "a2", "claims": {"email": "eve@example.com", "groups": ["nobody"]}},
        {"subject": "a3", "claims": {"email": "eve@example.com", "groups": ["sre"]}, "forged": True},
    ]
    with oidc_provider_mock.run_server_in_thread() as server:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PILOTHOUSE_")} | {
            "PILOTHOUSE_STATE_DIR": str(tmp_path),
            "PILOTHOUSE_SECRET_KEY": "of-a-test",
            "PILOTHOUSE_DEBUG": "true",
            "PILOTHOUSE_OIDC_ISSUER": f"http://localhost:{server.server_port}",
            "PILOTHOUSE_OIDC_CLIENT_ID": "pilothouse",
            "PILOTHOUSE_OIDC_CLIENT_SECRET": "secret",
            "PILOTHOUSE_OIDC_ROLES": "sre=operator@ops,leads=admin@ops,all of acme=viewer@acme,sre=viewer@ops",
            "DATABASE_URL": "",
            "OAUTHLIB_INSECURE_TRANSPORT": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.accounts.single_sign_on"],
            input=json.dumps(visits), cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, promoted, expelled, closed, stranger, forged = json.loads(done.stdout.splitlines()[-1])
    assert "code_challenge" in first["asked"]
    assert "groups" not in first["asked"]
    assert (first["to"], first["page"], first["roles"]) == ("/alerts/", 200, ["operator@ops", "viewer@acme"])
    assert first["user"].startswith("alice-"), "who has a password keeps the name, and is another"
    assert promoted["roles"] == ["admin@ops"]
    assert (expelled["status"], expelled["page"], expelled["roles"]) == (403, 302, [])
    assert "None of your groups" in expelled["error"]
    assert (closed["status"], closed["error"], closed["page"]) == (403, "This account is closed.", 302)
    assert (stranger["status"], stranger["user"]) == (403, None)
    assert (forged["status"], forged["user"]) == (403, None)
    events = [kind for kind, _ in forged["events"]]
    assert events.count("sign_in.done") == 2
    assert events.count("sign_in.refused") == 2
    assert events.count("user.roles_changed") == 3


@pytest.mark.parametrize("text", ["sre", "sre=operator", "=operator@ops", "sre=root@ops", "sre=operator@"])
def test_what_is_no_role_of_a_group_is_refused(text):
    with pytest.raises(ImproperlyConfigured, match="is not group=role@tenant"):
        group_roles([text])
