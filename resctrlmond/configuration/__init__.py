# SPDX-License-Identifier: Apache-2.0
"""The configuration and the profiles: YAML files, each key checked, each error with its line."""
