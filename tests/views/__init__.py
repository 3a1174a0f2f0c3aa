# SPDX-License-Identifier: Apache-2.0
"""Each verb of resctrlctl that shows something, on a simulated machine on which workloads start and end."""
