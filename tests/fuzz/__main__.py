# SPDX-License-Identifier: Apache-2.0
"""make fuzz: mutated input for each decoder; python3 -m tests.fuzz [--seconds N] [--seed N] [--target NAME].

Each target reads mutants of valid input for N seconds and may raise only errors that its caller handles. A failure
prints the bytes and the seed.
"""

from __future__ import annotations

import argparse
import io
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import dbus_fast
import msgspec

from resctrlctl.base.errors import CommandError
from resctrlctl.live import plot
from resctrlctl.live.series import read
from resctrlctl.screen import output
from resctrlmond.api import translate, types
from resctrlmond.api.dbus import values as dbus_values
from resctrlmond.api.dbus.gate import parse_fields, parse_frame
from resctrlmond.api.oci_state import InvalidOciState, container_of, parse_state
from resctrlmond.api.varlink import messages as wire
from resctrlmond.api.varlink.frames import ProtocolError
from resctrlmond.client import protocol
from resctrlmond.configuration import profile_syntax
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.workloads.figures import checkpoint
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Claim, EndRule, Member
from resctrlmond.workloads.records import record_format
from resctrlmond.workloads.records.record_format import UnreadableRecord
from tests.nri.fuzz import mutate
from tests.workloads.builders import workload


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder, valid input for it, and the errors that its caller expects."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    expected: tuple[type[Exception], ...] = ()


def _record(data: bytes) -> None:
    found = record_format.decode(data, "/run/resctrlmond/records/fuzz.json")
    # A decoded record is written again, and read again at the next start.
    assert record_format.decode(record_format.encode(found), "again") == found


def _checkpoint(data: bytes) -> None:
    found = checkpoint.decode(data)
    checkpoint.readings_of(found)
    checkpoint.histories(found)
    assert checkpoint.decode(checkpoint.encode(found)) == found


def _state(data: bytes) -> None:
    # The interface passes only JSON text that was valid UTF-8.
    container_of(parse_state(data.decode("utf-8", "replace")))


def _header(data: bytes) -> None:
    frame = parse_frame(data.ljust(16, b"\0"))
    parse_fields(frame.order, data[16 : 16 + frame.padded_fields_bytes], frame.fields_bytes)


def _body(data: bytes) -> None:
    values = msgspec.json.decode(data)
    if isinstance(values, dict):
        options = {str(name): dbus_fast.Variant("s", "x") for name in values}
        dbus_values.request(types.AssignRequest, {"key": "k"}, options)
        dbus_values.request(types.AssignRequest, {"key": "k", **values}, {})


def _call(data: bytes) -> None:
    call = wire.decode(data, wire.Call)
    wire.decode_parameters(call.parameters, types.AssignRequest)


def _reply(data: bytes) -> None:
    reply = protocol.result("ReadAll", protocol.decode(data), types.ReadAllReply)
    assert msgspec.json.decode(output.encode(reply, output.Json.PRETTY), type=types.ReadAllReply) == reply


def _recording(data: bytes) -> None:
    series = read(io.BytesIO(data), "fuzz")
    if series.measures:
        plot.screen(series, "_#", 80)


_RECORD = workload(
    "web",
    nonce=1,
    claims=(Claim("oci", "2026-11-22T00:00:00Z", EndRule.CONTAINER),),
    members=(Member(id="c1", kind="container", owner="oci", pid=7, start_time=9, cgroup="/sys/fs/cgroup/x"),),
    attributes={"pod.name": "ä\U0001f600"},
    inodes={"mon_L3_00": 12},
)
_REPLY = msgspec.json.encode(
    {
        "parameters": types.ReadAllReply(
            usages=[
                types.Usage(
                    workload=translate.workload_of(_RECORD, "/sys/fs/resctrl/mon_groups/web"),
                    totals=[types.Total(event="core_energy", unit="joules", value="1.5", quality=Quality.EXACT)],
                    levels=[types.Level(event="llc_occupancy", unit="bytes", value="4096")],
                )
            ],
        )
    }
)
_SECOND = msgspec.structs.replace(_RECORD.first, folder="batch", class_="batch")
_LAST = checkpoint.LastRead(
    "2026-11-22T00:00:00Z", {"mbm_total_bytes": "12", "llc_occupancy": "Unavailable"}, 5, {"mbm_total_bytes": 3}
)
_MESSAGE = dbus_fast.Message(
    serial=7,
    destination="org.resctrlmon1",
    path="/org/resctrlmon1",
    interface="org.resctrlmon1.Manager",
    member="Create",
    signature="sa{sv}",
    body=["key", {"claim": dbus_fast.Variant("s", "me")}],
)

_RECORDING = b"""\
{"type":"header","readAt":"2026-11-23T19:00:00Z","format":1,"version":"1","host":"h","intervalS":1.0,"events":{}}
{"type":"reading","readAt":"2026-11-23T19:00:01Z","workloads":[{"key":"k","generation":1,"name":"n","state":"active",\
"readAt":"2026-11-23T19:00:01Z","createdAt":"2026-11-23T19:00:00Z","totals":{"core_energy":{"value":"1.5",\
"quality":"exact"}},"levels":{"llc_occupancy":"4096"}}]}
{"type":"outage","readAt":"2026-11-23T19:00:02Z","reason":"r"}
{"type":"reading","readAt":"2026-11-23T19:00:03Z","workloads":[{"key":"k","generation":1,"name":"n","state":"active",\
"readAt":"2026-11-23T19:00:03Z","totals":{"core_energy":{"value":"9","quality":"late"}},"levels":{}}]}
"""

_PROFILES = b"""\
profiles:
  a: {watch: none, class: gold, linger: 1h 30min, priority: -5}
  b:
rules:
  - {profile: a, namespace: [kube-*, "x?"], labels: "app in (web, api), !canary", user: [0, 1000]}
  - profile: b
    labels: {app: web}
default_profile: b
"""

TARGETS = {
    "records": Target(
        _record,
        (record_format.encode(_RECORD), record_format.encode(_RECORD.with_group(_SECOND))),
        (UnreadableRecord,),
    ),
    "checkpoints": Target(_checkpoint, (checkpoint.encode({"mon_L3_00": _LAST, "mon_L3_01": _LAST}),)),
    "OCI states": Target(
        _state,
        (
            b'{"ociVersion":"1.2.0","id":"abc","status":"created","pid":4,"bundle":"/b","annotations":'
            b'{"io.kubernetes.pod.uid":"0f8fad5b-d9cb-469f-a165-70867728950e","io.kubernetes.pod.name":"web"}}',
        ),
        (InvalidOciState,),
    ),
    "D-Bus headers": Target(_header, (bytes(_MESSAGE._marshall(False)),), (ValueError,)),
    "D-Bus bodies": Target(
        _body,
        (b'{"pid":1,"cgroup":"/x","attributes":{"a":"b"},"late":true}', b'{"key":"k","colour":[[{}]]}'),
        (dbus_fast.DBusError, msgspec.DecodeError, UnicodeError, RecursionError),
    ),
    "varlink calls": Target(
        _call,
        (b'{"method":"org.resctrlmon.Manager.Assign","parameters":{"key":"k","pid":4,"attributes":{"a":"b"}}}',),
        (ProtocolError, msgspec.ValidationError),
    ),
    "replies in resctrlctl": Target(_reply, (_REPLY,), (ProtocolError,)),
    "profiles": Target(lambda data: profile_syntax.parse(data, "fuzz"), (_PROFILES,), (ConfigError,)),
    "recordings": Target(_recording, (_RECORDING,), (CommandError,)),
}


def run(target: Target, seconds: float, source: random.Random) -> int:
    """Decode mutants for that time, and return their number. Raise unexpected errors, with the bytes as a note."""
    number = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        data = source.choice(target.seeds)
        for _ in range(source.choice((1, 1, 1, 3))):
            data = mutate(data, source)
        try:
            target.read(data)
        except target.expected:
            pass
        except Exception as error:
            error.add_note(f"mutant {number}: {data!r}")
            raise
        number += 1
    return number


def main() -> None:
    """Fuzz each target."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--target", choices=TARGETS)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    for name in [options.target] if options.target else TARGETS:
        number = run(TARGETS[name], options.seconds, random.Random(f"{options.seed} {name}"))
        print(f"{name}: {number} mutants in {options.seconds:.0f} s, none went wrong", flush=True)


if __name__ == "__main__":
    main()
