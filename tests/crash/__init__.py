# SPDX-License-Identifier: Apache-2.0
"""Kills and errors at every system call of every verb, given by strace."""
