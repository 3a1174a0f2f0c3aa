# SPDX-License-Identifier: Apache-2.0
"""Tests of the OCI hook: the shim, the state that it forwards, the files that announce it."""
