# SPDX-License-Identifier: Apache-2.0
"""Start and end containers without pause, with readers, reloads and kills of the daemon, and measure what grows."""
