# SPDX-License-Identifier: Apache-2.0
"""The NRI adapter: a plugin of containerd and CRI-O that puts each pod's containers into the pod's group."""
