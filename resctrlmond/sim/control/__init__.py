# SPDX-License-Identifier: Apache-2.0
"""Control of a running simulation: faults, orders, and the true figures."""
