# SPDX-License-Identifier: Apache-2.0
"""Compare the reported figures of thousands of short workloads with their true use."""
