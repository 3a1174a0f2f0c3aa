# SPDX-License-Identifier: Apache-2.0
"""What each program that systemd starts needs: arguments, journal, notifications, limits of its log."""
