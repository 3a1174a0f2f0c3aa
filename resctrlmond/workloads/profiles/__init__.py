# SPDX-License-Identifier: Apache-2.0
"""Profiles, and the requests that they complete. It decides without side effects."""
