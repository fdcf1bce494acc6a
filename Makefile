# Every target works on a fresh clone: what it needs (.venv, the package) is made first.
PYTHON ?= python3
VENV ?= .venv
ROUNDS ?= 1000
SEED ?= 1

# Tests start hundreds of Python processes, and each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The demo uses the environment of the tests if there is one, else a smaller one of its own.
DEMO := $(or $(wildcard $(READY)),.venv-demo/.ready)
NATIVE := $(wildcard native/src/*/*.[ch] native/python/*.[ch] native/xxhash.sh setup.py)
C_SOURCES := $(wildcard native/src/*/*.[ch] native/python/*.[ch] tests/native/*.[ch] tests/crash/*.[ch] \
	tests/standin/*.[ch] tests/arm64/*.c bench/*.[ch] examples/*.c)
PYTHON_SOURCES := client pccheckd native/pccheck_native tests bench examples docs setup.py
PACKAGES := -p pccheck -p pccheck_process -p pccheck_store -p pccheck_wire -p pccheckctl -p pccheckd -p pccheck_native

.DEFAULT_GOAL := help
.PHONY: help venv build test pytest lint format native sanitize wheels demo examples bench resume-check crash campaign \
	handler-campaign memory-campaign nodes-campaign nodes-search resume-campaign figures gpu-campaign last-step-campaign rank-step-campaign sharded-campaign process-campaign guest arm64-check hosts-campaign nodes-check etcd-check mpi-check slurm-check kubernetes-check transparent-check \
	faults fuzz reference gpu-probe gpu-pack gpu-check gpu-bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --no-build-isolation builds with the pinned setuptools instead of whatever is newest. What finds an
# editable package with setuptools takes half of Python's own start, which paths do not.
$(READY): EXTRAS := torch,dev
.venv-demo/.ready: EXTRAS := torch
%/.ready: constraints.txt pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' || \
		{ echo 'Python 3.11 or newer with venv is needed (Debian: apt-get install python3-venv)'; exit 1; }
	@native/xxhash.sh 2>/dev/null || true
	test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/python -m pip install -q -c constraints.txt setuptools
	@$*/bin/python setup.py -q needed
	$*/bin/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@cd "$$($*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
		rm -f __editable__.pccheck-* && printf '%s\n' '$(CURDIR)/client' '$(CURDIR)/native' '$(CURDIR)' >pccheck.pth
	@touch $@

venv: $(READY) ## makes .venv with the pinned versions and the package in it (editable)

build: ## compiles the C core again
	@rm -rf build $(READY)
	@$(MAKE) --no-print-directory $(READY)

test: $(READY) ## everything at once: lint, the C tests, and pytest with the crash states and kills
	@$(MAKE) --no-print-directory -j3 JOBS= lint native pytest

# More than the CPUs of a small machine: tests also wait for disks and for processes.
WORKERS ?= 7
pytest: $(READY) ## all tests in Python, WORKERS (7) at a time
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Older subjects may be longer.
SUBJECTS_FROM := b91af317
lint: $(READY) ## ruff, mypy --strict, the layers, clang-format, commit subjects
	$(BIN)/ruff check -q $(PYTHON_SOURCES)
	$(BIN)/ruff format -q --check $(PYTHON_SOURCES)
	$(BIN)/mypy $(PACKAGES) -p bench -p examples
	$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache
	@$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	@git log --no-merges --format=%s $(SUBJECTS_FROM)..HEAD 2>/dev/null | awk '/^[a-z0-9_., -]+: ./ && length <= 65 {next} \
		{print "commit subject (area: what, at most 65 letters): " $$0; bad = 1} END {exit bad}'

format: $(READY) ## formats Python and C in place
	$(BIN)/ruff check -q --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format -q $(PYTHON_SOURCES)
	$(BIN)/clang-format -i $(C_SOURCES)

JOBS ?= -j2
native: ## the C core's own tests
	@$(MAKE) --no-print-directory $(JOBS) -C tests/native all
	$(MAKE) --no-print-directory -C tests/native run

sanitize: ## the C core's own tests under AddressSanitizer and UBSan, then under ThreadSanitizer
	$(MAKE) --no-print-directory -C tests/native asan
	$(MAKE) --no-print-directory -C tests/native tsan

crash: ## crash images, rot, faults and mutants against the C core (also part of test)
	$(MAKE) --no-print-directory -C tests/crash run

campaign: $(READY) ## kills daemon, trainer and groups of ranks ROUNDS times (default 1000), with SEED
	$(BIN)/python -m tests.integration.kill_campaign --rounds $(ROUNDS) --seed $(SEED)
	$(BIN)/python -m tests.integration.restart_campaign --rounds $(ROUNDS) --seed $(SEED)
	$(BIN)/python -m tests.integration.group_campaign --rounds $(ROUNDS) --seed $(SEED)

EVERY ?= 1
memory-campaign: ROUNDS = 200
memory-campaign: $(READY) ## kills trainers and daemons beside checkpoints in memory only, ROUNDS times (default 200)
	$(BIN)/python -m tests.integration.memory_campaign --rounds $(ROUNDS) --seed $(SEED)

handler-campaign: $(READY) ## calls in signal handlers before each EVERY-th (default 1) instruction of other calls
	$(BIN)/python -m tests.integration.handler_campaign --every $(EVERY) --seed $(SEED)

nodes-campaign: ROUNDS = 300
nodes-campaign: $(READY) ## kills ranks, daemons and the store of jobs on several nodes, ROUNDS times (default 300), with SEED
	$(BIN)/python -m tests.integration.nodes_campaign --rounds $(ROUNDS) --seed $(SEED)
	$(BIN)/python -m tests.integration.nodes_campaign --rounds $(ROUNDS) --seed $(SEED) --elsewhere

WALKS ?= 2000
nodes-search: $(READY) ## every state of small jobs on several nodes, around the rules; WALKS (2000) through larger ones, with SEED
	$(BIN)/python -m tests.integration.nodes_search_campaign --walks $(WALKS) --seed $(SEED)

KILLS ?= 3
resume-campaign: $(READY) ## 30 trainings of HF, Lightning, Accelerate, DeepSpeed and own loops, each killed KILLS (3) times
	$(BIN)/python -m tests.integration.resume_campaign --kills $(KILLS) --seed $(SEED)

sharded-campaign: ROUNDS = 20
sharded-campaign: $(READY) ## kills FSDP2 jobs that restart with 4, 2 and 1 ranks, ROUNDS times (default 20)
	$(BIN)/python -m tests.integration.sharded_campaign --rounds $(ROUNDS) --seed $(SEED)

process-campaign: ROUNDS = 200
process-campaign: $(READY) ## as root: kills around snapshots of processes, ROUNDS times (default 200), with SEED
	$(BIN)/python -m tests.integration.process_campaign --rounds $(ROUNDS) --seed $(SEED)

last-step-campaign: ROUNDS = 200
last-step-campaign: $(READY) ## deaths of trainers whose last step is on the GPU only, ROUNDS times (default 200)
	$(BIN)/python -m tests.integration.last_step_campaign --rounds $(ROUNDS) --seed $(SEED)

rank-step-campaign: ROUNDS = 200
rank-step-campaign: $(READY) ## deaths of a rank whose last step another rank has on its GPU, too, ROUNDS times (default 200)
	$(BIN)/python -m tests.integration.rank_step_campaign --rounds $(ROUNDS) --seed $(SEED)

gpu-campaign: ROUNDS = 500
gpu-campaign: $(READY) ## kills and faults of the GPU driver's stand-in, ROUNDS times (default 500)
	$(BIN)/python -m tests.integration.gpu_campaign --rounds $(ROUNDS) --seed $(SEED)
	$(BIN)/python -m tests.integration.gpu_restart_campaign --rounds $(ROUNDS) --seed $(SEED)

guest: $(READY) ## systemd, DAX, power cuts: virtual machines, see CONTRIBUTING.md
	$(BIN)/python -m tests.guest --seed $(SEED) $(SCENARIO)

arm64-check: $(READY) ## as root: the C tests and TESTS on emulated arm64 processors, see CONTRIBUTING.md
	$(BIN)/python -m tests.arm64 $(TESTS)

hosts-campaign: ROUNDS = 20
hosts-campaign: $(READY) ## as root: cuts, kills and slows jobs on hosts of our own, ROUNDS times (default 20), with SEED
	$(BIN)/python -m tests.nodes.campaign --rounds $(ROUNDS) --seed $(SEED)
	$(BIN)/python -m tests.nodes.travels --rounds $(ROUNDS) --seed $(SEED)

nodes-check: $(READY) ## as root: jobs on several hosts of our own; SCENARIO=worker runs one
	$(BIN)/python -m tests.nodes $(SCENARIO)

MPI_PACKAGES := openmpi-bin libopenmpi3 libpmix2 libhwloc15 libhwloc-plugins libevent-core-2.1-7 \
	libevent-pthreads-2.1-7 libmunge2 libucx0 libfabric1 libpsm2-2 libpsm-infinipath1 libxnvctrl0 \
	ocl-icd-libopencl1 openmpi-common
.mpi/usr/bin/mpirun.openmpi:
	mkdir -p .mpi && cd .mpi && apt-get -q download $(MPI_PACKAGES) && \
	  for package in *.deb; do dpkg -x $$package .; done

mpi-check: $(READY) .mpi/usr/bin/mpirun.openmpi ## as root: the same with mpirun, of Debian's Open MPI, unpacked into .mpi
	PCC_MPI=$(abspath .mpi/usr) $(BIN)/python -m tests.nodes mpirun

SLURM_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 \
	liblua5.1-0 libdbus-1-3 libyaml-0-2 libnuma1 liblz4-1 libjson-c5 libpam0g libreadline8
.slurm/usr/sbin/slurmctld-wlm:
	mkdir -p .slurm && cd .slurm && apt-get -q download $(SLURM_PACKAGES) && for one in *.deb; do dpkg -x $$one .; done

slurm-check: $(READY) .slurm/usr/sbin/slurmctld-wlm ## as root: deploy/slurm with Debian's Slurm, unpacked into .slurm
	PCC_SLURM=$(abspath .slurm) $(BIN)/python -m tests.nodes slurm slurm-own-daemon

.kubernetes/bin/kubernetes-validate:
	$(PYTHON) -m venv .kubernetes && .kubernetes/bin/python -m pip install -q kubernetes-validate==1.37.0

kubernetes-check: .kubernetes/bin/kubernetes-validate ## deploy/kubernetes against the schemas of Kubernetes
	.kubernetes/bin/kubernetes-validate --strict deploy/kubernetes/*.yaml

.criu/bin/criu: | $(READY)
	$(BIN)/python -m tests.support.criu

CRIU ?= .criu/bin/criu
transparent-check: $(READY) $(CRIU) ## as root: snapshots of unmodified programs with the criu at CRIU, by default Debian's, unpacked into .criu
	$(BIN)/python -m tests.transparent --criu $(abspath $(CRIU)) --seed $(SEED) $(TARGET)

ETCD ?= .etcd/usr/bin/etcd
.etcd/usr/bin/etcd:
	mkdir -p .etcd && cd .etcd && apt-get -q download etcd-server && dpkg -x etcd-server_*.deb .

etcd-check: $(READY) $(ETCD) ## the carrier and a job with the etcd at ETCD, by default Debian's, unpacked into .etcd
	PCC_ETCD=$(abspath $(ETCD)) $(BIN)/python -m pytest tests/unit/pccheckd/nodes/carriers/test_etcd.py \
	  tests/integration/test_nodes.py -k etcd

CASES ?= 144
faults: $(READY) ## as root: CASES (default 144) of a device that fails under ext4 and xfs, with SEED
	$(BIN)/python -m tests.integration.fault_campaign --cases $(CASES) --seed $(SEED)

DECODED ?= 3000000
PACKETS ?= 100000
EXAMPLES ?= 400
QUESTIONS ?= 10000
fuzz: $(READY) ## DECODED mutated messages, PACKETS for a daemon, EXAMPLES of 25 random steps against an oracle, QUESTIONS for a peer server
	$(BIN)/python -m tests.integration.fuzz_campaign --decoded $(DECODED) --packets $(PACKETS) --seed $(SEED)
	PCC_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest --timeout 0 tests/integration/test_stateful.py
	PCC_FUZZ_ROUNDS=$(QUESTIONS) $(BIN)/python -m pytest --timeout 0 tests/unit/pccheckd/peer -k no_question

reference: $(READY) ## writes docs and man pages from the table of options
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/man/make.py

wheels: $(READY) ## wheels for x86-64 and arm64 in dist/: proved, and one installed where no compiler is
	$(BIN)/python -m pip install -q -c constraints.txt auditwheel ziglang
	PYTHON=$(abspath $(BIN))/python native/wheels.sh
	$(BIN)/python -m tests.wheels

demo: $(DEMO) ## what checkpoints cost; then a killed run resumes; every loss is compared, bit for bit
	$(<D)/bin/python -m examples.demo

examples: $(READY) ## runs every script in examples/, kills it, and checks that it resumes
	$(BIN)/python -m tests.smoke.examples

# Without network there are no pictures.
PLOTS = -$(BIN)/python -m pip install -q -c constraints.txt 'matplotlib>=3.8'

resume-check: $(READY) ## three loss curves, one of a killed run, for fp32, bf16, DDP, FSDP2 and Hugging Face
	$(PLOTS)
	$(BIN)/python -m bench.resume_check

bench: $(READY) ## the figures of docs/performance.md without the paper's; results go to bench/results/
	$(BIN)/python -m bench.persist
	$(BIN)/python -m bench.core
	$(BIN)/python -m bench.call_overhead
	$(BIN)/python -m bench.recover
	$(BIN)/python -m bench.first
	$(BIN)/python -m bench.startup
	$(BIN)/python -m bench.growth
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.observability
	$(BIN)/python -m bench.ranks
	$(BIN)/python -m bench.sessions
	$(BIN)/python -m bench.nodes

TRACE ?=
figures: $(READY) ## as root: the paper's figures with its rivals, in two hours (QUICK=1: 15 minutes); TRACE=FILE for Figure 9
	$(PLOTS)
	-$(BIN)/python -m pip install -q -c constraints.txt torchsnapshot
	$(BIN)/python -m bench.figures $(if $(QUICK),--quick) $(if $(TRACE),--trace $(TRACE))
	$(BIN)/python -m bench.stages --image . $(if $(QUICK),--quick)

# On a machine with a GPU neither needs network or .venv: PYTHON is that machine's own, with torch.
GPU = $(PYTHON) bench/gpu/check.py
GPU_FLAGS = $(if $(LIMIT_S),--limit-s $(LIMIT_S)) $(if $(OUTPUT),--output $(OUTPUT)) $(if $(DRY),--dry)
gpu-pack: $(READY) ## with network: the wheels that a machine with a GPU needs, in wheels/
	$(BIN)/python bench/gpu/check.py pack

gpu-check: ## on a GPU: what its driver does, tests, kinds of scripts, in LIMIT_S (370) seconds
	$(GPU) check $(GPU_FLAGS)

gpu-bench: ## on a GPU: what checkpoints cost, in LIMIT_S (400) seconds
	$(GPU) bench $(GPU_FLAGS)

gpu-probe: ## what this machine's GPU and driver do; one JSON document
	@$(PYTHON) bench/gpu/probe.py

clean: ## removes what the other targets made
	rm -rf $(VENV) .venv-demo .guest .arm64 .etcd .mpi .criu wheels gpu-results build native/build dist *.egg-info client/*.egg-info native/pccheck_native/*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache tests/support/build
	-@$(MAKE) --no-print-directory -C tests/native clean
	-@$(MAKE) --no-print-directory -C tests/crash clean
	-@$(MAKE) --no-print-directory -C tests/standin clean
