# SPDX-License-Identifier: Apache-2.0
"""Sightings of tasks outside their group or in it, and of foreign writes. It moves no task, but lowers qualities."""
