"""Cells of tables know their column's header, which narrow windows show in its place."""

import re

from django.template import engines


def labels(html: str) -> list[str]:
    shown = engines["django"].from_string("{% load console %}{% cards %}" + html + "{% endcards %}").render({})
    return re.findall(r'<td data-label="([^"]*)"', shown)


def test_each_cell_has_the_header_of_its_column():
    head = (
        "<thead><tr><th>Name</th><th><a>KV cache<span class='arrow' aria-hidden='true'>↓</span></a></th>"
        '<th><span class="unseen">Actions</span></th></tr></thead>'
    )
    row = '<tr><th scope="row">a</th><td class="num">1</td><td>Drain</td></tr>'
    assert labels(f"<table>{head}<tbody>{row}{row}</tbody></table>") == ["KV cache", "KV cache"]


def test_groups_of_columns_come_first():
    head = '<thead><tr><td></td><th colspan="2">Live</th></tr><tr><th>Name</th><th>MAE</th><th>Bias</th></tr></thead>'
    body = '<tbody><tr><th>a</th><td>1</td><td>2</td></tr><tr><th>b</th><td colspan="2">none</td></tr></tbody>'
    assert labels(f"<table>{head}{body}</table>") == ["Live: MAE", "Live: Bias"]


def test_cells_of_a_column_that_leaves_say_so():
    head = '<thead><tr><th>A</th><th class="num leaves" colspan="2">B</th><th class="text">C</th></tr></thead>'
    row = '<tr><th>1</th><td>2</td><td class="num">3</td><td>4</td></tr>'
    html = engines["django"].from_string("{% load console %}{% cards %}<table>" + head + row + "</table>{% endcards %}")
    assert re.findall(r"<td[^>]*?( data-leaves)?(?: class=\"num\")?>", html.render({})) == [
        " data-leaves",
        " data-leaves",
        "",
    ]


def test_a_table_within_a_cell_keeps_its_own():
    inner = "<table><tbody><tr><td>x</td><td>y</td></tr></tbody></table>"
    body = f"<tbody><tr><td>1</td><td>2</td></tr><tr><td colspan='2'>{inner}</td></tr><tr><td>3</td></tr></tbody>"
    assert labels(f"<table><thead><tr><th>A</th><th>B</th></tr></thead>{body}</table>") == ["A", "B", "A"]


def test_a_header_in_quotes_stays_an_attribute():
    assert labels('<table><thead><tr><th>a "b"</th></tr></thead><tr><td>1</td></tr></table>') == ["a &quot;b&quot;"]
