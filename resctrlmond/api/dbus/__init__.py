# SPDX-License-Identifier: Apache-2.0
"""The D-Bus interface: the bus library, the check of incoming messages, objects and signals."""
