# `make demo` and `make test` do their own set-up: python3 with venv, make and git are all they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
# several tests at a time: they wait more than they work
PARALLEL ?= --numprocesses 8 --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help proton demo demo-fleet test check bench reference dashboards dashboard-pictures bundle clean
# what the bundle can do beyond the agent itself
EXTRAS ?= apprise,web

help:
	@echo 'make demo    see events arrive, start and finish'
	@echo 'make demo-fleet  200 VMs, an Event Hub and instances of `notbefore fleet` (KEEP=1: stay until Ctrl-C)'
	@echo "make test    all tests, with the coverage gates (ARGS='-k name': some, without them)"
	@echo 'make check   ruff, mypy, import directions'
	@echo 'make bench   the figures that are claimed'
	@echo 'make reference  docs/configuration.md, messages.md, metrics.md and record.md, from the code'
	@echo 'make dashboards  write dashboards/*.json anew (dashboard-pictures: draw them)'
	@echo 'make bundle  one archive for VMs without a package index (EXTRAS=apprise,web)'
	@echo 'make clean   remove what these made'

# what is installed from an index is known by its hash; the package itself is built with what is pinned as well
$(VENV)/base: pyproject.toml constraints.txt
	@echo 'making the environment in $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)
	@$(PYTHON) tools/pins.py --for agent,build >$(VENV)/pins.txt
	@$(PIP) --require-hashes --requirement $(VENV)/pins.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/dev: $(VENV)/base
	@echo 'adding what the tests need ...'
	@$(PYTHON) tools/pins.py --for dev,peers,build >$(VENV)/pins.txt
	@$(PIP) --require-hashes --requirement $(VENV)/pins.txt
	@$(MAKE) --no-print-directory proton || echo 'Proton could not be built (its tests are skipped): $(VENV)/proton.log says why'
	@touch $@

# the engine of the Event Hub has no wheel: it is built with this machine's compiler, or with one that is a wheel, whose linker
# does not know all that Debian's Python asks for (LDSHARED); with -O1 in a third of the time
proton:
	@if command -v cc >/dev/null; then CC=cc; else \
		echo 'adding a C compiler ...'; \
		CC='env -u PYTHONPATH $(abspath $(BIN)/python) -m ziglang cc'; \
		export LDSHARED="$$CC -shared"; \
		$(PYTHON) tools/pins.py --for compiler >$(VENV)/pins.txt; \
		$(PIP) --require-hashes --requirement $(VENV)/pins.txt; \
	fi; \
	echo 'building Proton ...'; \
	$(PYTHON) tools/pins.py --for proton >$(VENV)/pins.txt; \
	CC="$$CC" CFLAGS=-O1 $(PIP) --require-hashes --requirement $(VENV)/pins.txt >$(VENV)/proton.log 2>&1

demo: $(VENV)/base
	@$(BIN)/notbefore demo

demo-fleet: $(VENV)/dev
	@PYTHONPATH=tests $(BIN)/python -m support.demo_fleet $(if $(KEEP),--keep)

# the tests as bytecode, once: else each of the processes that run them makes it
$(VENV)/compiled: $(VENV)/dev
	@$(BIN)/python -m compileall -q src
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only --quiet >/dev/null || true
	@touch $@

# some of them: nothing is measured
ifdef ARGS
test: $(VENV)/compiled
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest $(PARALLEL) $(ARGS)
else
test: $(VENV)/compiled
	@$(BIN)/coverage erase
	@rm -f $(VENV)/not-seen
	PYTHONDONTWRITEBYTECODE= NOT_SEEN=$(VENV)/not-seen $(BIN)/coverage run -m pytest $(PARALLEL)
	@$(BIN)/coverage combine --quiet
	@if [ -e $(VENV)/not-seen ]; then echo 'The coverage gates are for a run in which nothing is skipped.'; else \
		$(BIN)/coverage report --include='src/notbefore/core/*,src/notbefore/metrics/*' --fail-under=100 && \
		$(BIN)/coverage report --fail-under=95; fi
endif

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest --quiet tests/unit/test_imports.py

bench: $(VENV)/dev
	@missed=0; for b in benchmarks/[a-z]*.py; do echo "== $$b"; $(BIN)/python $$b || missed=1; done; exit $$missed

reference: $(VENV)/base
	@$(BIN)/python tools/reference.py

dashboards: $(VENV)/dev
	PYTHONPATH=dashboards/src $(BIN)/python -m boards

# on demand: needs npm, chromium and prometheus, and some minutes
dashboard-pictures: dashboards
	PYTHONPATH=tests $(BIN)/python dashboards/pictures/render.py docs/pictures

bundle: $(VENV)/dev
	@EXTRAS='$(EXTRAS)' BIN=$(abspath $(BIN)) tools/bundle.sh dist

clean:
	rm -rf $(VENV) dist .coverage* .hypothesis .mypy_cache .ruff_cache .pytest_cache
