# SPDX-License-Identifier: Apache-2.0
"""Arguments, journal, notifications and limits of the log: for each program that systemd starts."""
