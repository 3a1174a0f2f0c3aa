# SPDX-License-Identifier: Apache-2.0
"""The examples for many hosts: what they describe is done with real programs."""
