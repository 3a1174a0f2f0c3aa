# SPDX-License-Identifier: Apache-2.0
"""The use of the whole machine by pools. It reads the counters of all groups and changes none."""
