# SPDX-License-Identifier: Apache-2.0
"""Programs that run in the guest."""
