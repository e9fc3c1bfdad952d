"""Template tags of the console: numbers, marks, icons, live cells, headers that sort."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from django import template
from django.db.models import Q
from django.template.loader import render_to_string
from django.template.loader_tags import BLOCK_CONTEXT_KEY
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from controlplane.console import formats
from controlplane.console.finders import guarded_style_ids
from controlplane.console.formats import FORMATS
from controlplane.console.glossary import explained
from controlplane.fleet.models import Node
from controlplane.fleet.selectors import maintenance_windows
from controlplane.planning.titles import title_of

register = template.Library()
NOTICED = timedelta(days=1)
"""Before it begins."""

for written in (
    *(formats.count, formats.amount, formats.quantity, formats.gib, formats.gigabytes),
    *(formats.milliseconds, formats.seconds, formats.percent, formats.percent_fine, formats.goal),
    *(formats.times, formats.duration, formats.clock, formats.period, formats.usd, formats.usd_fine),
    *(formats.usd_signed, formats.percent_signed, formats.points_signed, formats.signed, formats.slack, formats.hour),
):
    register.filter(written.__name__, written)
register.filter("title_of", title_of)
register.filter("explained", explained)
register.filter("words", lambda text: text.split())


@register.filter
def get(mapping: dict[str, Any], key: str) -> Any:
    return mapping.get(key)


@register.filter
def before_colon(label: str) -> str:
    """The name in a label such as "Ask: an operator approves each plan"."""
    return label.partition(":")[0]


@register.filter
def after_colon(label: str) -> str:
    return label.partition(":")[2].strip()


@register.filter
def ends(name: str) -> tuple[str, str]:
    """What an instance's name shares with its siblings', and by what it differs: `llama-east` and `-3`."""
    begin, dash, last = name.rpartition("-")
    return (begin, dash + last) if begin else (name, "")


@register.filter
def prefixed(key: Any, prefix: str) -> str:
    """An id within the page: `approve-12`."""
    return f"{prefix}-{key}"


@register.filter
def as_json(value: Any) -> str:
    """For a field that is edited as text; nothing at all for an empty object."""
    return json.dumps(value, sort_keys=True) if value else ""


@register.simple_tag(takes_context=True)
def again(context: template.Context, name: str) -> SafeString:
    """The block *name* of the page once more."""
    block: SafeString = context.render_context[BLOCK_CONTEXT_KEY].get_block(name).render(context)
    return block


@register.simple_tag
def plotly_guards() -> SafeString:
    return format_html_join("", '<template id="{}"></template>', ((name,) for name in guarded_style_ids()))


@register.filter
def coded(text: str) -> SafeString:
    """*text* with what stands between backquotes as code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # one without its partner
        return format_html("{}", text)
    return format_html_join(
        "",
        "{}",
        ((format_html("<code>{}</code>", piece) if number % 2 else piece,) for number, piece in enumerate(pieces)),
    )


@register.simple_tag
def icon(name: str) -> SafeString:
    """One of `templates/console/icons/`, drawn in the colour of the text."""
    return mark_safe(render_to_string(f"console/icons/{name}.svg"))  # noqa: S308 - our own files


register.simple_tag(formats.mark)
register.simple_tag(formats.bar)


@register.simple_tag
def live(row: dict[str, Any] | None, field: str, kind: str, fallback: Any = None) -> SafeString:
    """A number of a live row in the format *kind*, kept fresh; *fallback* stands for it while there is no live row."""
    return format_html("<span{}>{}</span>", _fragment(row, field, kind), _live_text(row, field, kind, fallback))


@register.simple_tag
def cell(row: dict[str, Any] | None, field: str, kind: str) -> SafeString:
    """A numeric table cell, kept fresh."""
    return format_html('<td class="num"{}>{}</td>', _fragment(row, field, kind), _live_text(row, field, kind, None))


def _fragment(row: dict[str, Any] | None, field: str, kind: str) -> SafeString:
    return format_html(' data-fragment="{}/{}:{}"', row["live"], field, kind) if row and "live" in row else SafeString()


def _live_text(row: dict[str, Any] | None, field: str, kind: str, fallback: Any) -> str:
    value = fallback if row is None or row.get(field) is None else row[field]
    return FORMATS[kind](value, row or {})


@register.simple_tag
def age(epoch_s: float | None) -> SafeString:
    """`5 s ago`, ticking."""
    return formats.ticking("age", epoch_s)


@register.simple_tag
def since(epoch_s: float | None) -> SafeString:
    """`3 h 12 min`, ticking."""
    return formats.ticking("since", epoch_s)


@register.simple_tag
def moment(at: datetime | float | None) -> SafeString:
    """A time in the zone of the pages, to the second; the exact UTC time is in its attribute."""
    if at is None:
        return mark_safe(formats.NONE)  # noqa: S308
    if not isinstance(at, datetime):
        at = datetime.fromtimestamp(at, UTC)
    return format_html(
        '<time datetime="{}">{}</time>',
        at.astimezone(UTC).isoformat(timespec="milliseconds"),
        formats.moment(timezone.localtime(at), timezone.localtime()),
    )


@register.simple_tag
def hours_from_now(hours: int) -> str:
    """The time as a field of a form has it."""
    return f"{timezone.localtime() + timedelta(hours=hours):%Y-%m-%dT%H:%M}"


@register.simple_tag
def tile(label: str, value: str, unit: str = "", title: str = "") -> SafeString:
    """One number of a page's head that its script does not change."""
    shown = {"label": label, "value": value, "unit": unit, "title": title or explained(label)}
    return render_to_string("console/parts/tile.html", shown)


@register.simple_block_tag
def table(content: SafeString, label: str, *headers: str, css: str = "") -> SafeString:
    """A table whose rows are *content*. A header has `#` before it over numbers, `~` if it is only spoken, a tip after `|`.

    One that is empty is left out.
    """
    parts = (header.partition("|") for header in headers if header)
    columns = [(text[0], text.lstrip("#~"), tip or explained(text)) for text, _, tip in parts]
    shown = {"label": label, "columns": columns, "css": css, "rows": content}
    return render_to_string("console/parts/plain_table.html", shown)


@register.simple_block_tag(takes_context=True)
def reason_dialog(
    context: template.Context, content: SafeString, name: str, action: str, title: str, *of: Any, **more: Any
) -> SafeString:
    """A dialog that says what an action does, asks for its reason and posts to *action*; a button opens it by its id *name*.

    *title* is a format of *of*. More may be `button`, its word; `cancel`, the other's; `grave`, for what is hard to undo;
    `reason`, `optional` or `none`; `files`, where one is sent.
    """
    shown: dict[str, Any] = {
        "name": name,
        "action": action,
        "title": title.format(*of),
        "content": content,
        "cancel": "Cancel",
    }
    # The address where only a part of the page is asked for.
    shown |= {known: context.get(known) for known in ("page_address", "drawn_after")} | more
    return render_to_string("console/parts/reason_dialog.html", shown, context["request"])


@register.simple_block_tag(takes_context=True)
def operation(
    context: template.Context,
    content: SafeString,
    name: str,
    row: Any,
    verb: str,
    subject: str = "{}",
    *of: Any,
    **more: Any,
) -> SafeString:
    """The button and the dialog of an operation of `OFFERS` on *row*, with more words and fields in the dialog: *content*.

    *subject* is a format of *of*, by default the row, which follows the operation's name in both. More may be `main`, for
    the button that is expected; `small`; `key`; and the words `button` and `cancel` of the dialog's buttons.
    """
    from controlplane.console.operations import GRAVE, OFFERS, label_of  # they import pages' parts

    declared = OFFERS[name].operation(verb)
    shown = {
        "dialog": f"{verb}-{name}-{row.pk}",
        "action": reverse("console:operate", args=[name, row.pk, verb]),
        "label": label_of(name, verb),
        "button": label_of(name, verb),
        "about": declared.about if declared else "",
        "subject": subject.format(*(of or (row,))),
        "content": SafeString(content.strip()),  # `strip` returns plain text
        "grave": verb in GRAVE,
        "page_address": context.get("page_address"),
        **more,
    }
    return render_to_string("console/parts/operation.html", shown, context["request"])


@register.inclusion_tag("console/fleet/maintenance.html", takes_context=True)
def maintenance_notices(context: template.Context, node: Node | None = None) -> dict[str, Any]:
    """Maintenance that is under way or begins within a day: of all places, or of a node and its region."""
    now = timezone.now()
    windows = maintenance_windows(now, now + NOTICED).open()
    if node is not None:
        windows = windows.filter(Q(node=node) | Q(region=node.region_id))
    return {"windows": windows, "is_operator": context.get("is_operator"), "request": context["request"]}


@register.inclusion_tag("console/parts/sort_header.html", takes_context=True)
def sort_header(
    context: template.Context, field: str, label: str, kind: str = "num", first: str = "-", tip: str = ""
) -> dict[str, Any]:
    """A column's header as a link that sorts by it, then in the other direction; numbers begin with the greatest."""
    order = context["filters"].order
    current = order.field == field
    target = ("" if order.descending else "-") + field if current else (first if kind.startswith("num") else "") + field
    query = context["request"].GET.copy()
    query["sort"] = target
    for name in ("format", "before"):  # another order starts at its first page
        query.pop(name, None)
    return {
        "label": label,
        "kind": kind,
        "tip": tip or explained(label),
        "href": f"?{query.urlencode()}",
        "sorted": ("descending" if order.descending else "ascending") if current else "",
    }
