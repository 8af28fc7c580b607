# Set-up, demo and tests. Python 3.11 or newer is all that must be there; see .ci/make-venv.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Arguments for `kvd demo`, `kvd bench` and pytest: make demo ARGS="--config transport=tcp"
ARGS ?=

.PHONY: help venv demo bench lint test chaos fuzz mutate-safety clean distclean

help:
	@echo "make demo    two vLLM engines hand over KV through two daemons"
	@echo "make test    lint, types, import rules and all tests"
	@echo "make chaos   faults at random against real daemons (SECONDS=600 SEED=n)"
	@echo "make fuzz    hostile input at every port of a real daemon (SECONDS=600 SEED=n)"
	@echo "make mutate-safety  removes each safety guard once; its test must see it"
	@echo "make bench   measure transfers on this machine"
	@echo "make lint    lint, types and import rules only"
	@echo "make venv    only the set-up that all of these begin with"
	@echo "make clean   remove caches and build results (distclean: $(VENV) too)"

venv: $(STAMP)

$(STAMP): pyproject.toml Makefile .ci/make-venv
	VENV="$(VENV)" PYTHON="$(PYTHON)" sh .ci/make-venv
	@touch $@

demo: venv
	$(BIN)/kvd demo $(ARGS)

bench: venv
	$(BIN)/kvd bench $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: lint
	$(BIN)/python -m pytest $(ARGS)

# The least that makes a run worth something: 100 transfers in 3 s, a fault of a process in 3 s.
SECONDS ?= 60
SEED ?=
chaos: venv
	$(BIN)/python -m tests.chaos.driver --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) --logs \
		--transfers $$(($(SECONDS) * 100 / 3)) --faults $$(($(SECONDS) / 3)) \
		--hits $$(($(SECONDS) * 5 / 6)) $(ARGS)

fuzz: venv
	$(BIN)/python -m tests.hostile.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

mutate-safety: venv
	$(BIN)/python -m tests.chaos.mutants $(ARGS)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find kvd connector_shim tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf "$(VENV)"
