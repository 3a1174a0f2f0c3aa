# SPDX-License-Identifier: Apache-2.0
"""Push figures to a receiver of OTLP, the protocol of OpenTelemetry. Only ``sender`` needs its SDK."""
