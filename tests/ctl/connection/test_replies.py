# SPDX-License-Identifier: Apache-2.0
"""The classes of resctrlctl decode what the declared types of the interface encode, and refuse what these refuse."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect as shapes

from resctrlctl.base.structs import from_json, to_json
from resctrlctl.connection import host_replies, replies
from resctrlctl.connection.decoding import InvalidReply
from resctrlmond.api.verbs import VERBS, Verb
from tests.ctl.samples import Samples

DECODERS: dict[str, Callable[[object], Any]] = {
    name: kind.from_json
    for module in (replies, host_replies)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and hasattr(kind, "from_json")
}
CALLED = [verb for verb in VERBS.values() if verb.reply.__name__ in DECODERS]
# A value of each type of JSON.
WRONG: tuple[Any, ...] = (None, True, 7, 1.5, "text", [], ["text"], [None], {}, {"other": 7})


def decoder_of(verb: Verb) -> Callable[[object], Any]:
    """Return the function of resctrlctl that decodes the reply of a verb."""
    return DECODERS[verb.reply.__name__]


def sent(verb: Verb, choices: random.Random) -> Any:
    """Return a reply as JSON, parsed."""
    return json.loads(msgspec.json.encode(Samples(choices).of(shapes.type_info(verb.reply))))


def mutants(value: Any) -> Iterator[Any]:
    """Yield copies of JSON in which one value, at any depth, is missing or another one."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield {other: found for other, found in value.items() if other != name}
            yield from (value | {name: mutant} for mutant in mutants(each))
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from ([*value[:index], mutant, *value[index + 1 :]] for mutant in mutants(each))
    yield from WRONG


def refusal_of(decode: Callable[[Any], object], value: Any, error: type[Exception]) -> tuple[str, str] | None:
    """Return the begin of the message of the error and its place; None without an error."""
    try:
        decode(value)
    except error as found:
        message, _, place = str(found).partition(" - at ")
        # The declared types name all that they accept: "Expected `str | null`".
        return message.replace(" | null`", "`"), place
    return None


def test_every_verb_but_five_has_a_decoder() -> None:
    assert {verb.name for verb in VERBS.values()} - {verb.name for verb in CALLED} == {
        *("Expose", "Reconcile", "ReportPods"),  # resctrlctl does not call them
        "Run",  # only the hook does
        "AssignSelf",  # only resctrlmon-unit-exec does
    }


@pytest.mark.parametrize("verb", CALLED, ids=lambda verb: verb.name)
def test_reply_has_the_same_json_after_decoding(verb: Verb) -> None:
    choices = random.Random(verb.name)
    for _ in range(100):
        reply = sent(verb, choices)
        decoded = decoder_of(verb)(reply)
        assert json.loads(to_json(decoded)) == reply
        assert decoder_of(verb)(from_json(to_json(decoded).encode())) == decoded


@pytest.mark.parametrize("verb", CALLED, ids=lambda verb: verb.name)
def test_request_has_json_that_the_daemon_decodes(verb: Verb) -> None:
    name = verb.request.__name__
    kind = getattr(replies, name, None) or getattr(host_replies, name)
    choices = random.Random(verb.name)
    for _ in range(100):
        request = Samples(choices).of(shapes.type_info(verb.request))
        values = {field: getattr(request, field) for field in request.__struct_fields__ if field != "facts"}
        own, declared = kind(**values), type(request)(**values)
        assert msgspec.json.decode(to_json(own), type=verb.request) == declared


@pytest.mark.parametrize("verb", CALLED, ids=lambda verb: verb.name)
def test_wrong_reply_is_refused_as_by_the_declared_type(verb: Verb) -> None:
    choices = random.Random(verb.name)
    refused = accepted = 0
    for _ in range(3):
        for mutant in mutants(sent(verb, choices)):
            expected = refusal_of(
                lambda value: msgspec.json.decode(json.dumps(value), type=verb.reply), mutant, msgspec.ValidationError
            )
            assert refusal_of(decoder_of(verb), mutant, InvalidReply) == expected, mutant
            refused, accepted = refused + (expected is not None), accepted + (expected is None)
    assert refused
    assert accepted


def test_unknown_fields_of_a_newer_daemon_are_ignored() -> None:
    known = {"event": "e", "unit": "bytes", "value": "1", "quality": "exact"}
    assert replies.Total.from_json(known | {"new": [{}]}) == replies.Total.from_json(known)
