"""Formats of numbers, times and states in templates, charts and live fragments.

Every function of `FORMATS` takes a value and its row and returns text or HTML; `None` is a dash. One space separates a
number from its unit, so that a tile can set the unit smaller; what follows a line's end has a line of its own there.
"""

import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from controlplane.resources.instances import STATUSES

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def fixed(value: float, digits: int) -> str:
    """Round *value* half up to *digits* decimals, with thousands separators."""
    scale = 10**digits
    return f"{math.floor(value * scale + 0.5) / scale:,.{digits}f}"


def count(value: float | None) -> str:
    return NONE if value is None else fixed(value, 0)


def gib(size_bytes: float) -> str:
    """Format bytes as GiB: "3.1"."""
    return f"{size_bytes / 2**30:.1f}"


def gigabytes(size_bytes: float) -> str:
    """Format bytes as GB, the usual unit of weights: "16.1"."""
    return fixed(size_bytes / 1e9, 1)


def quantity(value: float | None) -> str:
    """Format with three or four significant figures: 3.1, 38.4, 412, 4,812, 48.2k, 1.23M."""
    if value is None:
        return NONE
    if value < 99.95:
        return fixed(value, 1)
    if value < 9_999.5:
        return fixed(value, 0)
    if value < 999_950:
        return f"{fixed(value / 1_000, 1)}k"
    return f"{fixed(value / 1_000_000, 2)}M"


def amount(value: float | None) -> str:
    """Format a count: 0, 412, 4,812, 48.2k, 1.23M."""
    return count(value) if value is None or value < 9_999.5 else quantity(value)


def milliseconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 9.95:
        return f"{fixed(value, 1)} ms"
    if value < 999.5:
        return f"{fixed(value, 0)} ms"
    return f"{fixed(value / 1_000, 2 if value < 9_995 else 1)} s"


def percent(ratio: float | None) -> str:
    return NONE if ratio is None else f"{fixed(ratio * 100, 0)}%"


def percent_fine(ratio: float | None) -> str:
    """Format with one decimal, rounded down, since 99.96% met is not all met: 97.7%, 100%."""
    if ratio is None:
        return NONE
    tenths = math.floor(ratio * 1_000 + 1e-9)
    return "100%" if tenths == 1_000 else f"{tenths / 10:.1f}%"


def goal(ratio: float | None) -> str:
    """Format a promised share with the digits it needs: 95%, 99.9%."""
    return NONE if ratio is None else f"{round(ratio * 100, 3):g}%"


def times(value: float | None) -> str:
    """Format a multiple of the allowed value: 2.4 times."""
    return NONE if value is None else f"{fixed(value, 1)}\N{MULTIPLICATION SIGN}"


def usd(amount: float | None) -> str:
    """Format as `$38.40`; cents are omitted from a thousand."""
    if amount is None:
        return NONE
    return f"${fixed(amount, 2 if amount < 1_000 else 0)}"


def usd_fine(amount: float | None) -> str:
    """Format the cost of something small, with three significant digits below a dollar: $0.148, $0.0031."""
    if amount is None or amount >= 0.995 or amount < 0.000005:
        return usd(amount)
    return f"${amount:.{2 - math.floor(math.log10(amount))}f}"


def signed(value: float | None) -> str:
    """Format as `+2`, or with a true minus."""
    if value is None:
        return NONE
    return f"{'+' if round(value) >= 0 else MINUS}{fixed(abs(value), 0)}"


def percent_signed(ratio: float | None) -> str:
    """Format a relative difference: `+5%`, or with a true minus."""
    return NONE if ratio is None else f"{signed(100 * ratio)}%"


def points_signed(share: float | None) -> str:
    """Format a difference of two shares: `+1.2 pt`, or with a true minus."""
    if share is None:
        return NONE
    return f"{'+' if share >= 0 else MINUS}{fixed(100 * abs(share), 1)} pt"


def usd_signed(amount: float | None) -> str:
    """Format as `+$2.80`, or with a true minus before the dollar."""
    if amount is None:
        return NONE
    return f"{'+' if amount >= 0 else MINUS}{usd(abs(amount))}"


def duration(seconds: float | None) -> str:
    """Format a duration by its two largest units: 45 s, 12 min, 3 h 12 min, 4 d 3 h."""
    if seconds is None:
        return NONE
    whole = max(0, math.floor(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 24:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"


def clock(seconds: float | None) -> str:
    """Format a short duration to the second: 42 s, 1:48 min, 1:05 h."""
    if seconds is None:
        return NONE
    whole = max(0, math.floor(seconds + 0.5))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def seconds_fine(value_s: float | None) -> str:
    """Format the time that something took: 3.1 ms, 412 ms, 2.31 s."""
    return milliseconds(None if value_s is None else 1000 * value_s)


def period(seconds: float | None) -> str:
    """Format the period of a job: 0.5 s, 30 s, 10 min, 1 h."""
    return NONE if seconds is None else f"{seconds:g} s" if seconds < 60 else duration(seconds)


def seconds(value_s: float | None) -> str:
    """Format a short duration: 0.6 s, 12.3 s, 1:48 min."""
    return clock(value_s) if value_s is None or value_s >= 99.95 else f"{fixed(value_s, 1)} s"


def slack(seconds: float | None) -> str:
    """Format the time that is left before a deadline, or by which it is missed: "+1 h 27 min", or with a true minus."""
    return NONE if seconds is None else f"{'+' if seconds >= 0 else MINUS}{duration(abs(seconds))}"


def hour(at: datetime | None) -> str:
    """Format to the minute: "16:58" of today, "23 Nov 02:00" of another day; in the zone of the pages."""
    if at is None:
        return NONE
    local = timezone.localtime(at)
    return f"{local:%H:%M}" if local.date() == timezone.localdate() else f"{local.day} {local:%b %H:%M}"


def age(seconds: float | None) -> str:
    return NONE if seconds is None else f"{duration(seconds)} ago"


def moment(at: datetime, now: datetime) -> str:
    """Format as `12:53:47` of today, else `20 Nov 12:53:47`, with the year if it is not this one; the epoch has no date."""
    if at.timestamp() == 0:
        return "the start"
    if at.date() == now.date():
        return f"{at:%H:%M:%S}"
    year = f" {at.year}" if at.year != now.year else ""
    return f"{at.day} {at:%b}{year} {at:%H:%M:%S}"


def mark(status: str, word: str = "") -> SafeString:
    """Render a status as shape, colour and *word*."""
    return format_html(
        '<span class="status" data-status="{}"><svg aria-hidden="true"><use href="#mark-{}"/></svg><span>{}</span></span>',
        status,
        status,
        word or STATUSES.get(status, status),
    )


def bar(ratio: float | None, kind: str = "use") -> SafeString:
    """Render a small horizontal bar, shown next to its number. The kind `use` warns when nearly full."""
    value = 0.0 if ratio is None else max(0.0, min(1.0, ratio))
    level = "" if kind != "use" else "critical" if value > 0.98 else "warning" if value > 0.90 else ""
    return format_html(
        '<svg class="bar" data-level="{}" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="6"/><rect class="fill" width="{}" height="6"/></svg>',
        level,
        round(value * 100, 1),
    )


def share(ratio: float | None) -> str:
    """Render a share as a bar and its percentage."""
    return NONE if ratio is None else format_html("{}<span>{}</span>", bar(ratio, "plain"), percent(ratio))


def ticking(attribute: str, epoch_s: float | None) -> SafeString:
    """Render `5 s ago` (*attribute* `age`) or `3 h 12 min` (`since`); `clock.js` updates it."""
    if epoch_s is None:
        return SafeString(NONE)
    passed = time.time() - epoch_s
    return format_html(
        '<time datetime="{}" data-{}="{}">{}</time>',
        datetime.fromtimestamp(epoch_s, UTC).isoformat(timespec="seconds"),
        attribute,
        round(epoch_s, 3),
        age(passed) if attribute == "age" else duration(passed),
    )


def _unit(text: str, unit: str) -> str:
    return text if text == NONE else f"{text} {unit}"


def _of_class(text: str, row: "Row") -> str:
    """Add class and error budget burn to *text*."""
    return f"{text}\n{row['slo_class']}, burn {times(row.get('slo_burn'))}" if row.get("slo_class") else text


Row = Mapping[str, Any]


def _alone(plain: Callable[[Any], str]) -> Callable[[Any, Row], str]:
    return lambda value, row: plain(value)


PLAIN: tuple[Callable[[Any], str], ...] = (
    *(count, quantity, milliseconds, percent, percent_fine, duration, period, seconds_fine, usd, usd_fine),
    *(signed, share, clock, bar),
)
"""Formats of a value alone, by their names."""
FORMATS: dict[str, Callable[[Any, Row], str]] = {
    **{plain.__name__: _alone(plain) for plain in PLAIN},
    "waiting_and_held": lambda value, row: (
        _unit(count(value), "req") + (f"\n{count(row['held'])} held" if row.get("held") else "")
    ),
    "waiting_cell": lambda value, row: (
        f"{count(value)} + {count(row['held'])} held" if row.get("held") else count(value)
    ),
    "requests": lambda value, row: _unit(count(value), "req"),
    "requests_and_running": lambda value, row: _unit(quantity(value), f"/s\n{count(row.get('running'))} running"),
    "output_and_prompt": lambda value, row: _unit(
        quantity(value), f"tok/s\nprompts {quantity(row.get('prompt_tokens_per_s'))}"
    ),
    "ttft": lambda value, row: (
        milliseconds(value)
        + (f"\nall classes {milliseconds(row.get('ttft_all_p95_ms'))}" if row.get("ttft_class") else "")
    ),
    "running_of": lambda value, row: NONE if value is None else f"{count(value)} / {count(row.get('max_num_seqs'))}",
    "slo_met": lambda value, row: _of_class(percent_fine(value), row),
    "ready_of": lambda value, row: _unit(count(value), f"of {count(row.get('instances'))}"),
    "of_judged": lambda value, row: _unit(percent(value), f"{count(row['met'])} of {count(row['judged'])} in 7 days"),
    "of_running": lambda value, row: _unit(count(value), f"of {count(row['running'])} running"),
    "of_announced": lambda value, row: _unit(amount(value), f"held, {amount(row.get('announced'))} lines to come"),
    "of_today": lambda value, row: (
        NONE if value is None else _unit(f"{usd(value)}/h", f"{usd(row.get('today_usd'))} today")
    ),
    "of_cost": lambda value, row: NONE if value is None else _unit(usd(value), f"of {usd(row['cost_usd'])} today"),
    "of_lines_left": lambda value, row: _unit(quantity(value), f"{count(row['lines_left'])} lines left"),
    "mark": lambda value, row: mark(value or ""),
    "age": lambda value, row: ticking("age", value),
}
