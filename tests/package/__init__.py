# SPDX-License-Identifier: Apache-2.0
"""The Debian packages: build them from this tree in a separate Debian 13, and check them."""
