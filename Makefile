# Two commands for a newcomer: `make train` and `make test`. The work is done by tools/ and CMake.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: test-shim help setup train train-cpp train-offload test test-all test-part test-quick attributions bench \
  format clean fuzz
export NINJA_STATUS := [%f/%t %es]

# Who starts the ranks of `make train`: zeroth-run, or mpirun.
LAUNCHER ?= zeroth-run

# Compilers at a time: a file that includes torch takes up to 1.5 GB, and CMake holds those to what the memory allows.
JOBS ?= $(shell nproc)
BUILD = cmake --build build/$(1) -j $(JOBS)
# `make format` takes our own files only.
SOURCES = $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' '*.inl')

help:
	@echo "make train       prepare the machine, build, train a GPT with ZeRO-3 on 2 ranks (about 3 minutes);"
	@echo "                 pictures in build/train; LAUNCHER=mpirun starts the ranks with mpirun"
	@echo "make train-cpp   the same with the trainer in C++"
	@echo "make train-offload  the same model under a cap of memory, its optimizer in files: the same losses"
	@echo "make test        prepare the machine, build, run the tests; a part of the core also under a sanitizer"
	@echo "make test-quick  the unit tests of the core, without torch"
	@echo "make test-all    every test, also the long ones, and the core under both sanitizers; says how long it takes"
	@echo "make test-part   one twentieth of the long tests, by the number of commits"
	@echo "make attributions  500 faults drawn from seeds; every rank must name the guilty one; 2 minutes"
	@echo "make test-shim   the tests of the Python package with a shim under the address sanitizer"
	@echo "make fuzz        the fuzz targets, a minute each; needs clang"
	@echo "make bench       the benchmarks; about 50 minutes; results in build/release/benchmarks/results"
	@echo "make format      clang-format and ruff on all sources; make test holds what they write"
	@echo "make clean       remove the builds; the virtual environment stays"

setup:
	@tools/setup

# A preset is configured once; after that ninja itself sees which CMake files changed.
build/%/build.ninja: CMakePresets.json tools/requirements.txt | setup
	cmake --preset $*
	@touch $@

train: setup build/release/build.ninja
	@$(call BUILD,release) --target zeroth-run zeroth_python
	@tools/train-main --launcher $(LAUNCHER)

train-cpp: setup build/release/build.ninja
	@$(call BUILD,release) --target zeroth-run zeroth-gpt
	@tools/train-main --cpp --launcher $(LAUNCHER)

# A cap of memory that the states exceed: the optimizer's rest in files.
train-offload: setup build/release/build.ninja
	@$(call BUILD,release) --target zeroth-run zeroth_python
	@tools/train-offload

test: setup
	@tools/test test --jobs $(JOBS)

test-all: setup
	@tools/test all --jobs $(JOBS)

# One twentieth of the long tier, by the number of commits.
test-part: setup
	@tools/test part --jobs $(JOBS)

test-quick: export ZEROTH_SETUP_CORE := 1
test-quick: setup
	@tools/test quick --jobs $(JOBS)

attributions: export ZEROTH_SETUP_CORE := 1
attributions: setup build/core/build.ninja
	$(call BUILD,core) --target attribution_test
	build/core/tests/process/attribution_test --gtest_filter='Long*'

test-shim: setup build/release/build.ninja build/asan-shim/build.ninja
	$(call BUILD,release) --target zeroth-run
	$(call BUILD,asan-shim) --target zeroth_python
	tools/test-shim $(CURDIR)/build/asan-shim

fuzz: export ZEROTH_SETUP_CORE := 1
fuzz: export ZEROTH_SETUP_FUZZ := 1
fuzz: setup build/fuzz/build.ninja
	$(call BUILD,fuzz) --target fuzz_targets
	tools/fuzz build/fuzz

bench: setup build/release/build.ninja
	$(call BUILD,release)
	$(call BUILD,release) --target benchmarks
	benchmarks/run.py --build build/release

format: setup
	build/venv/bin/clang-format -i $(SOURCES)
	build/venv/bin/ruff check --no-cache --fix --quiet .
	build/venv/bin/ruff format --no-cache .

clean:
	[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name venv -exec rm -rf {} +
