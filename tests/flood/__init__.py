# SPDX-License-Identifier: Apache-2.0
"""What a normal Assign and a hook wait while every door is flooded by a member of the daemon's group."""
