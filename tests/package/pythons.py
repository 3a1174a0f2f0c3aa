# SPDX-License-Identifier: Apache-2.0
"""make check-pythons: the wheel, which pip installs into an environment for each Python, passes the tests there.

The tests come from the source distribution, and find the modules that pip installed in the place of its own. Debian's
sid is fetched for the newest Python, which most machines have not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from tests.kernel.machine import MachineError
from tests.kernel.machine.tools import tool

from . import builder
from .source import PROJECT

PLACE = PROJECT / "build" / "pythons"
VERSIONS = ("3.11", "3.12", "3.13")
OF_SID = "3.14"
# Tests that do not depend on the Python, or need a real kernel; make check runs them.
LEFT_OUT = ("kernel", "package", "conformance", "crash", "fleet", "man")
# The tests of an installed wheel need these: tests/host-packages without the tools for manual pages.
TOOLS = (
    "python3-venv",
    "fuse3",
    "dbus",
    "runc",
    "strace",
    "procps",
    "iproute2",
    "scdoc",
    "intel-cmt-cat",
    "protobuf-compiler",
    "prometheus",
    "prometheus-node-exporter",
    "openssl",
    "systemd",
    "openssh-client",
    "openssh-server",
    "git",
    "make",
)
# The Python packages that the tests need, without the tools that read the code.
REQUIREMENTS = ("pytest", "pytest-timeout", "hypothesis", "pyfakefs", "pyte", "asyncvarlink", "varlink")
OPTIONS = ("-q", "-p", "no:cacheprovider", *(f"--ignore=tests/{folder}" for folder in LEFT_OUT))
# In a chroot, the kernel creates no user namespace (unshare(2), EPERM), and nsenter finds the files of the host.
NOT_IN_SID = (
    "--deselect=tests/daemon/test_watch.py::test_watch_without_inotify_logs_a_warning",
    "--deselect=tests/ctl/workloads/test_report.py::test_report_reads_what_the_ledger_sends_to_a_real_journald",
)
IN_SID = """\
dbus-uuidgen >/etc/machine-id
mkdir out; python3 -m venv venv; wheel=$(ls in/*.whl)
venv/bin/pip install -q --no-index --find-links in/wheels "$wheel[sim,nri,exporter,otlp,parquet,plot,dbus-next]" $1
tar -x -f in/*.tar.gz; cd resctrlmond-*/
rm -r resctrlmond resctrlctl; ln -s /build/venv/lib/python3*/site-packages/resctrl* .
shift; /build/venv/bin/python -m pytest "$@" 2>&1
"""


def distributions() -> Path:
    """The folder with the source distribution and the wheel that is built from it."""
    folder = PROJECT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    tool([sys.executable, "-m", "build", "--outdir", folder, PROJECT])
    return folder


def found(version: str) -> str | None:
    """An interpreter of that version: in PATH, or of pyenv."""
    if path := shutil.which(f"python{version}"):
        done = subprocess.run([path, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:  # pyenv has a shim for every version, which fails if the version is missing
            return path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return next((str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python3"))), None)


def check(python: str, version: str, folder: Path, tests: Sequence[str]) -> bool:
    """Install the wheel for that interpreter and run the tests; whether they pass. Their output is shown."""
    place = PLACE / version
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    tool([python, "-m", "venv", place / "venv"])
    interpreter = place / "venv" / "bin" / "python"
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    (wheel,) = folder.glob("*.whl")
    tool([interpreter, *pip, f"{wheel}[sim,nri,exporter,otlp,parquet,plot,dbus-next]", *REQUIREMENTS])
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    (tree,) = place.glob("resctrlmond-*")
    (installed,) = place.glob("venv/lib/python*/site-packages")
    for package in ("resctrlmond", "resctrlctl"):
        shutil.rmtree(tree / package)
        (tree / package).symlink_to(installed / package)
    done = subprocess.run(
        [interpreter, "-m", "pytest", *OPTIONS, *tests],
        cwd=tree,
        env={**os.environ, "PATH": f"{place}/venv/bin:{os.environ['PATH']}"},
        check=False,
    )
    return done.returncode == 0


def check_in_sid(folder: Path, tests: Sequence[str]) -> bool:
    """The same with the Python of Debian's sid, in a root of that; pip fetches the wheels for it here."""
    place = PLACE / OF_SID
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (wheel,) = folder.glob("*.whl")
    # For this version, not that of the interpreter; packages without a wheel are built.
    wanted = [f"{wheel}[sim,nri,exporter,otlp,parquet,plot,dbus-next]", *REQUIREMENTS]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    tool([*pip, "wheel", "--wheel-dir", place / "wheels", "--no-deps", "sdnotify"])
    selected: list[str | Path] = ["--python-version", OF_SID, "--only-binary=:all:", "--find-links", place / "wheels"]
    tool([*pip, "download", *selected, "--dest", place / "wheels", *wanted])
    inside = BytesIO()
    with tarfile.open(fileobj=inside, mode="w") as archive:
        archive.add(folder, "in")
        archive.add(place / "wheels", "in/wheels")
    try:
        output = builder.run(
            place,
            inside.getvalue(),
            IN_SID,
            " ".join(REQUIREMENTS),
            *OPTIONS,
            *NOT_IN_SID,
            *tests,
            archive=builder.root("sid", TOOLS),
            is_root=True,
            # In its own namespaces, the kernel reports no forks to the simulator, whose figures are estimated then.
            is_apart=os.geteuid() != 0,
        )
    except MachineError as error:
        print(error)
        return False
    print(output)
    return True


def main() -> int:
    """Returns the exit status: 0 where every Python was there and passed."""
    parser = argparse.ArgumentParser(prog="tests.package.pythons", description=__doc__)
    parser.add_argument("--version", action="append", choices=[*VERSIONS, OF_SID], help="only this one (repeatable)")
    parser.add_argument("tests", nargs="*", help="what to give to pytest")
    options = parser.parse_args()
    folder = distributions()
    results = {}
    for version in options.version or [*VERSIONS, OF_SID]:
        begun = time.monotonic()
        print(f"\n== Python {version}", flush=True)
        if version == OF_SID:
            passed = check_in_sid(folder, options.tests)
        elif python := found(version):
            passed = check(python, version, folder, options.tests)
        else:
            results[version] = "is not on this machine"
            continue
        results[version] = f"{'passed' if passed else 'FAILED'} ({time.monotonic() - begun:.0f} s)"
    for version, result in results.items():
        print(f"Python {version}: {result}")
    return 0 if all(result.startswith("passed") for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
