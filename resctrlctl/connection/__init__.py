# SPDX-License-Identifier: Apache-2.0
"""Questions to the daemon, on this host or over ssh."""
