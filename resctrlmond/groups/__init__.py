# SPDX-License-Identifier: Apache-2.0
"""The first floor: who owns which monitoring group, for how long, and what it used."""
