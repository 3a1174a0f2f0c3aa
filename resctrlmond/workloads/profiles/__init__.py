# SPDX-License-Identifier: Apache-2.0
"""What a profile says about a container or unit, and what a request asks for. It decides without side effects."""
