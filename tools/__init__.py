# SPDX-License-Identifier: Apache-2.0
"""Programs that write files of this source tree; no part of the daemon."""
