# SPDX-License-Identifier: Apache-2.0
"""A list of checks of an NRI peer, each with the tests that hold it; all of these tests exist."""

from __future__ import annotations

import importlib

import pytest

CHECKS = {
    "reads fragmented to single bytes": (
        "test_session.test_a_runtime_that_writes_one_byte_at_a_time",
        "test_wire.test_single_bytes_are_decoded_like_whole_messages",
    ),
    "frames longer than 4096 bytes inbound": (
        "test_session.test_a_list_of_nearly_4_mib_in_two_frames",
        "test_wire.test_frame_of_the_greatest_length_is_accepted",
    ),
    "4096 and 4097 bytes outbound": ("test_wire.test_no_frame_at_a_message_start_is_longer_than_4096",),
    "a message longer than 4 MiB inbound: discarded, status 8": (
        "test_session.test_message_that_is_too_long_is_refused_and_the_connection_remains",
        "test_wire.test_an_oversize_message_is_refused_and_the_next_is_served",
    ),
    "outbound one frame a message, of at most 4096 bytes": (
        "test_wire.test_each_message_of_the_adapter_has_one_frame",
    ),
    "stream ids that skip, that are even": (
        "test_session.test_stream_ids_may_skip_and_even_or_falling_ids_are_refused",
    ),
    "unknown method and service: status 12": ("test_session.test_unknown_method_is_unimplemented",),
    "neither mask 0 nor bits that a version does not know": (
        "test_messages.test_mask_has_only_events_that_every_version_knows",
    ),
    "a list in chunks": ("test_adapter.test_list_in_chunks_is_complete_and_older_than_events",),
    "events before the list is answered": ("test_adapter.test_list_in_chunks_is_complete_and_older_than_events",),
    "an end within a frame": (
        "test_session.test_connection_that_ends_within_a_frame_is_renewed_and_keeps_the_group",
        "test_session.test_connection_that_ends_within_a_list_discards_its_chunks",
    ),
    "no socket, and one without a listener": ("test_session.test_adapter_connects_once_a_runtime_listens",),
    "an exception in the adapter: the response is OK": (
        "test_session.test_bug_of_the_adapter_does_not_fail_the_container",
        "test_session.test_unreadable_event_does_not_fail_the_container",
    ),
    "answered within 2 s": (
        "test_never_in_the_way.test_daemon_that_hangs_delays_only_one_start",
        "test_never_in_the_way.test_socket_without_replies_delays_less_than_the_runtime_waits",
    ),
    "a start for an unreported pod": ("test_adapter.test_start_in_an_unreported_pod_adds_the_pod",),
    "a stop without a start": ("test_adapter.test_ends_of_unknown_containers_are_ignored",),
    "pid 0": ("test_places.test_runtime_that_does_not_report_pids",),
    "a number that is another process's by now": (
        "test_places.test_pid_reused_before_assign_is_not_assigned",
        "test_places.test_reused_pid_outside_the_control_group_is_not_assigned",
    ),
    "the same start again after a reconnection": ("test_adapter.test_the_same_start_again_changes_nothing",),
    "frames for connections that are not open": ("test_session.test_invalid_request_is_refused_or_skipped",),
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_has_its_tests(check: str) -> None:
    for named in CHECKS[check]:
        module, _, test = named.partition(".")
        assert callable(getattr(importlib.import_module(f"tests.nri.{module}"), test, None)), named
