# SPDX-License-Identifier: Apache-2.0
"""Kill the daemon, or inject an error with strace, at each system call of each verb."""
