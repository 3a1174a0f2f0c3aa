# SPDX-License-Identifier: Apache-2.0
# make demo    the main job on a simulated resctrl, shown step by step
# make check   everything that must hold, on the simulator and on a real kernel in a virtual machine
# make install DESTDIR=...   the files as a distribution places them

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

.PHONY: all setup demo check check-fast check-kernel bench lint man install clean

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

check-fast: setup
	$(BIN)/python -m pytest --ignore=tests/kernel

check-kernel: setup
	$(BIN)/python -m tests.kernel.machine build
	$(BIN)/python -m pytest tests/kernel

bench: setup
	$(BIN)/python -m tests.bench

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

PAGES = $(patsubst man/%.scd,build/man/%,$(wildcard man/*.scd))

man: $(PAGES)

build/man/%: man/%.scd
	@mkdir -p build/man
	scdoc <$< >$@.new && mv $@.new $@

install: man
	$(INSTALL) -d $(DESTDIR)$(PYTHONDIR) $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/libexec
	cp -R --preserve=mode,timestamps resctrlmond resctrlctl $(DESTDIR)$(PYTHONDIR)/
	find $(DESTDIR)$(PYTHONDIR)/resctrlmond $(DESTDIR)$(PYTHONDIR)/resctrlctl -name __pycache__ -prune -exec rm -r {} +
	for command in resctrlmond resctrlctl; do \
	  printf '#!/usr/bin/python3\nimport sys\n\nfrom %s.__main__ import main\n\nsys.exit(main())\n' $$command \
	    >$(DESTDIR)$(PREFIX)/bin/$$command && chmod 755 $(DESTDIR)$(PREFIX)/bin/$$command || exit 1; done
	$(INSTALL) -m 755 resctrlmond/oci_hook.py $(DESTDIR)$(PREFIX)/libexec/resctrlmon-oci-hook
	$(INSTALL) -D -m 644 -t $(DESTDIR)$(UNITDIR) systemd/*.service systemd/*.socket systemd/*.mount
	$(INSTALL) -D -m 644 systemd/resctrlmond.sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/resctrlmond.conf
	$(INSTALL) -D -m 644 systemd/org.resctrlmon1.dbus.conf \
	  $(DESTDIR)$(PREFIX)/share/dbus-1/system.d/org.resctrlmon1.conf
	$(INSTALL) -D -m 644 systemd/org.resctrlmon1.dbus-service \
	  $(DESTDIR)$(PREFIX)/share/dbus-1/system-services/org.resctrlmon1.service
	$(INSTALL) -D -m 644 -t $(DESTDIR)$(PREFIX)/share/resctrlmond/hooks.d systemd/*.json
	$(INSTALL) -D -m 644 systemd/resctrlmond.yaml $(DESTDIR)/etc/resctrlmond/resctrlmond.yaml
	for page in $(PAGES); do \
	  $(INSTALL) -D -m 644 -t $(DESTDIR)$(PREFIX)/share/man/man$${page##*.} $$page || exit 1; done
	$(INSTALL) -D -m 644 resctrlctl/completions/resctrlctl.bash \
	  $(DESTDIR)$(PREFIX)/share/bash-completion/completions/resctrlctl

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
