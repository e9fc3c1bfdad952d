"""Template filters of lists: a resource's cells."""

from typing import Any

from django import template
from django.urls import reverse
from django.utils.html import format_html
from django.utils.text import Truncator

from controlplane.console import formats
from controlplane.console.templatetags.console import age, moment
from controlplane.resources.resource import NUMBERS, Column

register = template.Library()


@register.filter
def drawn(row: Any, column: Column) -> str:
    """The value of *column* in *row*, as its cell shows it."""
    value = column.of(row)
    if column.draw in NUMBERS:
        return str(getattr(formats, column.draw)(value))
    if column.draw == "moment":
        return moment(value)
    if column.draw == "age":
        return age(None if value is None else value.timestamp())
    if value in (None, ""):
        return formats.NONE
    text = Truncator(str(value)).chars(column.most) if column.most else str(value)
    if not column.href:
        return text
    href = reverse(column.href, args=[row.pk if column.own_page else value])
    return format_html(
        '<a{} href="{}">{}</a>', format_html(' class="{}"', column.css) if column.css else "", href, text
    )
