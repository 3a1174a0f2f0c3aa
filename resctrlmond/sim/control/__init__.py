# SPDX-License-Identifier: Apache-2.0
"""Orders of root to a running simulation, and a Python interface to give them."""
