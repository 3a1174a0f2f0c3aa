# SPDX-License-Identifier: Apache-2.0
"""What was reported of thousands of short workloads, held against what they used in truth."""
