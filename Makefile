# SPDX-License-Identifier: Apache-2.0
# make         set up the development environment, and compile the OCI hook, the program for services and the witness
# make demo    the main job on a simulated resctrl, shown step by step
# make check   all tests, on the simulator and on a real kernel in a virtual machine
# make conformance [CONFORMANCE="--seed N --operations N"]   random operations, compared between kernel and simulator
# make units-budget   300 systemd units with 60 RMIDs: the figures of each run, and of shared groups, against their actual use
# make units-budget-kernel   300 systemd units in a guest with 64 RMIDs: the group of each of their tasks
# make soak      memory, descriptors and latency while containers start and end for half an hour
# make nri-all   all tests of the NRI adapter, with both versions of containerd
# make exact-all   exact services of all types, in a guest
# make conformance-all    rules, recorded cases and random operations on the newest kernel and on Linux 6.12
# make deb     build Debian packages in build/deb, in a Debian 13 root; install them with apt
# make install   install on this host without packages; lists the Debian packages that are missing
# make uninstall   remove the files of make install
# make install DESTDIR=...   install only the files, where a distribution puts them
# make wheel   build the source distribution and the wheel in dist

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
.PHONY: bench churn crash exact-all flood fuzz mutants mutate nri-all soak record starved truth views interfaces proto lint man
.PHONY: panels starved-units units-budget units-budget-kernel pictures deb wheel install install-modules install-files clean
.PHONY: check-fast-and-second-guest check-second-guest check-host hook unit-exec witness uninstall uninstall-files

all: setup hook unit-exec witness

# The Debian packages that the tests need are installed by tests/host-packages as root; other users get their names.
setup: $(READY)

$(READY): pyproject.toml tests/host-packages
	tests/host-packages
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[sim,nri,exporter,otlp,parquet,plot,test,dbus-next]'
	touch $@

demo: setup hook
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/demo

# The fast tests mostly wait, and a guest uses one processor: they run at the same time. When the fast tests have ended,
# a second guest uses the other processor. It begins with the last of the tests, and ends where it meets the first guest.
check: lint
	rm -rf $(CLAIMS)
	mkdir $(CLAIMS)
	+$(MAKE) --no-print-directory --keep-going --jobs=2 CLAIM=yes check-fast-and-second-guest check-kernel

check-fast-and-second-guest: setup
	+$(MAKE) --no-print-directory --keep-going --jobs=1 check-fast check-second-guest

# One pytest for each folder, several at a time, the longest first. The output of a folder appears when it ends.
JOBS ?= 2
APART = $(MAKE) --no-print-directory --keep-going --output-sync=target --jobs=$(JOBS)
LONGEST = tests/workloads tests/conformance tests/daemon tests/nri tests/crash tests/api
FAST = $(LONGEST) $(filter-out $(LONGEST) tests/kernel tests/package,$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py))) \
  $(wildcard tests/test_*.py)
LONGEST_KERNEL = $(addprefix tests/kernel/test_,conformance.py nri.py containers.py)
# These need more Debian systems: check-package runs them.
OF_PACKAGES = $(wildcard tests/kernel/test_package*.py)
ON_KERNEL = $(LONGEST_KERNEL) $(filter-out $(LONGEST_KERNEL) $(OF_PACKAGES),$(wildcard tests/kernel/test_*.py))

check-fast: setup
	$(APART) $(FAST:%=pytest/%)

# One guest at a time, because emulated processors are slow.
check-kernel check-second-guest: JOBS = 1
check-kernel: setup
	$(BIN)/python -m tests.kernel.machine build
	$(APART) $(ON_KERNEL:%=guest/%)

check-second-guest: setup
	$(APART) $(call reversed,$(ON_KERNEL:%=guest/%))

reversed = $(if $(1),$(call reversed,$(wordlist 2,$(words $(1)),$(1))) $(firstword $(1)))

pytest/%:
	$(BIN)/python -m pytest -q $*

# Of two guests, the first one that creates the directory of a test runs it.
CLAIM =
CLAIMS = $(VENV)/claims
guest/%:
	@$(if $(CLAIM),mkdir $(CLAIMS)/$(@F) 2>/dev/null || { test -d $(CLAIMS)/$(@F); exit; };) \
	  set -x; $(BIN)/python -m pytest -q $*

# Build the Debian packages twice, check them with lintian, run autopkgtest on Debian 13 and sid, and install, upgrade
# and purge them in a guest, where the Ansible role installs them too, and systemd-report of sid reads from the daemon. Not
# part of check, because it downloads four more Debian systems.
check-package: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m pytest tests/package $(OF_PACKAGES)

# Mutated NRI conversations (EXECUTIONS=... sets their number), and a minute of mutated input for each other decoder.
# FUZZ="--seconds N --seed N --target 'OCI states'" sets their options.
EXECUTIONS ?= 1000000
fuzz: setup
	$(BIN)/python -m tests.fuzz $(FUZZ)
	$(BIN)/python -m tests.nri.fuzz $(EXECUTIONS)

# Record the conversation of containerd and the adapter anew, in tests/nri/recordings.
record: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m tests.kernel.cri.record

# The generated code is committed: all later protobuf libraries can import the output of Debian's protoc (3.21).
proto:
	protoc --proto_path=. --python_out=. --pyi_out=. resctrlmond/nri/nri.proto

# Write the descriptions of the interfaces, which are declared in resctrlmond/api (types.py, verbs.py, errors.py).
# The generated files are committed.
interfaces: setup
	$(BIN)/python -m tests.interfaces

# Compare thousands of random operations between real kernels and the simulator; each run draws other operations.
conformance: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m tests.conformance.differential $(CONFORMANCE)

# All rules on all machines, with the newest kernel and that of Debian 13, and on the simulations of both. Each part ends
# with a table of the rules and targets so far.
conformance-all: setup
	$(BIN)/python -m tests.kernel.machine build --all
	rm -rf build/conformance
	RESCTRL_CONFORMANCE=all $(BIN)/python -m pytest tests/conformance
	$(BIN)/python -m pytest tests/kernel/test_conformance.py
	RESCTRLMOND_KERNEL=6.12 $(BIN)/python -m pytest tests/kernel/test_conformance.py
	$(BIN)/python -m tests.conformance.differential --all $(CONFORMANCE)

# Exact services of all types; check runs some of them.
exact-all: setup
	RESCTRLMOND_TYPES=all $(BIN)/python -m pytest tests/kernel/test_exact_units.py

# All tests of the NRI adapter with both versions of containerd.
nri-all: setup
	RESCTRLMOND_CONTAINERD=all $(BIN)/python -m pytest tests/kernel/test_nri.py

# Kill the daemon, or inject an error with strace, at each system call of its verbs; about an hour.
# CRASH="--fault EIO --verb Assign" selects; --sample N draws N points of each verb with --seed; --jobs sets the parallel jobs.
crash: setup
	$(BIN)/python -m tests.crash $(CRASH)

# Compare the reports on ten thousand short workloads with their true use, for resctrlmond and for models of other tools.
# Some minutes. TRUTH="--seed N --workloads N" sets its options.
truth: setup
	$(BIN)/python -m tests.truth $(TRUTH)

# Start, restart and end 300 units with 60 RMIDs on a simulated machine, and compare the figures of all runs, and those of
# the groups that units share, with the actual use. Five minutes. UNITS_BUDGET="--units 30 --rmids 8 --seed N" sets its options.
units-budget: setup
	$(BIN)/python -m tests.truth.units $(UNITS_BUDGET)

# Start, restart and stop 300 units in a guest with 64 RMIDs: each of their tasks is in the group of its unit, or in one
# that units share. About a quarter of an hour. UNITS_BUDGET_KERNEL="--units 60" sets its options.
units-budget-kernel: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m tests.kernel.units_budget $(UNITS_BUDGET_KERNEL)

# Insert bugs, one at a time, into a copy of the tree, and run the fast tests that must fail. Before a release; about half
# an hour. MUTANTS="--jobs 2 lag links" selects the mutants whose names contain one of these words.
mutants: setup
	$(BIN)/python -m tests.mutants $(MUTANTS)
	$(BIN)/python -m pytest -q tests/conformance/differential/planted.py

# Change random places of the product, one at a time, and run the tests that run the changed line. Print the share that was
# caught in each package, and the mutants that survived. Measure first which tests run which line, which is kept in
# build/mutants: MUTATE="--map"; MUTATE="--map tests/workloads/figures" measures a part. All of tests/workloads took 23
# minutes on a busy machine. check tries five mutants that are always the same. MUTATE="--sample 100 --seed N --of resctrlmond/workloads/figures"
# sets its options.
mutate: setup
	$(BIN)/python -m tests.mutants.sample $(MUTATE)

# Start 50 and then 200 containers at once on a guest with one emulated CPU and other load: each of them must start.
# About half an hour. STARVED="--load 8 100" sets its options.
starved: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m tests.kernel.starved $(STARVED)

# Restart 20 exact services at once in a guest with one CPU, of which a real-time process takes a share.
# STARVED_UNITS="--services N --share 0.5" selects.
starved-units: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m tests.kernel.starved_units $(STARVED_UNITS)

# Measure the delay of an Assign and of a hook while each interface is flooded, and the daemon's peak memory.
# FLOOD="--samples N --flood 'unread lists'" selects.
flood: setup
	$(BIN)/python -m tests.flood $(FLOOD)

# Show 0, 1, 30 and 500 workloads that end and begin on a simulated machine with each verb, at 80 and 200 columns, and
# print the processor time of the daemon and of top. VIEWS="--workloads 30" selects.
views: setup
	$(BIN)/python -m tests.views $(VIEWS)

# Start and end containers without pause for half an hour, with readers, reloads and kills of the daemon: nothing grows.
# SOAK="--minutes 5" is shorter.
soak: setup
	$(BIN)/python -m tests.soak $(SOAK)

# Let a real Prometheus scrape the exporter for an hour while short workloads come and go, and while the daemon and the
# exporter are killed: no counter may fall, no end may be missed, and the sums of namespaces are the use that the simulator
# recorded, also for a receiver of OTLP. CHURN="--minutes 5" is shorter.
churn: setup
	$(BIN)/python -m tests.exporter $(CHURN)

# Two minutes of churn, which mostly wait, beside the other tests of the folder.
CHURN_TEST = tests/exporter/test_churn.py
pytest/tests/exporter:
	$(BIN)/python -m pytest -q $(CHURN_TEST) & churn=$$!; \
	  $(BIN)/python -m pytest -q --ignore=$(CHURN_TEST) tests/exporter; code=$$?; wait $$churn && exit $$code

# Draw the panels of the Grafana dashboard in build/panels.png, from a Prometheus that scrapes a simulated machine for two
# minutes. Look at them when the dashboard has changed.
panels: setup
	mkdir -p build
	$(BIN)/python -m tests.exporter.panels build/panels.png

# Measure speed and memory as ratios within one run: a table, and every sample in build/bench.json. About 10 minutes.
# BENCH="hook groups" selects sections; tests/bench/README.md lists them, and figures.
bench: setup
	mkdir -p build
	$(BIN)/python -m tests.bench --json build/bench.json $(BENCH)

build/constant-resctrl: tests/bench/constant_resctrl.c
	mkdir -p build
	$(CC) -O2 $(WARNINGS) -o $@ $<

# Take the pictures in README.md again, on the simulator. Needs root and chromium. Look at them before you commit them.
pictures: setup
	$(BIN)/python -m tests.pictures

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m tests.interfaces --check

# The OCI hook, also with sanitizers for the tests. Distributions set CPPFLAGS, CFLAGS, LDFLAGS and WARNINGS.
HOOK = build/resctrlmon-oci-hook
SANITIZED_HOOK = $(HOOK)-sanitized
CPPFLAGS ?= -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3
CFLAGS ?= -O2 -fstack-protector-strong
LDFLAGS ?= -Wl,-z,relro,-z,now
WARNINGS ?= -Wall -Wextra -Werror

# The program before the commands of services is static: a sandbox may hide the libraries. Tests compile it with a socket
# in the working directory, and with sanitizers, which cannot be static.
UNIT_EXEC = build/resctrlmon-unit-exec
TESTED_UNIT_EXEC = $(UNIT_EXEC)-tested $(UNIT_EXEC)-sanitized

hook: $(HOOK)

unit-exec: $(UNIT_EXEC)

$(TESTED_UNIT_EXEC): SOCKET = -DSOCKET='"unit.socket"'
$(UNIT_EXEC) $(UNIT_EXEC)-tested: LINK = -static-pie
$(UNIT_EXEC)-sanitized: LINK = -pie
$(UNIT_EXEC)-sanitized: CPPFLAGS =
$(UNIT_EXEC)-sanitized: CFLAGS = -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
$(UNIT_EXEC) $(TESTED_UNIT_EXEC): hook/unit_exec.c Makefile
	@mkdir -p build
	$(CC) -std=c11 $(WARNINGS) $(CPPFLAGS) $(SOCKET) $(CFLAGS) -fPIE $< $(LINK) $(LDFLAGS) -o $@.$$$$ && mv $@.$$$$ $@

$(SANITIZED_HOOK): CPPFLAGS =
$(SANITIZED_HOOK): CFLAGS = -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
$(HOOK) $(SANITIZED_HOOK): hook/oci_hook.c Makefile
	@mkdir -p build
	$(CC) -std=c11 $(WARNINGS) $(CPPFLAGS) $(CFLAGS) -fPIE $< -pie $(LDFLAGS) -o $@.$$$$ && mv $@.$$$$ $@

# The loader of the witness, which contains the program for the kernel. FORMAT is another version for the tests.
WITNESS = build/resctrlmond-witness
CLANG = clang
FORMAT =
FORMAT_OPTION = $(if $(FORMAT),-DFORMAT=$(FORMAT))

witness: $(WITNESS)

# The structures of the kernel are relocated with the debug information (-g) when the program is loaded.
$(WITNESS): witness/loader.c witness/witness.bpf.c witness/witness.h Makefile
	@mkdir -p build
	$(CLANG) -target bpf -mcpu=v3 -O2 -g -ffile-prefix-map=$(CURDIR)=. -Wall -I/usr/include/$(shell $(CC) -print-multiarch) \
	  $(FORMAT_OPTION) -c witness/witness.bpf.c -o $@.$$$$.o && mv $@.$$$$.o $@.bpf.o && \
	  $(CC) -std=gnu11 $(WARNINGS) $(CPPFLAGS) $(CFLAGS) $(FORMAT_OPTION) -DOBJECT='"$@.bpf.o"' -fPIE witness/loader.c \
	  -pie $(LDFLAGS) -lbpf -o $@.$$$$ && mv $@.$$$$ $@

PAGES = $(patsubst man/%.scd,build/man/%,$(wildcard man/*.scd))

man: $(PAGES)

# Tests that run concurrently build the pages too, so each writes a file of its own and renames it.
build/man/%: man/%.scd
	@mkdir -p build/man
	scdoc <$< >$@.$$$$ && mv $@.$$$$ $@

# Without DESTDIR, install on this host. The group resctrlmon must exist before the D-Bus policy that names it.
install: check-host install-modules install-files
ifeq ($(DESTDIR),)
	if [ -d /run/systemd/system ]; then journalctl --update-catalog && systemctl daemon-reload; fi
endif

check-host:
ifeq ($(DESTDIR),)
	@CC="$(CC)" packaging/check-host
endif

# Without the simulator: it needs a FUSE library that Debian does not have. The wheel contains it.
COMMANDS = resctrlmond=resctrlmond resctrlctl=resctrlctl resctrlmon-nri=resctrlmond.nri \
  resctrlmon-exporter=resctrlmond.exporter
INSTALLED_PAGES = $(filter-out %/resctrlmond-sim.1,$(PAGES))
UNITS = $(wildcard systemd/*.service systemd/*.socket systemd/*.mount)
CATALOGS = $(wildcard systemd/*.catalog)
HOOKS = $(wildcard systemd/*.json)
SYSUSERS = $(DESTDIR)$(PREFIX)/lib/sysusers.d/resctrlmond.conf
INSTALLED_HOOK = $(DESTDIR)$(PREFIX)/libexec/resctrlmon-oci-hook
INSTALLED_UNIT_EXEC = $(DESTDIR)$(PREFIX)/libexec/resctrlmon-unit-exec
INSTALLED_WITNESS = $(DESTDIR)$(PREFIX)/bin/resctrlmond-witness
CATALOGDIR = $(DESTDIR)$(PREFIX)/lib/systemd/catalog
POLICY = $(DESTDIR)$(PREFIX)/share/dbus-1/system.d/org.resctrlmon1.conf
ACTIVATION = $(DESTDIR)$(PREFIX)/share/dbus-1/system-services/org.resctrlmon1.service
SHARED = $(DESTDIR)$(PREFIX)/share/resctrlmond
COMPLETION = $(DESTDIR)$(PREFIX)/share/bash-completion/completions/resctrlctl
# Debian's zsh reads the first of these directories in /usr, and the second in /usr/local.
ZSH_COMPLETION = $(DESTDIR)$(PREFIX)/share/zsh/$(if $(filter /usr,$(PREFIX)),vendor-completions,site-functions)/_resctrlctl
FISH_COMPLETION = $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/resctrlctl.fish
MANDIR = $(DESTDIR)$(PREFIX)/share/man
# The pages name these files.
DOCDIR = $(DESTDIR)$(PREFIX)/share/doc/resctrlmond
MODULES = $(DESTDIR)$(PYTHONDIR)/resctrlmond $(DESTDIR)$(PYTHONDIR)/resctrlctl

# Remove the modules of an earlier version first: a later version may not have all of them.
install-modules: check-host
	$(INSTALL) -d $(DESTDIR)$(PYTHONDIR) $(DESTDIR)$(PREFIX)/bin
	rm -rf $(MODULES)
	cp -R --preserve=mode,timestamps resctrlmond resctrlctl $(DESTDIR)$(PYTHONDIR)/
	find $(MODULES) '(' -name __pycache__ -o -path '*/resctrlmond/sim' -o -path '*/resctrlctl/completions' ')' \
	  -prune -exec rm -r {} +
	for command in $(COMMANDS); do \
	  printf '#!/usr/bin/python3\nimport sys\n\nfrom %s.__main__ import main\n\nsys.exit(main())\n' $${command#*=} \
	    >$(DESTDIR)$(PREFIX)/bin/$${command%=*} && chmod 755 $(DESTDIR)$(PREFIX)/bin/$${command%=*} || exit 1; done

# All files except Python modules, which distributions install with their own tools. A runtime may start a container
# meanwhile: install(1) unlinks a file before it writes the new one, so the hook and its JSON files are renamed into place.
install-files: check-host man hook unit-exec
	$(INSTALL) -D -m 644 systemd/resctrlmond.sysusers.conf $(SYSUSERS)
ifeq ($(DESTDIR),)
	systemd-sysusers $(notdir $(SYSUSERS))
endif
	$(INSTALL) -D -m 755 $(HOOK) $(INSTALLED_HOOK).new && mv -f $(INSTALLED_HOOK).new $(INSTALLED_HOOK)
	$(INSTALL) -D -m 755 $(UNIT_EXEC) $(INSTALLED_UNIT_EXEC).new && mv -f $(INSTALLED_UNIT_EXEC).new $(INSTALLED_UNIT_EXEC)
	if command -v $(CLANG) >/dev/null && $(MAKE) --no-print-directory witness; then \
	  $(INSTALL) -D -m 755 $(WITNESS) $(INSTALLED_WITNESS); \
	  else echo "the witness is left out: it needs the Debian packages clang and libbpf-dev, see resctrlmond-witness(8)" >&2; fi
	$(INSTALL) -D -m 644 -t $(DESTDIR)$(UNITDIR) $(UNITS)
	$(INSTALL) -D -m 644 -t $(CATALOGDIR) $(CATALOGS)
	$(INSTALL) -D -m 644 systemd/org.resctrlmon1.dbus.conf $(POLICY)
	$(INSTALL) -D -m 644 systemd/org.resctrlmon1.dbus-service $(ACTIVATION)
	for name in $(notdir $(HOOKS)); do $(INSTALL) -D -m 644 systemd/$$name $(SHARED)/hooks.d/$$name.new && \
	  mv -f $(SHARED)/hooks.d/$$name.new $(SHARED)/hooks.d/$$name || exit 1; done
	for name in resctrlmond nri; do [ -e $(DESTDIR)/etc/resctrlmond/$$name.yaml ] || \
	  $(INSTALL) -D -m 644 systemd/$$name.yaml $(DESTDIR)/etc/resctrlmond/$$name.yaml || exit 1; done
	$(INSTALL) -d $(DESTDIR)/etc/resctrlmond/profiles.d
	for page in $(INSTALLED_PAGES); do $(INSTALL) -D -m 644 -t $(MANDIR)/man$${page##*.} $$page || exit 1; done
	$(INSTALL) -D -m 644 resctrlctl/completions/resctrlctl.bash $(COMPLETION)
	$(INSTALL) -D -m 644 resctrlctl/completions/_resctrlctl $(ZSH_COMPLETION)
	$(INSTALL) -D -m 644 resctrlctl/completions/resctrlctl.fish $(FISH_COMPLETION)
	rm -rf $(DOCDIR)/examples
	for file in $$(cd packaging/examples && find . -type f); do \
	  if [ -x packaging/examples/$$file ]; then mode=755; else mode=644; fi; \
	  $(INSTALL) -D -m $$mode packaging/examples/$$file $(DOCDIR)/examples/$$file || exit 1; done

# The drop-ins of 'resctrlctl units exact'. A service that runs through a program that is missing does not start.
EXACT_DROP_INS = $(wildcard /etc/systemd/system/*.service.d/zz-resctrlmon-exact.conf)

# In the order of the Debian package's prerm: the hook's JSON files first, and no group remains without an owner.
# A changed configuration file remains, as with apt remove.
uninstall:
ifeq ($(DESTDIR),)
	[ ! -x $(PREFIX)/bin/resctrlctl ] || resctrlctl --quiet hooks disable || \
	  { echo "nothing was removed: a runtime that calls a hook that is missing starts no container" >&2; exit 1; }
	rm -f $(EXACT_DROP_INS)
	rmdir $(dir $(EXACT_DROP_INS)) 2>/dev/null || :
	if [ -d /run/systemd/system ]; then systemctl daemon-reload && \
	  systemctl --quiet disable --now resctrlmon-nri.service resctrlmon-exporter.socket resctrlmon-exporter.service \
	    resctrlmond.socket resctrlmond-unit.socket resctrlmond.service || :; fi
	[ ! -x $(PREFIX)/bin/resctrlmond-witness ] || resctrlmond-witness unload || echo "the witness is still loaded" >&2
	[ ! -x $(PREFIX)/bin/resctrlmond ] || resctrlmond --release-all || echo "some monitoring groups still stand" >&2
endif
	$(MAKE) uninstall-files
ifeq ($(DESTDIR),)
	if [ -d /run/systemd/system ]; then journalctl --update-catalog && systemctl daemon-reload; fi
endif

uninstall-files:
	for name in resctrlmond nri; do ! cmp -s systemd/$$name.yaml $(DESTDIR)/etc/resctrlmond/$$name.yaml || \
	  rm $(DESTDIR)/etc/resctrlmond/$$name.yaml || exit 1; done
	rm -rf $(MODULES) $(SHARED) $(DOCDIR)/examples
	rmdir $(DOCDIR) 2>/dev/null || :
	rm -f $(SYSUSERS) $(INSTALLED_HOOK) $(INSTALLED_UNIT_EXEC) $(INSTALLED_WITNESS) $(POLICY) $(ACTIVATION) $(COMPLETION) $(ZSH_COMPLETION) $(FISH_COMPLETION)
	rm -f $(addprefix $(DESTDIR)$(UNITDIR)/,$(notdir $(UNITS))) $(addprefix $(CATALOGDIR)/,$(notdir $(CATALOGS)))
	for command in $(COMMANDS); do rm -f $(DESTDIR)$(PREFIX)/bin/$${command%=*} || exit 1; done
	for page in $(INSTALLED_PAGES); do rm -f $(MANDIR)/man$${page##*.}/$${page##*/} || exit 1; done
	rmdir $(DESTDIR)/etc/resctrlmond/profiles.d 2>/dev/null || :
	rmdir $(DESTDIR)/etc/resctrlmond 2>/dev/null || [ ! -d $(DESTDIR)/etc/resctrlmond ] || \
	  echo "kept the configuration: $(DESTDIR)/etc/resctrlmond" >&2

deb:
	$(PYTHON) -m tests.package --output build/deb

wheel: setup
	$(BIN)/python -m build --outdir dist

# Test the wheel with each installed Python from 3.11 on, and with that of Debian sid, which is downloaded.
# PYTHONS="--version 3.12" selects one of them.
check-pythons: setup
	$(BIN)/python -m tests.package.pythons $(PYTHONS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
