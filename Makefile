# SPDX-License-Identifier: Apache-2.0
# make demo    the main job on a simulated resctrl, shown step by step
# make check   everything that must hold, on the simulator and on a real kernel in a virtual machine
# make conformance [CONFORMANCE="--seed N --operations N"]   random operations, kernel against simulator
# make conformance-all    rules, recorded cases and random operations on the newest kernel and on Linux 6.12
# make deb     Debian packages in build/deb, built in a Debian 13 of their own; install them with apt
# make install   onto this host, without packages; names the Debian packages that are missing
# make uninstall   remove what make install installed
# make install DESTDIR=...   only the files, as a distribution places them
# make wheel   the source distribution and the wheel, in dist

SHELL = /bin/sh
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

PREFIX ?= /usr
DESTDIR ?=
PYTHONDIR ?= $(PREFIX)/lib/python3/dist-packages
UNITDIR ?= $(PREFIX)/lib/systemd/system
INSTALL = install -p

.PHONY: all setup demo check check-fast check-kernel check-package check-pythons conformance conformance-all
.PHONY: bench crash flood fuzz mutants record starved truth interfaces proto lint man deb wheel install install-modules install-files clean
.PHONY: check-host uninstall uninstall-files

all: setup

# What a machine needs besides Python is installed by tests/host-packages where root, and named where not.
setup: $(READY)

$(READY): pyproject.toml tests/host-packages
	tests/host-packages
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[sim,nri,test,dbus-next]'
	touch $@

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/demo

check: lint check-fast check-kernel

# A pytest for each folder, so many at a time, the longest first; what a folder printed appears when it is done.
JOBS ?= 2
APART = $(MAKE) --no-print-directory --keep-going --output-sync=target --jobs=$(JOBS)
LONGEST = tests/workloads tests/conformance tests/daemon tests/nri tests/crash tests/api
FAST = $(LONGEST) $(filter-out $(LONGEST) tests/kernel tests/package,$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py))) \
  $(wildcard tests/test_*.py)
LONGEST_KERNEL = $(addprefix tests/kernel/test_,conformance.py nri.py containers.py)
ON_KERNEL = $(LONGEST_KERNEL) $(filter-out $(LONGEST_KERNEL) tests/kernel/test_package.py,$(wildcard tests/kernel/test_*.py))

check-fast: setup
	$(APART) $(FAST:%=pytest/%)

# One guest at a time: emulated processors are slow enough.
check-kernel: JOBS = 1
check-kernel: setup
	$(BIN)/python -m tests.kernel.machine build
	$(APART) $(ON_KERNEL:%=pytest/%)

pytest/%:
	$(BIN)/python -m pytest -q $*

# Builds the Debian packages, twice, reads them with lintian, runs autopkgtest on Debian 13 and sid, and installs, upgrades
# and purges them in a guest. Not a part of check: it fetches three more Debians, to build and to test in.
check-package: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m pytest tests/package tests/kernel/test_package.py

# Mutated NRI conversations, EXECUTIONS=... for another number of them, and a minute of mutants for each other decoder;
# FUZZ="--seconds N --seed N --target 'OCI states'" for others.
EXECUTIONS ?= 1000000
fuzz: setup
	$(BIN)/python -m tests.fuzz $(FUZZ)
	$(BIN)/python -m tests.nri.fuzz $(EXECUTIONS)

# What containerd and the adapter say to each other, anew, into tests/nri/recordings.
record: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m tests.kernel.cri.record

# The generated code is committed: protoc of Debian (3.21) writes what every later protobuf library imports.
proto:
	protoc --proto_path=. --python_out=. --pyi_out=. resctrlmond/nri/nri.proto

# What the interfaces are is declared in resctrlmond/api (types.py, verbs.py, errors.py): this writes their descriptions.
# The generated files are committed.
interfaces: setup
	$(BIN)/python -m tests.interfaces

# Thousands of random operations on real kernels and on the simulator, compared; other ones each time.
conformance: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m tests.conformance.differential $(CONFORMANCE)

# All rules on all machines, with the newest kernel and with Debian 13's own, and on the simulations of both; the table of
# rules and targets is printed at the end of each part, with all that was run so far.
conformance-all: setup
	$(BIN)/python -m tests.kernel.machine build --all
	rm -rf build/conformance
	RESCTRL_CONFORMANCE=all $(BIN)/python -m pytest tests/conformance
	$(BIN)/python -m pytest tests/kernel/test_conformance.py
	RESCTRLMOND_KERNEL=6.12 $(BIN)/python -m pytest tests/kernel/test_conformance.py
	$(BIN)/python -m tests.conformance.differential --all $(CONFORMANCE)

# The daemon's verbs, killed or given an error at each of their system calls by strace; about an hour.
# CRASH="--blow EIO --verb Assign", or --sample N of each, drawn by --seed, and so many --jobs at once.
crash: setup
	$(BIN)/python -m tests.crash $(CRASH)

# Ten thousand short workloads, what was reported of each held against what it used; by us, and by models of others.
# Some minutes; TRUTH="--seed N --workloads N" for another churn.
truth: setup
	$(BIN)/python -m tests.truth $(TRUTH)

# Plants bugs one at a time in a copy of the tree, and runs the fast tests that must notice each. Before a release; about
# half an hour. MUTANTS="--jobs 2 lag links" for those whose names contain one of these words.
mutants: setup
	$(BIN)/python -m tests.mutants $(MUTANTS)
	$(BIN)/python -m pytest -q tests/conformance/differential/planted.py

# 50 and then 200 containers at once on a guest with one emulated CPU and other load: every one of them must start.
# About half an hour; STARVED="--load 8 100" for others.
starved: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m tests.kernel.starved $(STARVED)

# What a normal Assign and a hook wait while a member of the group floods each door, and the daemon's peak memory.
# FLOOD="--samples N --flood 'unread lists'" for other ones.
flood: setup
	$(BIN)/python -m tests.flood $(FLOOD)

bench: setup
	$(BIN)/python -m tests.bench

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m tests.interfaces --check

PAGES = $(patsubst man/%.scd,build/man/%,$(wildcard man/*.scd))

man: $(PAGES)

# Tests that run at the same time make the pages too.
build/man/%: man/%.scd
	@mkdir -p build/man
	scdoc <$< >$@.$$$$ && mv $@.$$$$ $@

# Without DESTDIR this is the running host. resctrlmon, the group, is there before the D-Bus policy that names it.
install: check-host install-modules install-files
ifeq ($(DESTDIR),)
	if [ -d /run/systemd/system ]; then journalctl --update-catalog && systemctl daemon-reload; fi
endif

check-host:
ifeq ($(DESTDIR),)
	@packaging/check-host
endif

# The simulator is left out: it needs a FUSE library that Debian does not have. It comes with pip.
COMMANDS = resctrlmond=resctrlmond resctrlctl=resctrlctl resctrlmon-nri=resctrlmond.nri
INSTALLED_PAGES = $(filter-out %/resctrlmond-sim.1,$(PAGES))
UNITS = $(wildcard systemd/*.service systemd/*.socket systemd/*.mount)
CATALOGS = $(wildcard systemd/*.catalog)
HOOKS = $(wildcard systemd/*.json)
SYSUSERS = $(DESTDIR)$(PREFIX)/lib/sysusers.d/resctrlmond.conf
HOOK = $(DESTDIR)$(PREFIX)/libexec/resctrlmon-oci-hook
CATALOGDIR = $(DESTDIR)$(PREFIX)/lib/systemd/catalog
POLICY = $(DESTDIR)$(PREFIX)/share/dbus-1/system.d/org.resctrlmon1.conf
ACTIVATION = $(DESTDIR)$(PREFIX)/share/dbus-1/system-services/org.resctrlmon1.service
SHARED = $(DESTDIR)$(PREFIX)/share/resctrlmond
COMPLETION = $(DESTDIR)$(PREFIX)/share/bash-completion/completions/resctrlctl
MANDIR = $(DESTDIR)$(PREFIX)/share/man
MODULES = $(DESTDIR)$(PYTHONDIR)/resctrlmond $(DESTDIR)$(PYTHONDIR)/resctrlctl

# Modules of an earlier version are removed: a later one may not have them.
install-modules: check-host
	$(INSTALL) -d $(DESTDIR)$(PYTHONDIR) $(DESTDIR)$(PREFIX)/bin
	rm -rf $(MODULES)
	cp -R --preserve=mode,timestamps resctrlmond resctrlctl $(DESTDIR)$(PYTHONDIR)/
	find $(MODULES) '(' -name __pycache__ -o -path '*/resctrlmond/sim' -o -path '*/resctrlctl/completions' ')' \
	  -prune -exec rm -r {} +
	for command in $(COMMANDS); do \
	  printf '#!/usr/bin/python3\nimport sys\n\nfrom %s.__main__ import main\n\nsys.exit(main())\n' $${command#*=} \
	    >$(DESTDIR)$(PREFIX)/bin/$${command%=*} && chmod 755 $(DESTDIR)$(PREFIX)/bin/$${command%=*} || exit 1; done

# What is not a Python module: distributions install the modules with tools of their own. A runtime may start a container
# meanwhile: install(1) unlinks a file before it writes the new one, so the hook and its JSON files are renamed into place.
install-files: check-host man
	$(INSTALL) -D -m 644 systemd/resctrlmond.sysusers.conf $(SYSUSERS)
ifeq ($(DESTDIR),)
	systemd-sysusers $(notdir $(SYSUSERS))
endif
	$(INSTALL) -D -m 755 resctrlmond/oci_hook.py $(HOOK).new && mv -f $(HOOK).new $(HOOK)
	$(INSTALL) -D -m 644 -t $(DESTDIR)$(UNITDIR) $(UNITS)
	$(INSTALL) -D -m 644 -t $(CATALOGDIR) $(CATALOGS)
	$(INSTALL) -D -m 644 systemd/org.resctrlmon1.dbus.conf $(POLICY)
	$(INSTALL) -D -m 644 systemd/org.resctrlmon1.dbus-service $(ACTIVATION)
	for name in $(notdir $(HOOKS)); do $(INSTALL) -D -m 644 systemd/$$name $(SHARED)/hooks.d/$$name.new && \
	  mv -f $(SHARED)/hooks.d/$$name.new $(SHARED)/hooks.d/$$name || exit 1; done
	for name in resctrlmond nri; do [ -e $(DESTDIR)/etc/resctrlmond/$$name.yaml ] || \
	  $(INSTALL) -D -m 644 systemd/$$name.yaml $(DESTDIR)/etc/resctrlmond/$$name.yaml || exit 1; done
	for page in $(INSTALLED_PAGES); do $(INSTALL) -D -m 644 -t $(MANDIR)/man$${page##*.} $$page || exit 1; done
	$(INSTALL) -D -m 644 resctrlctl/completions/resctrlctl.bash $(COMPLETION)

# In the order of the Debian package's prerm: no runtime calls a hook that is gone, and no group stays without an owner.
# A changed configuration stays, as with apt remove.
uninstall:
ifeq ($(DESTDIR),)
	[ ! -x $(PREFIX)/bin/resctrlctl ] || resctrlctl --quiet hooks disable || \
	  { echo "nothing was removed: a runtime that calls a hook that is missing starts no container" >&2; exit 1; }
	if [ -d /run/systemd/system ]; then \
	  systemctl --quiet disable --now resctrlmon-nri.service resctrlmond.socket resctrlmond.service || :; fi
	[ ! -x $(PREFIX)/bin/resctrlmond ] || resctrlmond --release-all || echo "some monitoring groups still stand" >&2
endif
	$(MAKE) uninstall-files
ifeq ($(DESTDIR),)
	if [ -d /run/systemd/system ]; then journalctl --update-catalog && systemctl daemon-reload; fi
endif

uninstall-files:
	for name in resctrlmond nri; do ! cmp -s systemd/$$name.yaml $(DESTDIR)/etc/resctrlmond/$$name.yaml || \
	  rm $(DESTDIR)/etc/resctrlmond/$$name.yaml || exit 1; done
	rm -rf $(MODULES) $(SHARED)
	rm -f $(SYSUSERS) $(HOOK) $(POLICY) $(ACTIVATION) $(COMPLETION)
	rm -f $(addprefix $(DESTDIR)$(UNITDIR)/,$(notdir $(UNITS))) $(addprefix $(CATALOGDIR)/,$(notdir $(CATALOGS)))
	for command in $(COMMANDS); do rm -f $(DESTDIR)$(PREFIX)/bin/$${command%=*} || exit 1; done
	for page in $(INSTALLED_PAGES); do rm -f $(MANDIR)/man$${page##*.}/$${page##*/} || exit 1; done
	rmdir $(DESTDIR)/etc/resctrlmond 2>/dev/null || [ ! -d $(DESTDIR)/etc/resctrlmond ] || \
	  echo "kept the configuration: $(DESTDIR)/etc/resctrlmond" >&2

deb:
	$(PYTHON) -m tests.package --output build/deb

wheel: setup
	$(BIN)/python -m build --outdir dist

# The wheel with each Python from 3.11 on that there is, and with that of Debian's sid, which is fetched.
# PYTHONS="--version 3.12" for one of them.
check-pythons: setup
	$(BIN)/python -m tests.package.pythons $(PYTHONS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
