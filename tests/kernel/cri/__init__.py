# SPDX-License-Identifier: Apache-2.0
"""What drives a real containerd in the guest, through the interface that the kubelet uses (CRI)."""
