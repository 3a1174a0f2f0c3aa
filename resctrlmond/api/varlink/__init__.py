# SPDX-License-Identifier: Apache-2.0
"""The varlink interface: server, connections and messages."""
