"""Django settings for every environment; what differs is declared in `controlplane/env.py`.

Every non-secret variable becomes a setting of the same name, without its prefix.
"""

import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import django_stubs_ext
from django.core.exceptions import ImproperlyConfigured

from controlplane import env

environment = env.read()
globals().update(environment.public())
django_stubs_ext.monkeypatch()  # allows `ModelAdmin[Node]`, as its types require

BASE_DIR = Path(__file__).resolve().parent.parent
STATE_DIR: Path = (BASE_DIR / environment.STATE_DIR).resolve()
STATE_DIR.mkdir(parents=True, exist_ok=True)

SECRET_KEY = environment.SECRET_KEY.get_secret_value()
if not SECRET_KEY:
    # `manage.py up` writes this file on its first start, so a single machine needs no set-up.
    key_file = STATE_DIR / "secret_key"
    if key_file.exists():
        SECRET_KEY = key_file.read_text().strip()
    elif environment.DEBUG:
        SECRET_KEY = "insecure-key-for-debug-only"  # noqa: S105
    else:
        raise ImproperlyConfigured(
            "PILOTHOUSE_SECRET_KEY is not set. Set it, or run `manage.py up`, which keeps one in the state folder."
        )
SECRET_KEY_FALLBACKS = [key.get_secret_value() for key in environment.SECRET_KEY_FALLBACKS]
# Not for operators: what these are worth is measured, and tests shorten the intervals.
MAX_MEDIA_BODY_BYTES = 32 * 1024 * 1024  # of a request to `/v1`, with images, audio and video
MAX_JSON_DEPTH = 512  # of a request to `/v1`; Python's own parsers and writers of JSON recurse
KEY_CACHE_S = 1.0  # for which a verified API key is cached; one that ends, ends its open requests within it, too
FLEET_REFRESH_S = 1.0  # between two readings of the inventory
HEARTBEAT_S = 1.0  # between two readings of each instance's metrics
HEARTBEAT_FAILURES = 3  # missed readings in a row, after which an instance has failed
SUMMARY_S = 0.5  # between two published summaries of live load
LEDGER_FLUSH_S = 0.5  # between two writes of ledger rows
BATCH_PRICE_FACTOR = 0.5  # price of a batch line as a share of that of its SLO class: OpenAI's discount
UPSTREAM_CONNECT_S = 2.0  # for connecting to an instance, before another is tried
UPSTREAM_SILENCE_S = 120.0  # without a byte from an instance, after which the request fails
WHAT_IF_PROCESSES = 2  # what-if runs that a machine makes at once
DEMO_DAY_S = 480.0  # length of a day in the demo's traffic
METRICS_TOKEN = environment.METRICS_TOKEN.get_secret_value()
CSRF_TRUSTED_ORIGINS = [
    f"https://{'*' * name.startswith('.')}{name}" for name in environment.ALLOWED_HOSTS if name != "*"
]
"""Of forms and websockets behind a proxy."""

INSTALLED_APPS = [
    "controlplane.accounts.admin_config.FleetAdminConfig",  # django.contrib.admin with our site
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "controlplane.accounts",
    "controlplane.events",
    "controlplane.tuning",
    "controlplane.jobs",
    "controlplane.fleet",
    "controlplane.lengths",
    "controlplane.gateway",
    "controlplane.batches",
    "controlplane.applications",
    "controlplane.usage",
    "controlplane.planning",
    "controlplane.alerts",
    "controlplane.experiments",
    "controlplane.simulation",
    "controlplane.simulation.whatif",
    "controlplane.api",
    "controlplane.console",
]

# The console's stack. `/v1` never passes through it: `controlplane/asgi.py` hands those requests to the gateway first.
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.gzip.GZipMiddleware",  # CSRF tokens are masked differently in each answer, with random padding
    "controlplane.console.middleware.content_security_policy",
    "controlplane.console.middleware.refuse_nul",
    "controlplane.console.middleware.DatabaseOutage",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "controlplane.console.context.console",
            ],
        },
    },
]

DATABASES = {"default": env.database(environment.DATABASE_URL.get_secret_value(), STATE_DIR)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = env.redis_url(environment.REDIS_URL.get_secret_value(), environment.REDIS_CA_FILE)
if not REDIS_URL:
    # The address of the Redis that `manage.py up` runs, for commands run alongside it.
    redis_url_file = STATE_DIR / "redis_url"
    REDIS_URL = redis_url_file.read_text() if redis_url_file.exists() else "redis://127.0.0.1:6379/0"

# Where commands find the console: its public address, else that of the stack that `manage.py up` runs here.
url_file = STATE_DIR / "url"
CONSOLE_URL = environment.PUBLIC_URL or (url_file.read_text() if url_file.exists() else "http://127.0.0.1:8000")

AUTH_USER_MODEL = "accounts.User"
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "console:sign-in"
LOGIN_REDIRECT_URL = "console:overview"
LOGOUT_REDIRECT_URL = "console:sign-in"

globals().update(env.mail_server(environment.EMAIL_URL.get_secret_value()))
DEFAULT_FROM_EMAIL = environment.EMAIL_FROM

# Single sign-on, where there is an issuer: allauth talks to it, `accounts/single_sign_on.py` says who gets in as what.
SINGLE_SIGN_ON = bool(environment.OIDC_ISSUER)
if SINGLE_SIGN_ON:
    if find_spec("allauth") is None:
        raise ImproperlyConfigured("PILOTHOUSE_OIDC_ISSUER needs the extra sso: pip install 'pilothouse[sso]'")
    OIDC_GROUP_ROLES = env.group_roles(environment.OIDC_ROLES)
    INSTALLED_APPS += ["allauth", "allauth.account", "allauth.socialaccount"]
    INSTALLED_APPS += ["allauth.socialaccount.providers.openid_connect"]
    MIDDLEWARE += ["allauth.account.middleware.AccountMiddleware"]
    SOCIALACCOUNT_ADAPTER = "controlplane.accounts.single_sign_on.Adapter"
    SOCIALACCOUNT_LOGIN_ON_GET = True  # a link: browsers hold a form's redirects to `form-action`
    SOCIALACCOUNT_OPENID_CONNECT_URL_PREFIX = ""
    ACCOUNT_DEFAULT_HTTP_PROTOCOL = "https" if environment.HTTPS else "http"
    SOCIALACCOUNT_PROVIDERS = {
        "openid_connect": {
            "OAUTH_PKCE_ENABLED": True,
            "SCOPE": environment.OIDC_SCOPES,
            "APPS": [
                {
                    "provider_id": "oidc",
                    "name": environment.OIDC_NAME,
                    "client_id": environment.OIDC_CLIENT_ID,
                    "secret": environment.OIDC_CLIENT_SECRET.get_secret_value(),
                    "settings": {"server_url": environment.OIDC_ISSUER.rstrip("/")},
                }
            ],
        }
    }

LANGUAGE_CODE = "en-us"
USE_I18N = False
USE_TZ = True
FORMAT_MODULE_PATH = "controlplane.formats"

STATIC_URL = "/static/"
STATIC_ROOT = STATE_DIR / "static"
STATICFILES_DIRS: list[Path | tuple[str, Path]] = [BASE_DIR / "static"]
if (_ninja := find_spec("ninja")) is not None and _ninja.origin:
    STATICFILES_DIRS.append(("ninja", Path(_ninja.origin).parent / "static" / "ninja"))
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.FileSystemFinder",
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
    "controlplane.console.finders.PlotlyFinder",
]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "files": env.file_storage(environment.FILES_URL, STATE_DIR),
    "staticfiles": {
        "BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"
        if environment.DEBUG
        else "controlplane.console.storage.HashedStaticFilesStorage"
    },
}

# Security. Names follow Django 6, where the policy middleware is built in.
SECURE_CSP = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "style-src-attr": "'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "connect-src": "'self'",
    "font-src": "'self'",
    "form-action": "'self'",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
}
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = environment.HTTPS
SECURE_HSTS_SECONDS = 31_536_000 if environment.HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = environment.HTTPS
if environment.HTTPS:  # a proxy ends TLS, and always sets the header
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
SESSION_COOKIE_HTTPONLY = True
CSRF_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = 12 * 3600
CSRF_FAILURE_VIEW = "controlplane.console.pages.errors.views.forged"
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"

# Celery. Progress and results are stored in our rows.
CHANNEL_LAYERS = {
    "default": {"BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer", "CONFIG": {"hosts": [REDIS_URL]}},
}

CELERY_BROKER_URL = REDIS_URL
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_TIME_LIMIT = 3600
CELERY_TASK_SOFT_TIME_LIMIT = 3300
CELERY_TASK_TRACK_STARTED = True
CELERY_TASK_DEFAULT_QUEUE = "control"
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_MAX_TASKS_PER_CHILD = 1000
CELERY_WORKER_MAX_MEMORY_PER_CHILD = 600_000  # KiB: memory left over from a training is freed after it
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT = 3
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None  # as long as it takes
# Running work continues while the broker is away: commands are rows, and what they start must not be interrupted.
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = False
CELERY_BEAT_SCHEDULER = "workers.beat:Scheduler"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TIMEZONE = "UTC"
# Static: the schedule is part of the release, not a row that can be lost (docs/adr/0009). Many of these tasks only check
# whether work is due (by the newest row), so a restart neither skips nor repeats it.
PERIODIC_TASKS: dict[str, tuple[str, float]] = {
    "fleet-tick": ("tick.tick", 5.0),
    "prune": ("pruning.prune", 60.0),
    "count-usage": ("usage.count_usage", 30.0),
    "follow-runs": ("applications.follow_runs", 10.0),
    "resume-batches": ("batches.resume", 30.0),
    "forecast-and-plan": ("planning.forecast_and_plan", 30.0),  # or more often: `controlplane.jobs.schedule.look_s`
    "project-fleet": ("planning.project_fleet", 120.0),
    "nightly-what-if": ("simulation.nightly_what_if", 60.0),
    "nightly-region-loss": ("simulation.nightly_region_loss", 60.0),
    "look-after-what-ifs": ("simulation.look_after_what_ifs", 10.0),
    "judge-twin": ("simulation.judge_twin", 60.0),
    "fit-forecasters": ("planning.fit_forecasters", 30.0),
    "train-length-model": ("lengths.train_length_model", 600.0),
    "judge-length-versions": ("lengths.judge_length_versions", 60.0),
}
"""Name of each periodic task: its function below `workers.tasks`, and its period in seconds."""
CELERY_BEAT_SCHEDULE: dict[str, dict[str, Any]] = {  # `expires`: messages must not pile up while no worker runs
    name: {"task": f"workers.tasks.{task}", "schedule": period_s, "options": {"expires": period_s}}
    for name, (task, period_s) in PERIODIC_TASKS.items()
}
LONG_TASKS = (
    *("planning.forecast_and_plan", "planning.fit_forecasters", "planning.project_fleet"),
    *("simulation.run_future", "simulation.nightly_what_if", "simulation.judge_twin"),
    *("simulation.plan_capacity", "simulation.nightly_region_loss"),
    "lengths.train_length_model",
)
CELERY_TASK_ROUTES = {f"workers.tasks.{task}": {"queue": "simulation"} for task in LONG_TASKS}

# The fleet.
HOST = environment.HOST or socket.gethostname()
VLLM_PYTHON = environment.VLLM_PYTHON
if not VLLM_PYTHON and (BASE_DIR / ".venv-vllm/bin/python").exists():
    VLLM_PYTHON = str(BASE_DIR / ".venv-vllm/bin/python")

# Tasks of several jobs, or that check whether work is due: each job is monitored, at its own period (`jobs.schedule`).
JOBS_WITHIN_TASKS = {
    "forecast-and-plan": ("forecasts", "plans"),
    "fleet-tick": (
        *(
            "run-pending-commands",
            "watch-loading",
            "end-failed",
            "advance-rollouts",
            "advance-swaps",
            "advance-maintenance",
            "observe-instances",
            "report-nodes",
            "watch-ray",
        ),
    ),
    "prune": ("prune-ledger", "prune-sign-ins", "prune-runs", "prune-planning", "prune-lengths"),
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "text": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
        "json": {"()": "controlplane.logs.JsonFormatter"},
    },
    "filters": {
        "service_errors": {"()": "controlplane.logs.ServiceErrors"},
        "refusals": {"()": "controlplane.logs.Refusals"},
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": environment.LOG_FORMAT,
            "filters": ["service_errors", "refusals"],
        }
    },
    "root": {"handlers": ["stderr"], "level": "WARNING"},
    "loggers": {
        "controlplane": {"level": "INFO"},
        "workers": {"level": "INFO"},
    },
}
