# SPDX-License-Identifier: Apache-2.0
"""The verbs that read again and again: top, watch, record and plot."""
