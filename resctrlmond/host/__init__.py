# SPDX-License-Identifier: Apache-2.0
"""Other programs of the host: the units of systemd, and other owners of monitoring groups."""
