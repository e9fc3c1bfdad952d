"""The environment variables that Pilothouse reads, each declared once as a field of `Environment`.

A field holds the variable's name, its type with unit and limits, its default and, as its docstring, its purpose.
`controlplane/settings.py` makes every field a setting of the same name, and `python -m tests.docs.configuration` writes
the table of `docs/operate/configuration.md`. An unknown `PILOTHOUSE_*` variable is an error. Every variable
`NAME` may instead be given as `NAME_FILE`, the path of a file that holds the value (Docker and Kubernetes secrets).
Variables that can also be tuned at run time are declared in `controlplane/tunable.py`.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode, urlsplit

from django.core.exceptions import ImproperlyConfigured
from pydantic import Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from controlplane.tunable import (
    Port,
    PositiveBytes,
    Seconds,
    Secrets,
    Texts,
    Tunable,
    WholeDays,
)

PREFIX = "PILOTHOUSE_"
SQLITE_WAITS_S = 20.0
"""Lock timeout of SQLite writers. SQLite has no queue of writers: on a busy machine one of a dozen may be passed over for
seconds, though each transaction takes milliseconds."""
POOL = {"min_size": 0, "max_size": 10, "timeout": 5.0, "reconnect_timeout": 2.0}
"""Of connections to PostgreSQL, in each process; times in seconds. While the server is away a caller waits no longer."""
SERVER_GONE = {"connect_timeout": 3, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
"""Seconds and tries after which the machine of a PostgreSQL that says nothing is given up."""


class Environment(Tunable, BaseSettings):
    """All environment variables; those of `Tunable` are defaults that rows override.

    The docstring of a field is its line in `docs/operate/configuration.md`.
    """

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
    """Key that signs sessions and sign-in links. Required unless debug is on or `manage.py up` keeps one in `var/`."""
    SECRET_KEY_FALLBACKS: Secrets = []
    """Previous secret keys that are still accepted during rotation."""
    ALLOWED_HOSTS: Texts = ["localhost", "127.0.0.1", "[::1]"]
    """Host names that the console answers to."""
    HTTPS: bool = False
    """The console is served over HTTPS: secure cookies, HSTS, redirect from plain HTTP."""
    PUBLIC_URL: str = ""
    """Address of the console (`https://host`), for links in alert messages; without it they have none."""
    EMAIL_URL: SecretStr = SecretStr("")
    """Mail server of alerts: `smtp://user:password@host:587?tls=true`, or `smtps://host:465`; without it none is sent."""
    EMAIL_FROM: str = "pilothouse@localhost"
    """Sender of mail."""
    OIDC_ISSUER: str = ""
    """Issuer of single sign-on by OpenID Connect, `https://host/realm`: the sign-in page offers it (extra `sso`)."""
    OIDC_CLIENT_ID: str = ""
    """Client that the issuer knows Pilothouse as, with the redirect address `https://<console>/sso/oidc/login/callback/`."""
    OIDC_CLIENT_SECRET: SecretStr = SecretStr("")
    """Secret of that client."""
    OIDC_NAME: str = "single sign-on"
    """How the sign-in page names it."""
    OIDC_SCOPES: Texts = ["openid", "profile", "email"]
    """Scopes to ask for; many issuers send groups only with one more, such as `groups`."""
    OIDC_GROUPS_CLAIM: str = "groups"
    """Claim with the groups of a person; `realm_access.roles` is one within another."""
    OIDC_ROLES: Texts = []
    """Role in a tenant by group, `group=role@tenant`, such as `sre=operator@ops`; a group may have several. Roles follow the
    groups at every sign-in, and who is in none of them does not get in."""
    TIME_ZONE: str = "UTC"
    """Time zone of pages; times are stored in UTC."""
    STATE_DIR: str = "var"
    """Folder for the SQLite database, logs and embedded Redis."""
    LOG_FORMAT: Literal["text", "json"] = "text"
    """`text` for people or `json` for collectors; neither holds prompts."""
    METRICS_TOKEN: SecretStr = SecretStr("")
    """Bearer token for `/metrics`. If unset, `/metrics` answers on loopback only."""

    MAX_BODY_BYTES: PositiveBytes = 4 * 1024 * 1024
    """Maximum request body of `/v1`, not counting images, audio and video."""
    CORS_ORIGINS: Texts = []
    """Origins (`https://host`) whose pages may call `/v1` from a browser; `*` is any. Requests still need a key."""
    LEDGER_KEEP_DAYS: WholeDays = 30
    """Retention of request rows; minute rows are kept."""
    FILES_URL: str = ""
    """Store of the files of `/v1/files`: `s3://bucket/prefix?endpoint_url=https://...&region_name=...` (credentials as AWS's
    tools find them; needs the extra `s3`); default is a folder in the state folder."""
    HOST: str = ""
    """Name of this machine among the hosts that run vLLM processes; default is its host name. Set it in containers."""
    PART: Literal["whole", "relay", "dispatcher"] = "whole"
    """Part of the gateway that this web process is: `relay` answers requests and `dispatcher` decides about them, `whole` is
    both."""
    DISPATCHER_BIND: str = ""
    """Address on which a dispatcher listens for relays, `tcp://host:port` or `ipc://path`; default is none."""
    ZONE: str = ""
    """Zone of regions that this process is near: it prefers these, and takes over others' work later; default is the unnamed
    one."""
    DRAIN_S: Seconds = 300.0
    """Longest time for which a web process asked to stop (SIGTERM) goes on with its open requests; 0 ends them in the
    server's own grace, as SIGINT does."""
    EMULATOR_PORT: Port = 8100
    """Port of the emulated fleet that `manage.py up` starts."""

    DATABASE_URL: Annotated[SecretStr, Field(validation_alias="DATABASE_URL")] = SecretStr("")
    """`postgres://user:password@host:port/name` or `sqlite:///path`; default is SQLite in the state folder. Several hosts,
    `host:port,host:port`, are a primary and its replicas; `?pgbouncer=true` is PgBouncer in transaction mode."""
    REDIS_URL: Annotated[SecretStr, Field(validation_alias="REDIS_URL")] = SecretStr("")
    """`redis://host:port/0`, `rediss://` with TLS; default is the Redis that `manage.py up` starts. `?ssl_ca_certs=path` is
    a file with the certificates of the CAs that Redis's may be of, instead of those of the system."""
    RAY_ADDRESS: Annotated[str, Field(validation_alias="RAY_ADDRESS")] = ""
    """`host:port` of a Ray cluster's head, for the workers that start vLLM through Ray: they need the extra `ray`, and a
    machine of the cluster."""
    VLLM_PYTHON: Annotated[str, Field(validation_alias="VLLM_PYTHON")] = ""
    """Python of the environment that holds vLLM; default is `.venv-vllm/bin/python` if it exists."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *_: PydanticBaseSettingsSource, **__: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (VariablesAndFiles(settings_cls),)

    def public(self) -> dict[str, Any]:
        """Return names and values of the non-secret fields."""
        return {name: value for name, value in self if not is_secret(type(self).model_fields[name])}


class VariablesAndFiles(EnvSettingsSource):
    """Settings source: the file that `NAME_FILE` names, else the variable `NAME`."""

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
    """Return the environment variable of the field *name*."""
    alias = Environment.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else PREFIX + name


def is_secret(field: FieldInfo) -> bool:
    return field.annotation in {SecretStr, list[SecretStr]}


def read() -> Environment:
    """Return this process's environment. Raises ImproperlyConfigured naming every invalid variable."""
    known = {variable_of(name) for name in Environment.model_fields}
    known |= {f"{variable}_FILE" for variable in known}
    unknown = sorted(variable for variable in os.environ if variable.startswith(PREFIX) and variable not in known)
    if unknown:
        raise ImproperlyConfigured(
            f"Unknown environment variables: {', '.join(unknown)}. See docs/operate/configuration.md."
        )
    try:
        return Environment()
    except SettingsError as error:  # errors of a source arrive wrapped
        raise ImproperlyConfigured(str(error.__cause__ or error)) from error
    except ValidationError as error:
        raise ImproperlyConfigured("\n".join(map(_message, error.errors()))) from None


def _message(error: ErrorDetails) -> str:
    name = str(error["loc"][0])  # the variable itself where it has no prefix
    variable = variable_of(name) if name in Environment.model_fields else name
    return f"{variable} is {error['input']!r}. {error['msg']}."


def database(url: str, state_dir: Path) -> dict[str, Any]:
    """Return Django's DATABASES entry for *url* (see `DATABASE_URL`); SQLite under *state_dir* when it is empty."""
    parts = urlsplit(url or f"sqlite:///{state_dir / 'pilothouse.sqlite3'}")
    if parts.scheme == "sqlite":
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": unquote(parts.path)[1:],  # sqlite:///relative and sqlite:////absolute
            "CONN_MAX_AGE": 600,  # opening costs more than most queries; PostgreSQL has a pool
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": SQLITE_WAITS_S,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            },
        }
    if parts.scheme in {"postgres", "postgresql"}:
        return _postgresql(url)
    raise ImproperlyConfigured(f"DATABASE_URL: scheme {parts.scheme!r} is not sqlite, postgres or postgresql")


def _postgresql(url: str) -> dict[str, Any]:
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    address, _, text = url.partition("?")
    query = dict(parse_qsl(text, keep_blank_values=True))
    pgbouncer = query.pop("pgbouncer", "false") in {"true", "1"}
    try:
        given = conninfo_to_dict(f"{address}?{urlencode(query)}")  # as libpq reads it
    except ProgrammingError as error:
        raise ImproperlyConfigured(f"DATABASE_URL: {str(error).strip()}") from None
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    return {
        "ENGINE": "django.db.backends.postgresql",
        **{name: given.pop(option, "") for name, option in names.items()},
        "CONN_HEALTH_CHECKS": True,  # 0.1 ms; a server that was restarted or failed over has closed those of the pool
        "DISABLE_SERVER_SIDE_CURSORS": pgbouncer,  # the next transaction may have another session
        "OPTIONS": {"pool": POOL, **SERVER_GONE, "target_session_attrs": "primary", **given},
    }


def redis_url(url: str) -> str:
    """Return *url* so that all clients verify the certificate of a `rediss://` server alike.

    Celery's would not verify it by default. What *url* says of `ssl_…` itself is kept.
    """
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        return url
    query = {"ssl_cert_reqs": "required"} | dict(parse_qsl(parts.query))
    if (ca_file := query.get("ssl_ca_certs")) and not Path(ca_file).is_file():
        raise ImproperlyConfigured(f"REDIS_URL: there is no file {ca_file}")
    query.setdefault("ssl_check_hostname", "true" if query["ssl_cert_reqs"] == "required" else "false")
    return parts._replace(query=urlencode(query)).geturl()


def mail_server(url: str) -> dict[str, Any]:
    """Return Django's `EMAIL_…` settings for *url* (see `EMAIL_URL`); without one mail goes nowhere."""
    if not url:
        return {"EMAIL_BACKEND": "django.core.mail.backends.dummy.EmailBackend"}
    parts = urlsplit(url)
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
        raise ImproperlyConfigured("PILOTHOUSE_EMAIL_URL is not smtp://user:password@host:port or smtps://…")
    return {
        "EMAIL_BACKEND": "django.core.mail.backends.smtp.EmailBackend",
        "EMAIL_HOST": parts.hostname,
        "EMAIL_PORT": parts.port or (465 if parts.scheme == "smtps" else 25),
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_SSL": parts.scheme == "smtps",
        "EMAIL_USE_TLS": parse_qs(parts.query).get("tls") in (["true"], ["1"]),
        "EMAIL_TIMEOUT": 5,
    }


def group_roles(texts: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Return tenants and roles by group, of `OIDC_ROLES`."""
    roles: dict[str, list[tuple[str, str]]] = {}
    for text in texts:
        group, _, given = text.rpartition("=")
        role, _, tenant = given.partition("@")
        if not group or not tenant or role not in ("viewer", "operator", "admin"):
            raise ImproperlyConfigured(f"PILOTHOUSE_OIDC_ROLES: {text!r} is not group=role@tenant")
        roles.setdefault(group.strip(), []).append((tenant, role))
    return roles


def file_storage(url: str, state_dir: Path) -> dict[str, Any]:
    """Django's STORAGES entry for *url* (see `FILES_URL`); a folder of *state_dir* when it is empty."""
    if not url:
        folder = {"location": str(state_dir / "files"), "base_url": None}
        return {"BACKEND": "django.core.files.storage.FileSystemStorage", "OPTIONS": folder}
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise ImproperlyConfigured(f"PILOTHOUSE_FILES_URL: {url!r} is not s3://bucket/prefix")
    options: dict[str, Any] = {
        "bucket_name": parts.netloc,
        "location": parts.path.strip("/"),
        "file_overwrite": False,
        "max_memory_size": 8 * 2**20,  # the rest of a file that is read lies on disk
        **{key: values[-1] for key, values in parse_qs(parts.query).items()},
    }
    return {"BACKEND": "storages.backends.s3.S3Storage", "OPTIONS": options}
