"""Template filters of tables: a resource's cells."""

from datetime import datetime
from typing import Any

from django import template
from django.db.models import Model

from controlplane.console import formats
from controlplane.console.templatetags.console import coded, moment
from controlplane.resources.resource import EPOCHS, NUMBERS, Column

register = template.Library()


@register.filter
def drawn(row: Any, column: Column) -> str:
    """The value of *column* in *row*, as its cell shows it."""
    value = column.of(row)
    if column.draw in NUMBERS:
        return formats.FORMATS[column.draw](value, {})
    if column.draw == "moment":
        return moment(value)
    if column.draw == "mark":
        return formats.mark(value, getattr(row, f"get_{column.name}_display")())
    if column.draw in EPOCHS:
        return formats.ticking(column.draw, value.timestamp() if isinstance(value, datetime) else value)
    if value in (None, ""):
        return formats.NONE
    if column.draw == "wide":
        return coded(str(value))
    return str(value)


@register.filter
def value_of(row: Any, column: Column) -> Any:
    """The value of *column* in *row*, for cells with a template."""
    return column.of(row)


@register.filter
def places_of(row: Model) -> str:
    """The name of its resource: `nodes`."""
    return f"{row._meta.model_name}s"
