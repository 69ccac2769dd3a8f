# The two commands that matter: `make demo` (raw flights -> trained, tracked model) and `make test`.
# Both set everything up first; a second time that takes seconds. Variables of `setup`: see .ci/setup.sh.
SHELL := /bin/bash
BIN := .venv/bin
export MLFLOW_DISABLE_TELEMETRY := true
export NO_MKDOCS_2_WARNING := 1
unexport PYTHONDONTWRITEBYTECODE  # each command and each rank would compile our files again
ARGS ?=
JOBS ?= 2

.PHONY: help setup check format test test-slow test-gpu fuzz mutants demo ui peers arena compare matrix nights pages users airflow docs lock package clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.venv/.ready: requirements.lock pyproject.toml $(wildcard .ci/*)
	@.ci/setup.sh

setup: .venv/.ready  ## environment, Java, Horovod (GPU=1 for NCCL)

mutants: setup  ## one-line changes, each of which a test must notice; keeps the verdicts in tests/mutants (ARGS=--missing: new ones)
	@$(BIN)/python -m tests.mutants.run --write $(ARGS)

demo: setup  ## the main job on real data: flights, two ranks, Horovod ring, MLflow, report (ARGS="key=value ...")
	@$(BIN)/python -m sparkring.etl.raw flights
	@$(BIN)/sparkring run flights $(ARGS)

ui: setup  ## browse runs, checkpoints, models and reports at http://127.0.0.1:5000
	@$(BIN)/sparkring ui

test: setup  ## everything but the long soaks, two files at a time (JOBS=0: one after the other, here)
	@$(BIN)/pytest -q -m "not slow" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: setup  ## the long ones
	@$(BIN)/pytest -q -m slow $(ARGS)

test-gpu: setup  ## the tests that need a GPU, and tests/ranks on GPUs, which the others hide from themselves
	@SPARKRING_TEST_GPU=1 $(BIN)/pytest -q -m gpu $(ARGS)

fuzz: setup  ## 100,000 damaged files and frames; rewrites benchmarks/results/fuzz.json (minutes)
	@$(BIN)/python -m tests.fuzz.run --count 100000 --out benchmarks/results/fuzz.json

check: setup  ## lint, format, types, import contracts, links of the pages; lists results older than the code they measure
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m mkdocs build --strict
	@$(BIN)/python benchmarks/stale.py

docs: setup  ## the pages and the generated reference as a site that needs no server: build/site/index.html
	@$(BIN)/python -m mkdocs build --strict

format: setup  ## rewrite to the house style
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

package: setup  ## the code archive a cluster needs: dist/sparkring.zip
	@$(BIN)/sparkring package

peers:  ## the other readers benchmarks/data_readers.py measures, in an environment of their own: build/peers
	@$(BIN)/python -m venv build/peers
	@build/peers/bin/pip install --quiet --no-deps -r benchmarks/peers.txt

arena: setup  ## twenty tables as `init` trains them beside LightGBM, XGBoost, CatBoost with their defaults (an hour)
	@test -x build/arena/bin/python || $(BIN)/python -m venv build/arena
	@build/arena/bin/pip install --quiet --no-deps -r benchmarks/arena.txt
	@$(BIN)/python benchmarks/arena.py --out benchmarks/results/arena_2core_202611.md $(ARGS)

nights: setup  ## sixty nights of flights in one go, a command each, with a correction and gc (an hour)
	@$(BIN)/python benchmarks/nights.py --out benchmarks/results/nights_2core_202611.md $(ARGS)

pages: setup  ## MLflow's pages of 365 nights in a headless browser: seconds, screenshots (needs a chromium on PATH; minutes)
	@$(BIN)/python benchmarks/night_pages.py --pictures docs/pictures --out benchmarks/results/night_pages_2core_202611.md $(ARGS)

compare: setup  ## forms of training beside the ring on Fashion-MNIST, with a slow rank and without (an hour)
	@$(BIN)/python benchmarks/compare.py --picture docs/pictures/compare.png --out benchmarks/results/compare_2core_202611.md $(ARGS)

users: setup  ## a new user's first hour: five problems from `init` to `serve-check`, by the printed commands (minutes)
	@$(BIN)/python benchmarks/new_user.py --out benchmarks/results/new_user_2core_202611.md $(ARGS)

matrix: setup  ## flights on Spark 3.5 to 4.3, classic and Connect: equal bytes? (versions in build/matrix; half an hour)
	@$(BIN)/python benchmarks/matrix.py --out benchmarks/results/matrix_2core_202611.md $(ARGS)

airflow: setup  ## the example DAG in a real Airflow, in an environment of its own: two dates and a backfill (minutes)
	@$(BIN)/python -m venv build/airflow
	@build/airflow/bin/pip install --quiet -r examples/schedulers/airflow.txt
	@$(BIN)/python benchmarks/airflow_nights.py --out benchmarks/results/airflow_2core_202611.md

lock:  ## resolve requirements.lock anew from pyproject.toml
	@python3.11 -m venv .venv-lock && .venv-lock/bin/pip install -q pip-tools
	@CUSTOM_COMPILE_COMMAND="make lock" .venv-lock/bin/pip-compile -q --upgrade --extra dev --generate-hashes \
	    --allow-unsafe --unsafe-package torch --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	    --strip-extras -o requirements.lock pyproject.toml
	@sed -i '/^torch==/,$$d; /^# The following packages are considered/d' requirements.lock
	@rm -rf .venv-lock

clean:  ## everything made here, the user's cache excepted
	rm -rf .venv data build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
