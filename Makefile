# `make demo` and `make test` set up what they need. They need python3 with venv, make and git.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP     = $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check --no-input
# Runs a command that takes more than a few seconds, and shows its progress.
SHOW    = $(PYTHON) tools/progress.py
# Several tests at a time, because tests wait more than they work.
PARALLEL ?= --numprocesses 8 --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help proton demo demo-fleet test check bench reference dashboards dashboard-pictures page-pictures bundle clean
# What the bundle can do beyond the agent itself.
EXTRAS ?= apprise,web

help:
	@echo 'make demo    see events arrive, start and finish'
	@echo 'make demo-fleet  200 VMs, an Event Hub and instances of `notbefore fleet` (KEEP=1: stay until Ctrl-C)'
	@echo "make test    all tests, with the coverage gates (ARGS='-k name': some, without them)"
	@echo 'make check   ruff, mypy, import directions'
	@echo 'make bench   measure what the documents claim'
	@echo 'make reference  the generated parts of docs/ and config/, from the code'
	@echo 'make dashboards  write dashboards/*.json (dashboard-pictures: draw them)'
	@echo "make page-pictures  draw the agent's page for docs/"
	@echo 'make bundle  one archive for VMs without a package index (EXTRAS=apprise,web)'
	@echo 'make clean   remove what these commands made'

# Packages from an index are checked by their hashes. The tools that build this package are pinned too.
$(VENV)/base: pyproject.toml constraints.txt
	@$(SHOW) 'creating the environment in $(VENV)' $(PYTHON) -m venv $(VENV)
	@$(PYTHON) tools/pins.py --for agent,build >$(VENV)/pins.txt
	@$(SHOW) 'installing what the agent needs (1 of 2, about a minute)' $(PIP) --require-hashes --requirement $(VENV)/pins.txt
	@$(SHOW) 'installing the agent' $(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/dev: $(VENV)/base
	@$(PYTHON) tools/pins.py --for dev,peers,build >$(VENV)/pins.txt
	@$(SHOW) 'installing what the tests need (2 of 2, some minutes)' $(PIP) --require-hashes --requirement $(VENV)/pins.txt
	@$(MAKE) --no-print-directory proton || echo 'Proton could not be built, so its tests are skipped. The reason: $(VENV)/proton.log'
	@touch $@

# Proton, the engine of the tests' Event Hub, has no wheel. It is built with this machine's compiler, or with
# a compiler from a wheel. The linker of the latter does not know all options of Debian's Python, hence LDSHARED.
# With -O1 the build takes a third of the time.
proton:
	@if command -v cc >/dev/null; then CC=cc; else \
		CC='env -u PYTHONPATH $(abspath $(BIN)/python) -m ziglang cc'; \
		export LDSHARED="$$CC -shared"; \
		$(PYTHON) tools/pins.py --for compiler >$(VENV)/pins.txt; \
		$(SHOW) 'installing a C compiler' $(PIP) --require-hashes --requirement $(VENV)/pins.txt; \
	fi; \
	$(PYTHON) tools/pins.py --for proton >$(VENV)/pins.txt; \
	CC="$$CC" CFLAGS=-O1 $(SHOW) --log $(VENV)/proton.log 'building Proton (about half a minute)' \
		$(PIP) --require-hashes --requirement $(VENV)/pins.txt

demo: $(VENV)/base
	@$(BIN)/notbefore demo

demo-fleet: $(VENV)/dev
	@PYTHONPATH=tests $(BIN)/python -m support.demo_fleet $(if $(KEEP),--keep)

# Compile the tests once. Otherwise each of the processes that run them compiles them.
$(VENV)/compiled: $(VENV)/dev
	@$(BIN)/python -m compileall -q src
	@PYTHONDONTWRITEBYTECODE= $(SHOW) --log $(VENV)/compiled.log 'compiling the tests' $(BIN)/pytest --collect-only --quiet || true
	@touch $@

# Some of the tests, without coverage.
ifdef ARGS
test: $(VENV)/compiled
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest $(PARALLEL) $(ARGS)
else
test: $(VENV)/compiled
	@$(BIN)/coverage erase
	@rm -f $(VENV)/not-seen
	PYTHONDONTWRITEBYTECODE= NOT_SEEN=$(VENV)/not-seen $(BIN)/coverage run -m pytest $(PARALLEL)
	@$(SHOW) 'combining the coverage of all processes' $(BIN)/coverage combine --quiet
	@if [ -e $(VENV)/not-seen ]; then echo 'The coverage was not checked: it counts only if no test is skipped.'; else \
		$(BIN)/coverage report --include='src/notbefore/core/*,src/notbefore/metrics/*,src/notbefore/wording/*' --fail-under=100 && \
		$(BIN)/coverage report --fail-under=95; fi
endif

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest --quiet tests/unit/test_imports.py

bench: $(VENV)/dev
	@failed=0; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file || failed=1; done; exit $$failed

reference: $(VENV)/dev
	@$(BIN)/python tools/reference.py

dashboards: $(VENV)/dev
	PYTHONPATH=dashboards/src $(BIN)/python -m boards

# On demand: this needs npm, chromium, prometheus and some minutes.
dashboard-pictures: dashboards
	PYTHONPATH=tests $(BIN)/python dashboards/pictures/render.py docs/pictures

# On demand: this needs chromium.
page-pictures: $(VENV)/dev
	PYTHONPATH=tests $(BIN)/python tools/page_pictures.py docs/pictures

bundle: $(VENV)/dev
	@EXTRAS='$(EXTRAS)' BIN=$(abspath $(BIN)) tools/bundle.sh dist

clean:
	rm -rf $(VENV) dist .coverage* .hypothesis .mypy_cache .ruff_cache .pytest_cache
