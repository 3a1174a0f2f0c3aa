# SPDX-License-Identifier: Apache-2.0
"""The defaults of options, and other constants."""

SOCKET = "/run/resctrlmond/org.resctrlmon.Manager"
# The beginning of the greeting of 'resctrlctl bridge', before which the start-up files of a shell may print lines.
GREETING = b"resctrlctl bridge: "
# The owner of claims on the command line.
CLAIM = "cli"
# The directory that the runtimes read by default (oci-hooks(5)). Both runtimes read a directory in /etc only if their
# configuration names it.
HOOKS_DIR = "/usr/share/containers/oci/hooks.d"
