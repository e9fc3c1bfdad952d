"""Runtime settings with the values in force, for all models or for one."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from controlplane.accounts.models import Role
from controlplane.resources.filters import Search, Select, every
from controlplane.resources.resource import Column, Filter, Resource, Viewer, of_model
from controlplane.tunable import GROUPS
from controlplane.tuning.selectors import Described, described


def of_all_models(_viewer: Viewer) -> list[Described]:
    return described()


def of_one_model(_rows: Sequence[Described], model: str) -> list[Described]:
    return described(model)


def found_by(rows: Sequence[Described], text: str) -> list[Described]:
    """Return those with each word of *text* in the name, the group or the description."""
    words = text.lower().replace("_", " ").split()
    return [
        each
        for each in rows
        if all(word in f"{each.name} {each.group} {each.purpose}".lower().replace("_", " ") for word in words)
    ]


def of_group(rows: Sequence[Described], group: str) -> list[Described]:
    return [each for each in rows if each.group == group]


GROUP_NAMES = [str(group.__doc__) for group in GROUPS]
SETTINGS = Resource(
    name="settings",
    noun="setting",
    model=None,
    rows=of_all_models,
    least=Role.VIEWER,
    columns=(
        Column("name", "Setting", type=str, draw="console/settings/name_cell.html"),
        Column("model", "Model", type=str, about="Empty: all models without an override."),
        Column("group", type=str),
        Column("kind", type=str, about="`boolean`, `integer`, `number`, `choice` or `text`."),
        Column("value", "Value (in its unit)", type=Any, draw="console/settings/value_cell.html", kind="num"),
        Column(
            "default",
            "Default (in its unit)",
            type=Any,
            kind="num",
            about="Value after a reset: the environment's, or for one model the value for all.",
        ),
        Column("unit", "Unit", type=str),
        Column("limits", "Limits", type=str, draw="wide"),
        Column("choices", type=list[str]),
        Column("per_model", type=bool, about="Whether it can be overridden per model."),
        Column("changed", source=lambda each: each.row is not None, type=bool),
        Column("changed_at", "Changed (UTC)", "row.changed_at", type=datetime | None),
        Column("changed_by", "Changed by", "row.changed_by", type=str | None),
        Column("purpose", "Description", type=str, draw="wide"),
    ),
    filters=(
        replace(
            of_model(), lookup=of_one_model, about="The settings of one model: those that can be overridden per model."
        ),
        Filter("q", found_by, rest=False, control=Search("q", "Search settings", "Search all settings")),
        Filter("group", of_group, rest=False, control=Select("group", "Group", every("groups", GROUP_NAMES))),
    ),
    page=("name", "value", "unit", "default", "limits", "purpose"),
    template="console/settings/settings.html",
)
