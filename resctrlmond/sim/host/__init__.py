# SPDX-License-Identifier: Apache-2.0
"""The host's processes, CPUs and clock, real or virtual."""
