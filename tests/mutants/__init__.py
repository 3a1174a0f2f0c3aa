# SPDX-License-Identifier: Apache-2.0
"""Bugs planted one at a time: which of them do the fast tests notice?"""
