# SPDX-License-Identifier: Apache-2.0
"""What an NRI peer must be checked for, and the tests that do it: each of them exists."""

from __future__ import annotations

import importlib

import pytest

CHECKS = {
    "reads fragmented to single bytes": (
        "test_session.test_a_runtime_that_writes_one_byte_at_a_time",
        "test_wire.test_byte_by_byte_is_the_same_as_at_once",
    ),
    "frames longer than 4096 bytes inbound": (
        "test_session.test_a_list_of_nearly_4_mib_in_two_frames",
        "test_wire.test_a_frame_of_the_greatest_length_is_taken",
    ),
    "4096 and 4097 bytes outbound": ("test_wire.test_no_frame_at_a_message_start_is_longer_than_4096",),
    "a message longer than 4 MiB inbound: discarded, status 8": (
        "test_session.test_a_message_that_is_too_long_is_refused_and_the_connection_lives",
        "test_wire.test_an_oversize_message_is_refused_and_the_next_is_served",
    ),
    "outbound one frame a message, of at most 4096 bytes": ("test_wire.test_our_messages_have_one_frame_each",),
    "stream ids that skip, that are even": (
        "test_session.test_stream_ids_that_skip_are_taken_and_even_or_falling_ones_refused",
    ),
    "unknown method and service: status 12": ("test_session.test_what_we_do_not_have_is_unimplemented",),
    "neither mask 0 nor bits that a version does not know": (
        "test_messages.test_the_mask_asks_for_what_we_use_and_every_version_knows",
    ),
    "a list in chunks": ("test_adapter.test_a_list_in_chunks_is_taken_whole_and_what_an_event_told_is_newer",),
    "events before the list is answered": (
        "test_adapter.test_a_list_in_chunks_is_taken_whole_and_what_an_event_told_is_newer",
    ),
    "an end within a frame": (
        "test_session.test_an_end_within_a_frame_keeps_the_group_and_a_new_connection_is_made",
        "test_session.test_an_end_within_a_list_in_chunks_forgets_the_chunks",
    ),
    "no socket, and one that nobody listens at": ("test_session.test_no_socket_a_dead_one_and_a_new_one",),
    "an exception of ours: answered with OK": (
        "test_session.test_a_bug_of_ours_fails_no_container",
        "test_session.test_an_event_that_cannot_be_read_is_no_reason_to_fail_a_container",
    ),
    "answered within 2 s": (
        "test_never_in_the_way.test_a_daemon_that_hangs_holds_up_one_start_within_the_limit_and_no_other",
        "test_never_in_the_way.test_a_socket_that_takes_calls_and_never_answers_costs_less_than_the_runtime_waits",
    ),
    "a start for a pod that nobody told of": (
        "test_adapter.test_a_start_for_a_pod_that_nobody_told_of_makes_it_known",
    ),
    "a stop without a start": ("test_adapter.test_ends_of_what_nobody_told_of_are_taken_in_silence",),
    "pid 0": ("test_places.test_a_runtime_that_tells_no_pid",),
    "a number that is another process's by now": (
        "test_places.test_a_number_that_was_given_to_another_process_meanwhile_is_left_alone",
        "test_places.test_a_pid_that_is_another_process_by_now_is_left_alone",
    ),
    "the same start again after a reconnection": ("test_adapter.test_the_same_start_again_changes_nothing",),
    "frames for connections that nobody opened": ("test_session.test_what_is_no_request_is_refused_or_passed_over",),
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_has_its_tests(check: str) -> None:
    for named in CHECKS[check]:
        module, _, test = named.partition(".")
        assert callable(getattr(importlib.import_module(f"tests.nri.{module}"), test, None)), named
