# SPDX-License-Identifier: Apache-2.0
"""Tests of the completions of zsh and fish. They run the shells; the tests of bash are in tests/ctl."""
