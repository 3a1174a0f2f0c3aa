# SPDX-License-Identifier: Apache-2.0
"""Sightings of tasks outside their group or in it, and of writes by other programs. It changes no group."""
