# SPDX-License-Identifier: Apache-2.0
"""NRI adapter: a plugin of containerd and CRI-O that puts each container into the group of its pod."""
