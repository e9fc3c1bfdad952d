"""Settings of the test run: its own state folder and key, whatever the developer's environment says."""

import os
import sys
import tempfile

# Several test processes share few cores. Threads of torch and of matrix products wait for one another in loops that compute
# nothing: with two of them in each process a small model took many times as much processor time to fit as with one.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# As in the Makefile: each process, and each that it starts, would compile all modules and rewrite the asserts of all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
for name in [name for name in os.environ if name.startswith("PILOTHOUSE_")]:
    del os.environ[name]
if "DATABASE_URL" not in os.environ:
    os.environ["DATABASE_URL"] = ""
os.environ["PILOTHOUSE_SECRET_KEY"] = "a key for tests, long enough and with enough different characters 0123456789"
os.environ["REDIS_URL"] = "redis://127.0.0.1:1/0"  # nobody listens: tests that want Redis start their own
os.environ["PILOTHOUSE_STATE_DIR"] = tempfile.mkdtemp(prefix="pilothouse-tests-")

from controlplane.settings import *  # noqa: E402, F403
from controlplane.settings import DATABASES, STATE_DIR, STORAGES  # noqa: E402

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STORAGES["staticfiles"] = {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
# A file, so that a server thread sees what the test wrote.
DATABASES["default"].setdefault("TEST", {"NAME": str(STATE_DIR / "test.sqlite3")})
(STATE_DIR / "static").mkdir()
VLLM_PYTHON = ""  # tests of real vLLM give one: its parser alone takes seconds

CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}
