# SPDX-License-Identifier: Apache-2.0
"""The verb ``doctor``: examine the machine from the processor to the figure, and name each fault with its remedy."""
