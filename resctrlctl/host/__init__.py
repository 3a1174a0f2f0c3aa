# SPDX-License-Identifier: Apache-2.0
"""The verbs about the whole host: machine, sums, hooks and profiles."""
