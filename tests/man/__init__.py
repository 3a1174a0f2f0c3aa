# SPDX-License-Identifier: Apache-2.0
"""The manual pages, held to the programs."""
