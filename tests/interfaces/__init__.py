# SPDX-License-Identifier: Apache-2.0
"""Writes the descriptions of the interfaces from their declaration in ``resctrlmond.api``."""
