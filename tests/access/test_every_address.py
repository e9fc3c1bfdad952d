"""Every address there is, as every role: who gets in, and that nothing of other tenants or of the fleet leaks to tenants.

The addresses come from the URL configuration itself, so that a new one without a line in `expected.py` fails.
"""

import copy
import csv
import html
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.contrib import admin
from django.contrib.auth import get_user
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse
from django.utils import timezone

from controlplane.accounts.models import Role, User
from controlplane.accounts.services import create_api_key
from controlplane.api.urls import api
from controlplane.asgi import application
from controlplane.console.live.fragments import TOPICS
from controlplane.console.operations import OFFERS
from controlplane.console.urls import websocket_urlpatterns
from controlplane.operations import Operations
from tests.access import expected
from tests.access.expected import (
    ADMIN,
    EDITED,
    MANAGER,
    OF_ACME,
    OF_GLOBEX,
    RANKS,
    SIGNED_IN,
    TENANT,
    VIEWER,
    Reach,
)
from tests.access.leaks import check
from tests.access.world import World
from tests.inventory import Inventory, standing_with

ROLES = tuple(RANKS)
EVERYTHING_OF = {"stranger", "fleet_admin"}
"""Roles that ask for everything in the fast tests too: who may all, and of a tenant who may most."""
NOBODY = {"anonymous", "newcomer"}
PEOPLE_ALONE = {"create_key", "change_key", "limit_application_runs"}
"""Operations that take no key."""
IN_THE_GATE = (pytest.mark.nightly, pytest.mark.gate)
CHOICES = [
    pytest.param(("stranger", "fleet_admin"), False, id="all-and-least"),
    pytest.param(("anonymous", "newcomer", "member", "viewer"), False, id="at-their-edge", marks=IN_THE_GATE),
    pytest.param(
        ("anonymous", "member", "stranger", "viewer", "fleet_admin"), True, id="most", marks=pytest.mark.nightly
    ),
    pytest.param(("newcomer", "key_manager", "operator", "fleet_admin"), True, id="others", marks=pytest.mark.nightly),
]
"""Roles, and whether each asks for everything; at night all of them do."""
IN, SIGN_IN, REFUSED, ABSENT = "gets in", "is asked to sign in", "is refused", "finds nothing"
EXACT = {"Cost (USD)", "Charged (USD)", "Idle cost (USD)"}
"""Columns whose lines add up in every grouping: with six decimals where they do."""
EXPORT = re.compile(r'href="([^"]*[?&](?:amp;)?format=csv[^"]*)"')


def build(inventory: Inventory) -> None:
    for role in ROLES:
        if role not in NOBODY:
            getattr(inventory, role)
    inventory.world = World(inventory)


standing = standing_with(build)


def asks(role: str, reach: Reach, everything: bool) -> bool:
    """Whether *role* asks for an address: for all, or for what it just may open and what it just may not."""
    return everything or role in EVERYTHING_OF or (reach.least - RANKS[role] in (0, 1))


def addresses(patterns, before: str = "", space: str = "") -> Iterator[tuple[str, str, URLPattern]]:
    """Yield namespace, path and pattern of every route in Django's URL configuration."""
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from addresses(pattern.url_patterns, before + str(pattern.pattern), pattern.namespace or space)
        else:
            yield space, before + str(pattern.pattern), pattern


EVERYTHING = list(addresses(get_resolver().url_patterns))
NAMES = {
    space: {pattern.name for of, _, pattern in EVERYTHING if of == space and pattern.name}
    for space in {of for of, _, _ in EVERYTHING}
}
OPERATIONS = {
    operation.view_func.__name__: (operation.methods[0], operation)
    for _, router in api._routers
    for view in router.path_operations.values()
    for operation in view.operations
    if operation.include_in_schema
}


async def joined(chunks) -> bytes:
    return b"".join([chunk async for chunk in chunks])


def body_of(answer) -> str:
    if getattr(answer, "is_async", False):
        data = async_to_sync(joined)(answer.streaming_content)
    else:
        data = b"".join(answer.streaming_content) if answer.streaming else answer.content
    return html.unescape(data.decode()) + repr(sorted(answer.headers.items()))


def what_happened(answer) -> str:
    to = answer.headers.get("Location", "")
    if answer.status_code == 401 or (answer.status_code == 302 and re.match(r"/(admin/login|sign-in)/\?next=", to)):
        return SIGN_IN
    assert answer.status_code < 500, answer.content[:500]
    return {403: REFUSED, 404: ABSENT}.get(answer.status_code, IN)


def what_should(role: str, reach: Reach, rest: bool = False) -> str:
    if role == "anonymous" and reach.least > RANKS["anonymous"]:
        return SIGN_IN
    owner = (role not in OF_GLOBEX or not reach.owned) and (role != "viewer" or reach.least != MANAGER)
    if RANKS[role] >= reach.least and owner:
        return IN
    if not reach.owned or (role == "newcomer" and not rest):
        return REFUSED
    return REFUSED if rest and reach.path == {} else ABSENT


def ask(client: Client, method: str, path: str, values: dict | None, as_json: bool = False, **headers: str):
    """Return the answer and roll back what it wrote; the client stays signed in."""
    used = Client(headers=headers)
    used.cookies = copy.deepcopy(client.cookies)
    with transaction.atomic():
        if as_json and values is not None:
            answer = used.generic(method, path, json.dumps(values), content_type="application/json")
        else:
            answer = used.post(path, values) if values is not None else used.get(path)
        text = body_of(answer)
        transaction.set_rollback(True)
    return answer, text


def filled(reach: Reach, world: World) -> dict:
    values = world.values()
    return {name: values.get(value, value) for name, value in reach.path.items()}


def sent(reach: Reach, world: World) -> dict | None:
    values = world.values()
    return None if reach.send is None else {name: values.get(str(value), value) for name, value in reach.send.items()}


def test_every_address_has_an_expectation():
    assert set(NAMES) == {"console", "admin", "api", "v1"}  # v1: a tenant sees nothing of another, in tests/batches
    assert NAMES["console"] == {name.partition(" ")[0] for name in expected.CONSOLE}
    offered = {f"operate {name} {each.verb}" for name, offer in OFFERS.items() for each in offer.operations}
    assert offered == {name for name in expected.CONSOLE if name.startswith("operate ")}
    assert set(OPERATIONS) == set(expected.REST)
    assert NAMES["api"] - set(OPERATIONS) == set(expected.REST_OTHERS)
    labels = {model._meta.label_lower for model in admin.site._registry}
    assert labels == set(expected.ADMIN_MODELS)
    of_models = {
        f"{label.replace('.', '_')}_{view}"
        for label in labels
        for view in ("changelist", "add", "history", "delete", "change")
    }
    assert NAMES["admin"] - of_models == set(expected.ADMIN_PAGES)
    assert {pattern.pattern.regex.pattern for pattern in websocket_urlpatterns} == expected.SOCKETS
    assert set(TOPICS) == {topic.partition(":")[0] for topic in ("", *expected.TOPICS)}
    assert Operations.paths == set(expected.OPERATIONS)


@pytest.mark.parametrize(("roles", "everything"), CHOICES)
def test_the_console_and_its_exports(world, sign_in, roles, everything):
    """Return every page, every CSV that an admin's pages link to, and every page with `format=csv`."""
    clients, wrong, files = {role: sign_in(role) for role in roles}, [], Counter()
    for name, reach in expected.CONSOLE.items():
        path, links = reverse(f"console:{name.partition(' ')[0]}", kwargs=filled(reach, world)), {}
        asking = [role for role in roles if asks(role, reach, everything)]
        for role in asking:
            answer, text = ask(clients[role], "", path, reach.send)
            links[role] = linked(path, text)
            should, did = what_should(role, reach), what_happened(answer)
            if name == "overview" and role in (*OF_ACME, *OF_GLOBEX):
                should, did = "/usage/", answer.headers.get("Location")  # where a tenant's people land
            if name == "system" and role == "viewer":
                should, did = "/events/?q=monitor", answer.headers.get("Location")  # where a viewer reads of the same
            if name == "sign-in" and role != "anonymous":
                should, did = "/", answer.headers.get("Location")
            if should != did:
                wrong.append(f"{path}: {role} {did}, and should: {should}")
            wrong += check(world, role, path, text)
            if did == IN and answer.headers.get("Content-Type", "").startswith("text/html"):
                wrong += [f"{path}: {fault}" for fault in against_the_policy(answer)]
        if reach.send is not None or name.startswith("sign-"):
            continue
        linked_for_all = links.get("fleet_admin", set()) if everything else set()
        asked = [
            (role, {f"{path}?format=csv"} | linked_for_all | links[role])
            for role in asking
            if everything or role != "viewer"  # who reads what an admin reads
        ]
        for role, link in [(role, link) for role, its in asked for link in sorted(its)]:
            answer, text = ask(clients[role], "", link, None)
            should, did = what_should(role, reach), what_happened(answer)
            elsewhere = answer.headers.get("Location") in ("/usage/", "/events/?q=monitor")
            if should != did and not (name in ("overview", "system") and elsewhere):
                wrong.append(f"{link}: {role} {did}, and should: {should}")
            wrong += check(world, role, link, text)
            if did == IN and answer.headers.get("Content-Type", "").startswith("text/csv"):
                files[role] += 1
                wrong += [f"{link}: {fault}" for fault in faults_of_file(text)]
    assert not wrong, "\n".join(wrong)
    assert all(files[role] >= 4 for role in roles if everything or role in EVERYTHING_OF if role not in NOBODY), files


def linked(path: str, text: str) -> set[str]:
    links = (html.unescape(link) for link in EXPORT.findall(text))
    return {link if link.startswith("/") else path + link for link in links}


def faults_of_file(text: str) -> list[str]:
    """Return figures whose column names no unit, and those with more digits than anything here is measured to."""
    header, *rows = csv.reader(io.StringIO(text.partition("[('")[0]))
    faults = []
    for title, values in zip(header, zip(*rows, strict=True), strict=False):
        decimals = [value for value in values if re.fullmatch(r"-?\d+\.\d+", value)]
        if decimals and "(" not in title and "hours" not in title:
            faults.append(f"{title} has decimals ({decimals[0]}) and no unit")
        # a number in a sentence of ours has no more digits either
        exact = re.compile(r"-?\d+\.\d{6}" if title in EXACT else r"(?!)")
        measured = [value for value in values if not exact.fullmatch(value)]
        faults += [f"{title} has {value[:60]!r}" for value in measured if re.search(r"\d\.\d{7}|\.0*[1-9]\d{4}", value)]
        if any(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+Z", value) for value in values) and "(UTC)" not in title:
            faults.append(f"{title} holds times and does not say in which zone")
    return faults


@pytest.mark.parametrize(("roles", "everything"), CHOICES)
def test_the_rest_api(world, sign_in, roles, everything):
    wrong = [fault for role in roles for fault in faults_of_the_rest_api(world, sign_in(role), role, everything)]
    assert not wrong, "\n".join(wrong)


def faults_of_the_rest_api(world: World, client: Client, role: str, everything: bool) -> list[str]:
    wrong = []
    for name, reach in expected.REST.items():
        if not asks(role, reach, everything):
            continue
        method, _ = OPERATIONS[name]
        path = reverse(f"api:{name}", kwargs=filled(reach, world))
        answer, text = ask(client, method, path, sent(reach, world), as_json=True)
        should, did = what_should(role, reach, rest=True), what_happened(answer)
        if should != did:
            wrong.append(f"{method} {path}: {role} {did}, and should: {should}")
        if name == "create_key":  # whose answer is the one place for a secret
            continue
        wrong += check(world, role, f"{method} {path}", text)
    usage = reverse("api:sum_usage") + "?format=csv"
    wrong += check(world, role, usage, ask(client, "GET", usage, None)[1])
    for name, status in expected.REST_OTHERS.items():
        path = reverse(f"api:{name}", kwargs={"rest": "nowhere"} if name == "nothing_here" else {})
        answer, text = ask(client, "GET", path, None)
        if answer.status_code != status:
            wrong.append(f"{path}: {answer.status_code}, and should be {status}")
        wrong += check(world, role, path, text)
    return wrong


@pytest.mark.parametrize(("tenant", "like"), [("acme", "member"), ("globex", "stranger")])
def test_the_rest_api_with_a_tenants_key(world, tenant, like):
    """A key reads what its tenant's members read, and changes nothing."""
    wrong, bearer = [], f"Bearer {world.key_secrets[tenant]}"
    for name, reach in expected.REST.items():
        method, _ = OPERATIONS[name]
        path = reverse(f"api:{name}", kwargs=filled(reach, world))
        answer, text = ask(Client(), method, path, sent(reach, world), as_json=True, authorization=bearer)
        theirs = tenant == "acme" or not reach.owned
        should = (IN if theirs else ABSENT) if reach.key else REFUSED
        if what_happened(answer) != should:
            wrong.append(f"{method} {path}: the key {what_happened(answer)}, and should: {should}")
        wrong += check(world, like, f"{method} {path}", text)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "role", ["operator", *(pytest.param(role, marks=IN_THE_GATE) for role in ("viewer", "admin", ""))]
)
def test_the_rest_api_with_a_service_key(world, operations, role):
    """A service key does what its role may, but neither makes nor revokes keys; another key of its tenant is a viewer."""
    service = {"role": Role(role), "expires_at": timezone.now() + timedelta(days=1)} if role else {}
    _, secret = create_api_key(operations, f"service {role}", "test", **service)
    rank, wrong = RANKS[{"admin": "fleet_admin", "": "viewer"}.get(role, role)], []
    for name, reach in expected.REST.items():
        method, _ = OPERATIONS[name]
        path = reverse(f"api:{name}", kwargs=filled(reach, world))
        bearer = f"Bearer {secret}"
        answer, text = ask(Client(), method, path, sent(reach, world), as_json=True, authorization=bearer)
        should = IN if rank >= reach.least and name not in PEOPLE_ALONE else REFUSED
        if what_happened(answer) != should:
            wrong.append(f"{method} {path}: {what_happened(answer)}, and should: {should}")
        wrong += check(world, "viewer", f"{method} {path}", text)
    assert not wrong, "\n".join(wrong)


def test_rights_in_the_admin(world, sign_in, rf):
    """Return the admin's requests for each model, for every role."""
    wrong = []
    for role in ROLES:
        request = rf.get("/admin/")
        request.user = get_user(sign_in(role))
        for label, (least, allowed) in expected.ADMIN_MODELS.items():
            model = apps.get_model(label)
            of, row = admin.site.get_model_admin(model), model._default_manager.order_by("pk").first()
            may = {
                "view": of.has_view_permission(request, row),
                "add": of.has_add_permission(request),
                "change": of.has_change_permission(request, row),
                "delete": of.has_delete_permission(request, row),
            }
            should = {"view": RANKS[role] >= least} | {
                each: RANKS[role] >= ADMIN and each in allowed for each in EDITED
            }
            if may != should:
                wrong.append(f"{label}: {role} has {may}, and should have {should}")
            if of.has_module_permission(request) != (RANKS[role] >= least):
                wrong.append(f"{label}: in the lists of {role}: {of.has_module_permission(request)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("roles", "everything"),
    [
        pytest.param(("fleet_admin",), False, id="all"),
        pytest.param(("anonymous", "member", "stranger", "viewer"), False, id="less", marks=IN_THE_GATE),
        *CHOICES[2:],
    ],
)
def test_the_admin(world, sign_in, member, no_sidebar, roles, everything):
    """`test_rights_in_the_admin` checks what each role may do there."""
    world.sign_in_token(member)
    wrong = [fault for role in roles for fault in faults_of_the_admin(world, sign_in(role), role, everything)]
    assert not wrong, "\n".join(wrong)


def faults_of_the_admin(world: World, client: Client, role: str, everything: bool) -> list[str]:
    """In the nightly run every page of every model; otherwise an admin's actions, closed lists, and extra pages."""
    wrong: list[str] = []

    def visit(name: str, least: int, *args, values: dict | None = None, query: str = "") -> None:
        path = reverse(f"admin:{name}", args=args)
        answer, text = ask(client, "", path + query, values)
        should, did = (
            IN if RANKS[role] >= least else SIGN_IN if RANKS[role] < VIEWER else REFUSED,
            what_happened(answer),
        )
        if should != did:
            wrong.append(f"{path}: {role} {did}, and should: {should}")
        wrong.extend(check(world, role, path, text))
        if did == IN and answer.headers.get("Content-Type", "").startswith("text/html"):
            wrong.extend(f"{path}: {fault}" for fault in against_the_policy(answer))

    for label, (least, allowed) in expected.ADMIN_MODELS.items():
        name, row = label.replace(".", "_"), apps.get_model(label)._default_manager.order_by("pk").first()
        assert row is not None, f"the test's world has no {label}"
        nobody = ADMIN + 1
        leasts = {view: ADMIN if view in allowed else nobody for view in EDITED}
        if everything or role not in ("viewer", "fleet_admin") or RANKS[role] < least:
            visit(f"{name}_changelist", least)
        if everything:
            visit(f"{name}_history", least, row.pk)
        if everything or role == "fleet_admin":
            visit(f"{name}_change", least, row.pk)
            for view, args, values in (("add", (), None), ("delete", (row.pk,), None), ("change", (row.pk,), {})):
                if everything or leasts[view] == ADMIN:
                    visit(f"{name}_{view}", leasts[view], *args, values=values)
    user = User.objects.get(username="member").pk
    args = {
        "view_on_site": None,
        "app_list": ["fleet"],
        "auth_user_password_change": [user],
    }
    for name, least in expected.ADMIN_PAGES.items():
        if name in ("login", "view_on_site"):  # the console's page of signing in; no row has its own page
            continue
        query = "?app_label=fleet&model_name=instance&field_name=node" if name == "autocomplete" else ""
        values = {} if name == "logout" else None
        visit(name, least, *args.get(name, []), values=values, query=query)
    return wrong


INLINE = re.compile(r'<style|<script(?![^>]*(?:src=|application/json))|\s(?:style|on\w+)="')


def against_the_policy(answer) -> list[str]:
    """Return violations of the Content-Security-Policy on a page."""
    faults = [f"has {tag.strip()}" for tag in sorted(set(INLINE.findall(answer.content.decode())))]
    return faults + ["has no policy"] * ("script-src 'self'" not in answer.headers["Content-Security-Policy"])


@pytest.mark.parametrize(("path", "status"), expected.OPERATIONS.items())
async def test_operations_from_afar(path, status):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "client": ("203.0.113.7", 40_000)}
    await application(scope, None, send)
    assert sent[0]["status"] == status


def test_roles_see_different_things():
    """Check the expectations themselves: nothing of the fleet is open to tenants, and readers write nothing."""
    for reach in (*expected.CONSOLE.values(), *expected.REST.values()):
        if reach.send is not None and reach.least > RANKS["anonymous"]:
            assert reach.least >= expected.MANAGER
    assert SIGNED_IN < TENANT < VIEWER
