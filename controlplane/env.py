"""The environment variables that Pilothouse reads: one table, typed readers, no surprises.

`ENV` is the only place where a variable is declared. `controlplane/settings.py` reads through `value()`, and
`docs/configuration.md` holds the same table (a test compares the two). An unknown `PILOTHOUSE_*` variable is an error,
so that a typing mistake does not pass silently. Every variable `NAME` may instead be given as `NAME_FILE`, the path of a
file that holds the value (Docker and Kubernetes secrets).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

Kind = Literal["str", "secret", "bool", "int", "float", "list"]
PREFIX = "PILOTHOUSE_"


@dataclass(frozen=True, slots=True)
class Variable:
    kind: Kind
    default: Any
    help: str


ENV: dict[str, Variable] = {
    "PILOTHOUSE_DEBUG": Variable("bool", False, "Django debug pages and checks; never on a public address."),
    "PILOTHOUSE_SECRET_KEY": Variable(
        "secret",
        "",
        "Signs sessions and sign-in links. Required unless debug is on or `manage.py up` keeps one in `var/`.",
    ),
    "PILOTHOUSE_SECRET_KEY_FALLBACKS": Variable(
        "list", [], "Earlier secret keys that are still accepted while rotating."
    ),
    "PILOTHOUSE_ALLOWED_HOSTS": Variable(
        "list", ["localhost", "127.0.0.1", "[::1]"], "Host names the console answers to."
    ),
    "PILOTHOUSE_TRUSTED_ORIGINS": Variable(
        "list", [], "Origins (`https://host`) trusted for forms and websockets behind a proxy."
    ),
    "PILOTHOUSE_HTTPS": Variable(
        "bool", False, "The console is reached over HTTPS: secure cookies, HSTS, redirect from plain HTTP."
    ),
    "PILOTHOUSE_TRUST_PROXY_HEADER": Variable(
        "bool", False, "Trust `X-Forwarded-Proto` from the reverse proxy (only if the proxy always sets it)."
    ),
    "PILOTHOUSE_TIME_ZONE": Variable("str", "UTC", "Time zone of pages; stored times are UTC."),
    "PILOTHOUSE_STATE_DIR": Variable("str", "var", "Folder for the SQLite database, logs and embedded Redis."),
    "PILOTHOUSE_LOG_LEVEL": Variable("str", "INFO", "Level of Pilothouse's own loggers."),
    "PILOTHOUSE_LOG_FORMAT": Variable(
        "str", "text", "`text` for people or `json` for collectors; neither holds prompts."
    ),
    "PILOTHOUSE_METRICS_TOKEN": Variable(
        "secret", "", "Bearer token for `/metrics`. Without one, `/metrics` answers on loopback only."
    ),
    "PILOTHOUSE_MAX_BODY_BYTES": Variable("int", 4 * 1024 * 1024, "Largest request body of `/v1`, in bytes."),
    "PILOTHOUSE_MAX_JSON_DEPTH": Variable("int", 32, "Deepest nesting of a `/v1` request body."),
    "PILOTHOUSE_KEY_CACHE_S": Variable(
        "float", 2.0, "Seconds for which a checked API key is trusted before it is read again."
    ),
    "PILOTHOUSE_FLEET_REFRESH_S": Variable("float", 1.0, "Seconds between readings of the inventory by the gateway."),
    "PILOTHOUSE_HEARTBEAT_S": Variable("float", 1.0, "Seconds between metric readings of each instance."),
    "PILOTHOUSE_HEARTBEAT_FAILURES": Variable("int", 3, "Readings missed in a row after which an instance is failed."),
    "PILOTHOUSE_SUMMARY_S": Variable("float", 0.5, "Seconds between published summaries of live load."),
    "PILOTHOUSE_LEDGER_FLUSH_S": Variable("float", 0.5, "Seconds between batches of ledger rows."),
    "PILOTHOUSE_LEDGER_KEEP_DAYS": Variable("int", 30, "Days for which request rows are kept; minute rows stay."),
    "PILOTHOUSE_MAX_HOLD_S": Variable(
        "float", 600.0, "Seconds for which a request may wait for an instance with room, a cold start included."
    ),
    "PILOTHOUSE_UPSTREAM_CONNECT_S": Variable(
        "float", 2.0, "Seconds to connect to an instance before another is tried."
    ),
    "PILOTHOUSE_UPSTREAM_SILENCE_S": Variable(
        "float", 120.0, "Seconds without a byte from an instance after which the request fails."
    ),
    "PILOTHOUSE_HOST": Variable(
        "str",
        "",
        "Name of this machine among the hosts that run vLLM processes; default is its host name. Give containers one.",
    ),
    "PILOTHOUSE_EMULATOR_PORT": Variable("int", 8100, "Port of the emulated fleet that `manage.py up` starts."),
    "PILOTHOUSE_DEMO_DAY_S": Variable("float", 480.0, "Seconds of a day of the demo's traffic."),
    "PILOTHOUSE_FORECASTER": Variable(
        "str", "", "Forecaster of demand, a name in `forecasting.workload`; default is the best in its backtests."
    ),
    "PILOTHOUSE_FORECAST_WINDOW_S": Variable("int", 600, "Length of the windows of demand, in whole minutes."),
    "PILOTHOUSE_FORECAST_WINDOWS": Variable("int", 6, "Windows that are forecast: how far plans look ahead."),
    "PILOTHOUSE_FORECAST_EVERY_S": Variable("float", 600.0, "Seconds between forecasts."),
    "PILOTHOUSE_FORECAST_HISTORY_DAYS": Variable("float", 14.0, "Days of demand from which forecasters learn."),
    "PILOTHOUSE_FORECAST_REFIT_S": Variable(
        "float", 86_400.0, "Seconds after which a forecaster is fitted anew; between, it takes in what is new."
    ),
    "PILOTHOUSE_FORECAST_KEEP_HOURS": Variable(
        "float",
        12.0,
        "Hours for which forecasts are kept as they were made; then those of a series within an hour become one row, with"
        " the last forecast of each window.",
    ),
    "PILOTHOUSE_PLAN_EVERY_S": Variable("float", 3600.0, "Seconds between scaling plans."),
    "PILOTHOUSE_PLAN_DEMAND": Variable(
        "str",
        "strategy",
        "What of a forecast plans are made for: `mean`, `upper_80`, `upper_95`, or what the model's `strategy` asks for"
        " (`pilothouse` for more than the mean, the others for the mean).",
    ),
    "PILOTHOUSE_PLAN_NIW_BUFFER": Variable(
        "float", 0.1, "Share of the last hour's non-interactive load that plans keep room for beside the forecast."
    ),
    "PILOTHOUSE_PLAN_EPSILON": Variable(
        "float",
        0.8,
        "Share of its own demand that each region must be able to serve; the rest may be served elsewhere.",
    ),
    "PILOTHOUSE_PLAN_TIME_LIMIT_S": Variable("float", 20.0, "Seconds for which the exact solver may search."),
    "PILOTHOUSE_PLANNING_KEEP_DAYS": Variable(
        "float", 7.0, "Days for which forecasts, and plans that were never carried out, are kept."
    ),
    "PILOTHOUSE_STRATEGY_EVERY_S": Variable("float", 5.0, "Seconds between the strategies' looks at live load."),
    "PILOTHOUSE_COMPARE_EVERY_S": Variable("float", 3600.0, "Seconds between comparisons of strategies; 0 is never."),
    "PILOTHOUSE_COMPARE_HOURS": Variable("float", 6.0, "Hours of the ledger that a comparison simulates."),
    "PILOTHOUSE_COMPARE_REQUESTS": Variable(
        "int", 50_000, "Requests that a comparison simulates at most, the newest first."
    ),
    "PILOTHOUSE_COMPARE_LIMIT_S": Variable("float", 300.0, "Seconds that a comparison may take."),
    "PILOTHOUSE_FLOOR": Variable(
        "bool", True, "The gateway adds instances to endpoints that are full, whatever planners and strategies do."
    ),
    "PILOTHOUSE_FLOOR_PATIENCE_S": Variable(
        "float", 5.0, "Seconds that the floor's commands wait for a worker before the gateway carries them out itself."
    ),
    "PILOTHOUSE_LENGTHS": Variable(
        "bool", True, "Output lengths are predicted by caches and a length model; off, by moving means alone."
    ),
    "PILOTHOUSE_LENGTH_BUDGET_MS": Variable(
        "float", 5.0, "Milliseconds that a request waits for its predicted length at most."
    ),
    "PILOTHOUSE_LENGTH_INLINE_US": Variable(
        "float",
        1000.0,
        "A length model that answers its hardest prompt within this runs in the gateway, else in a subprocess.",
    ),
    "PILOTHOUSE_LENGTH_CACHE_ENTRIES": Variable(
        "int", 10_000, "Prompts a model whose lengths are remembered; 0 is none."
    ),
    "PILOTHOUSE_LENGTH_CACHE_S": Variable("float", 86_400.0, "Seconds after which a remembered length is forgotten."),
    "PILOTHOUSE_LENGTH_SIMILARITY": Variable(
        "float", 0.85, "Similarity (0 to 1) from which two prompts are taken to have the same length; above 1 is never."
    ),
    "PILOTHOUSE_LENGTH_SAMPLES_PER_MIN": Variable(
        "int", 60, "Requests a minute and model that are kept as samples to learn from; 0 is none."
    ),
    "PILOTHOUSE_LENGTH_SAMPLES": Variable("int", 20_000, "Samples that are kept of each model, the newest."),
    "PILOTHOUSE_LENGTH_SAMPLE_DAYS": Variable("float", 14.0, "Days for which samples are kept."),
    "PILOTHOUSE_LENGTH_MEASURE_DAYS": Variable("float", 30.0, "Days for which measures of predictions are kept."),
    "PILOTHOUSE_LENGTH_TRAIN_EVERY_S": Variable(
        "float", 86_400.0, "Seconds between trainings of the length model; 0 is only when an operator asks."
    ),
    "PILOTHOUSE_LENGTH_TRAIN_SAMPLES": Variable("int", 1_000, "Samples without which no length model is trained."),
    "PILOTHOUSE_LENGTH_PROMOTE": Variable(
        "bool", True, "A shadow that proved itself is promoted, and one that did not is rejected, without being asked."
    ),
    "PILOTHOUSE_LENGTH_PROMOTE_REQUESTS": Variable("int", 2_000, "Requests over which a shadow is judged."),
    "PILOTHOUSE_LENGTH_PROMOTE_GAIN": Variable(
        "float", 0.02, "Share of the active version's mean absolute error by which a shadow must be better."
    ),
    "DATABASE_URL": Variable(
        "secret",
        "",
        "`postgres://user:password@host:port/name` or `sqlite:///path`; default is SQLite in the state folder.",
    ),
    "REDIS_URL": Variable("secret", "", "`redis://host:port/0`; default is the Redis that `manage.py up` starts."),
    "VLLM_PYTHON": Variable(
        "str", "", "Python of the environment that holds vLLM; default `.venv-vllm/bin/python` if there."
    ),
}


def _raw(name: str, environ: Mapping[str, str]) -> str | None:
    path = environ.get(f"{name}_FILE")
    if path is None:
        return environ.get(name)
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ImproperlyConfigured(f"{name}_FILE: cannot read {path}: {error.strerror}") from error


def value(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """The value of *name* in the type that `ENV` declares, or its default.

    Raises ImproperlyConfigured naming the variable when the text does not fit the type.
    """
    variable = ENV[name]
    text = _raw(name, environ)
    if text is None or text == "":
        return variable.default
    try:
        match variable.kind:
            case "bool":
                return {
                    "1": True,
                    "true": True,
                    "yes": True,
                    "on": True,
                    "0": False,
                    "false": False,
                    "no": False,
                    "off": False,
                }[text.lower()]
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "list":
                return [part.strip() for part in text.split(",") if part.strip()]
            case _:
                return text
    except (KeyError, ValueError) as error:
        raise ImproperlyConfigured(f"{name}: {text!r} is not a valid {variable.kind}") from error


def check_names(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ImproperlyConfigured if the environment holds a `PILOTHOUSE_*` variable that `ENV` does not know."""
    known = ENV.keys() | {f"{name}_FILE" for name in ENV}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    if unknown:
        raise ImproperlyConfigured(f"Unknown environment variables: {', '.join(unknown)}. See docs/configuration.md.")


def database(url: str, state_dir: Path) -> dict[str, Any]:
    """Django's DATABASES entry for *url* (see `DATABASE_URL`); SQLite under *state_dir* when it is empty."""
    parts = urlsplit(url or f"sqlite:///{state_dir / 'pilothouse.sqlite3'}")
    if parts.scheme == "sqlite":
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": unquote(parts.path)[1:],  # sqlite:///relative and sqlite:////absolute
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA busy_timeout=5000;",
            },
        }
    if parts.scheme in {"postgres", "postgresql"}:
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": unquote(parts.path.lstrip("/")),
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            "HOST": parts.hostname or "",
            "PORT": parts.port or "",
            "OPTIONS": {"pool": True, **{key: values[-1] for key, values in parse_qs(parts.query).items()}},
        }
    raise ImproperlyConfigured(f"DATABASE_URL: scheme {parts.scheme!r} is not sqlite, postgres or postgresql")
