# SPDX-License-Identifier: Apache-2.0
"""Drivers of a real containerd in the guest, through the interface that the kubelet uses (CRI)."""
