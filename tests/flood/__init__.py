# SPDX-License-Identifier: Apache-2.0
"""The delay of a normal Assign and of a hook while a member of the daemon's group floods every interface."""
