"""Environment variables: one declaration each; what is wrong is said at the start, with the variable's name."""

import os
from pathlib import Path

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from controlplane import env


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)
    for name in ("DATABASE_URL", "REDIS_URL", "VLLM_PYTHON"):
        monkeypatch.delenv(name, raising=False)


def test_without_variables_every_value_is_its_default():
    assert env.read() == env.Environment.model_construct()


def test_every_variable_has_a_purpose_and_a_default():
    for name, field in env.Environment.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name


def test_every_variable_that_is_no_secret_is_a_setting():
    missing = [name for name in env.read().public() if not hasattr(settings, name)]
    assert not missing


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("PILOTHOUSE_DEBUG", "Yes", True),
        ("PILOTHOUSE_FLOOR", "off", False),
        ("PILOTHOUSE_FORECAST_EVERY_S", "0.25", 0.25),
        ("PILOTHOUSE_LEDGER_KEEP_DAYS", "7", 7),
        ("PILOTHOUSE_ALLOWED_HOSTS", "a.example, b.example,", ["a.example", "b.example"]),
        ("PILOTHOUSE_PLAN_DEMAND", "upper_80", "upper_80"),
        ("PILOTHOUSE_FORECAST_EVERY_S", "", 600.0),
        ("VLLM_PYTHON", "/opt/vllm/bin/python", "/opt/vllm/bin/python"),
    ],
)
def test_a_text_becomes_a_value_of_the_declared_type(monkeypatch, variable, text, value):
    monkeypatch.setenv(variable, text)
    assert getattr(env.read(), variable.removeprefix(env.PREFIX)) == value


@pytest.mark.parametrize(
    ("variable", "text", "reason"),
    [
        ("PILOTHOUSE_DEBUG", "perhaps", "valid boolean"),
        ("PILOTHOUSE_LEDGER_KEEP_DAYS", "many", "valid integer"),
        ("PILOTHOUSE_FORECAST_EVERY_S", "0", "greater than 0"),
        ("PILOTHOUSE_FORECAST_EVERY_S", "nan", "finite number"),
        ("PILOTHOUSE_LENGTH_BUDGET_MS", "0", "greater than 0"),
        ("PILOTHOUSE_FORECAST_WINDOW_S", "90", "multiple of 60"),
        ("PILOTHOUSE_FORECAST_WINDOW_S", "0", "greater than or equal to 60"),
        ("PILOTHOUSE_PLAN_DEMAND", "median", "'strategy', 'mean', 'upper_80' or 'upper_95'"),
        ("PILOTHOUSE_LOG_FORMAT", "xml", "'text' or 'json'"),
    ],
)
def test_a_wrong_text_is_an_error_with_variable_text_and_reason(monkeypatch, variable, text, reason):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ImproperlyConfigured) as error:
        env.read()
    assert str(error.value).startswith(f"{variable} is {text!r}. ")
    assert reason in str(error.value)


def test_all_wrong_variables_are_named_at_once(monkeypatch):
    monkeypatch.setenv("PILOTHOUSE_EMULATOR_PORT", "soon")
    monkeypatch.setenv("PILOTHOUSE_PLAN_EPSILON", "2")
    with pytest.raises(ImproperlyConfigured) as error:
        env.read()
    assert [line.split()[0] for line in str(error.value).splitlines()] == [
        "PILOTHOUSE_PLAN_EPSILON",
        "PILOTHOUSE_EMULATOR_PORT",
    ]


@pytest.mark.parametrize("variable", ["PILOTHOUSE_HEARTBEATS", "PILOTHOUSE_debug", "PILOTHOUSE_REDIS_URL"])
def test_an_unknown_variable_is_an_error(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ImproperlyConfigured, match=f"^Unknown environment variables: {variable}. See docs"):
        env.read()


def test_a_file_may_hold_the_value_and_goes_first(monkeypatch, tmp_path: Path):
    for variable, text in (("PILOTHOUSE_METRICS_TOKEN", "of the file"), ("DATABASE_URL", "sqlite:///x")):
        path = tmp_path / variable
        path.write_text(f"{text}\n")
        monkeypatch.setenv(f"{variable}_FILE", str(path))
        monkeypatch.setenv(variable, "of the environment")
    values = env.read()
    assert values.METRICS_TOKEN.get_secret_value() == "of the file"
    assert values.DATABASE_URL.get_secret_value() == "sqlite:///x"


def test_a_missing_file_is_an_error_with_its_variable(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PILOTHOUSE_SECRET_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(ImproperlyConfigured, match=r"^PILOTHOUSE_SECRET_KEY_FILE: cannot read .*none: No such file"):
        env.read()


def test_secrets_are_neither_shown_nor_public(monkeypatch):
    monkeypatch.setenv("PILOTHOUSE_SECRET_KEY", "hush-1")
    monkeypatch.setenv("PILOTHOUSE_SECRET_KEY_FALLBACKS", "hush-2,hush-3")
    monkeypatch.setenv("DATABASE_URL", "postgres://u:hush-4@host/name")
    values = env.read()
    assert "hush" not in repr(values)
    assert "hush" not in repr(values.public())
    assert [key.get_secret_value() for key in values.SECRET_KEY_FALLBACKS] == ["hush-2", "hush-3"]


@pytest.mark.parametrize(
    ("url", "parts", "options", "cursors"),
    [
        ("postgres://u:p%40@h/name", ("u", "p@", "h", "", "name"), {"target_session_attrs": "primary"}, True),
        ("postgresql://u@[::1]:99/n%2Fm", ("u", "", "::1", "99", "n/m"), {}, True),
        ("postgres://u@h1:1,h2:2/n", ("u", "", "h1,h2", "1,2", "n"), {"target_session_attrs": "primary"}, True),
        (
            "postgres:///n?host=/t&target_session_attrs=any",
            ("", "", "/t", "", "n"),
            {"target_session_attrs": "any"},
            True,
        ),
        ("postgres://u@h:6/n?pgbouncer=true&sslmode=require", ("u", "", "h", "6", "n"), {"sslmode": "require"}, False),
    ],
)
def test_postgresql_has_the_address_and_options_of_its_url(url, parts, options, cursors):
    made = env.database(url, Path())
    assert tuple(made[name] for name in ("USER", "PASSWORD", "HOST", "PORT", "NAME")) == parts
    assert options.items() <= made["OPTIONS"].items()
    assert made["DISABLE_SERVER_SIDE_CURSORS"] is not cursors
    assert "pgbouncer" not in made["OPTIONS"]


@pytest.mark.parametrize(("url", "said"), [("postgres://h/n?bogus=1", "bogus"), ("mysql://h/n", "mysql")])
def test_an_address_of_no_database_is_named(url, said):
    with pytest.raises(ImproperlyConfigured, match=f"DATABASE_URL: .*{said}"):
        env.database(url, Path())
