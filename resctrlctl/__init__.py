# SPDX-License-Identifier: Apache-2.0
"""resctrlctl: the command that shows and controls the workloads of resctrlmond."""
