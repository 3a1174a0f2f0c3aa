# SPDX-License-Identifier: Apache-2.0
"""The Debian packages: built from this tree in a Debian 13 of their own, and looked at."""
