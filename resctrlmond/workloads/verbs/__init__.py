# SPDX-License-Identifier: Apache-2.0
"""The verbs that put tasks into groups: Assign, and its forms for profiles and foreign groups."""
