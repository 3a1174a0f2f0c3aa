# SPDX-License-Identifier: Apache-2.0
"""The life of one group: create it, place its tasks, detect its end, read it, remove it. It changes the kernel."""
