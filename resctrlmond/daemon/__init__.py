# SPDX-License-Identifier: Apache-2.0
"""The running daemon: start-up, ticks, watches, and messages to the operator."""
