"""Every table as CSV: the same rows, units in the headers, UTC times, and no spreadsheet formulas."""

import csv
import io
from datetime import datetime, timedelta, timezone

import pytest

from controlplane.resources.tables import cell, csv_response


def table(answer) -> list[list[str]]:
    assert answer.streaming
    return list(csv.reader(io.StringIO(b"".join(answer.streaming_content).decode())))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM", "'@SUM"),
        ("\tx", "'\tx"),
        ("plain", "plain"),
        (-1.5, "-1.5"),
        (180.0, "180"),
        (3.2112345678912345, "3.211"),
        (0.1 + 0.2, "0.3"),
        (0.00123456789, "0.001235"),
        (1234567.891234, "1234567.891"),
        (0.0, "0"),
        (float("nan"), ""),
        ({"kv": 1 / 3, "rows": [0.1 + 0.2]}, '{"kv": 0.3333, "rows": [0.3]}'),
        ({}, ""),
        (None, ""),
        (True, "true"),
        (datetime(2026, 11, 20, 14, 0, 5, tzinfo=timezone(timedelta(hours=2))), "2026-11-20T12:00:05Z"),
    ],
)
def test_cells(value, text):
    assert cell(value) == text


def test_headers_are_no_formulas_either():
    """Names of keys and applications head the columns of charts."""
    assert table(csv_response("x", ["Time", "=HYPERLINK(1)"], []))[0] == ["Time", "'=HYPERLINK(1)"]


def test_the_file_of_a_chart_is_its_table(client, viewer, live, fleet_feed):
    live.show(fleet_feed, samples=20)
    client.force_login(viewer)
    query = {"table": "ttft"}
    rows = table(client.get("/", query | {"format": "csv"}))
    shown = client.get("/", query).content.decode()
    assert len(rows) - 1 == shown.split("table-of-chart")[1].split("</table>")[0].count("<tr>") - 1
    for header in rows[0]:
        assert header.removesuffix(" (UTC)") in shown  # where times are in the zone of the pages
