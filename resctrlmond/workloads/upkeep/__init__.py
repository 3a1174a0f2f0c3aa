# SPDX-License-Identifier: Apache-2.0
"""The tick and the start: what the daemon does without being asked. It may call all rooms below."""
