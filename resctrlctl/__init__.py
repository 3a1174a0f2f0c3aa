# SPDX-License-Identifier: Apache-2.0
"""resctrlctl: asks resctrlmond for workloads and what they used, and steers it."""
