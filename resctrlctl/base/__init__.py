# SPDX-License-Identifier: Apache-2.0
"""Errors, defaults and programs that all verbs use."""
