# SPDX-License-Identifier: Apache-2.0
"""Records on disk: whole or not there, read strictly, and kept when they cannot be read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.resctrl.errors import NotRead, ResctrlError
from resctrlmond.resctrl.tree import GroupRef
from resctrlmond.resctrl.witness import Watch
from resctrlmond.workloads.figures.reasons import Reason, doubt, text_of
from resctrlmond.workloads.figures.verdict import baseline_of, verdict
from resctrlmond.workloads.model.clock import boot_ns, boot_ns_at, utc_now
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import (
    MAX_ENDED_MEMBERS,
    ROOT_FOLDER,
    Claim,
    EndRule,
    Group,
    GroupState,
    Member,
    Proof,
    State,
    Workload,
    replace,
)
from resctrlmond.workloads.records import store as store_module
from resctrlmond.workloads.records.atomic_files import read_file
from resctrlmond.workloads.records.record_format import UnreadableRecord, decode, encode
from resctrlmond.workloads.records.store import Store
from tests.workloads.builders import drop, save, workload

text = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(0, 2**63 - 1)
claims = st.builds(Claim, owner=text, since=text)
members = st.builds(
    Member,
    id=text,
    kind=text,
    owner=text,
    pid=numbers,
    start_time=numbers,
    cgroup=text,
    ended_at=text,
    late=st.booleans(),
)
groups = st.builds(
    Group,
    folder=st.just(""),
    class_=st.sampled_from(["", "gold", "a class \u00e9"]),
    name=st.sampled_from(["k", "host-" + "k" * 200]),
    state=st.sampled_from(GroupState),
    reason=text,
    in_limbo=st.booleans(),
    nonce=numbers,
    boot_id=text,
    has_begin=st.booleans(),
)
records = st.builds(
    Workload,
    key=st.sampled_from(["k", "unit@1.service", "0f8fad5b-d9cb-469f-a165-70867728950e"]),
    groups=st.lists(groups, min_size=1, max_size=1).map(tuple),
    follows_class=st.booleans(),
    is_active=st.booleans(),
    generation=numbers,
    claims=st.lists(claims, max_size=3).map(tuple),
    members=st.lists(members, max_size=3).map(tuple),
    attributes=st.dictionaries(text, text, max_size=3),
)
RECORD = workload("k")
SHOWN = Proof(watch=Watch(0, 0), until_ns=1)
WHY = doubt(Reason.NOT_INCLUDED, member="x", cause="why")
FIRST = RECORD.first


@given(records)
def test_written_record_is_read_back(record: Workload) -> None:
    assert decode(encode(record), "file") == record


@given(st.binary(max_size=200) | st.recursive(st.integers() | text, st.lists).map(json.dumps).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(UnreadableRecord, match="the-file"):
        decode(data, "the-file")


@pytest.mark.parametrize(
    "names",
    [
        {"key": "../k"},
        {"key": ""},
        {"groups": (replace(FIRST, name="../../etc"),)},
        {"groups": (replace(FIRST, name=".."),)},
        {"groups": (replace(FIRST, name=""),)},
        {"groups": (replace(FIRST, class_="../.."),)},
        {"groups": (replace(FIRST, class_="info"),)},
        {"groups": (replace(FIRST, folder="../../.."),)},
        {"groups": (FIRST, replace(FIRST, folder=".."))},
        {"groups": (FIRST, replace(FIRST, folder="a", class_="a/b"))},
        {"groups": (FIRST, FIRST)},
        {"groups": (FIRST, replace(FIRST, folder="a"), replace(FIRST, folder="a"))},
        {"groups": ()},
    ],
)
def test_a_record_with_a_name_that_leads_elsewhere_is_refused(names: dict[str, Any]) -> None:
    """Its names become parts of paths in resctrl and /run, where whole folders are removed."""
    data = encode(replace(RECORD, **names))
    with pytest.raises(UnreadableRecord, match="not a valid record"):
        decode(data, "file")


def test_a_record_of_a_further_group_in_the_root_is_read() -> None:
    first, other = replace(FIRST, class_="gold"), replace(FIRST, folder=ROOT_FOLDER)
    record = replace(RECORD, groups=(first, other))
    assert decode(encode(record), "file") == record


@given(st.data())
def test_damaged_file_is_refused_or_read_as_the_same_record(data: st.DataObject) -> None:
    whole = encode(RECORD)
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = whole[:at]
    if cut.strip() != whole.strip():
        with pytest.raises(UnreadableRecord):
            decode(cut, "file")
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))
    try:
        assert isinstance(decode(bytes(flipped), "file"), Workload)
    except UnreadableRecord as refusal:
        assert "file" in str(refusal)


def put(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def link(folder: Path) -> Path:
    target = put(folder, "elsewhere", encode(RECORD))
    (folder / "k.json").symlink_to(target)
    return folder / "k.json"


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "k.json")
    return folder / "k.json"


def directory(folder: Path) -> Path:
    (folder / "k.json").mkdir()
    return folder / "k.json"


def version(number: int) -> bytes:
    return encode(RECORD).replace(b'"version": 1', b'"version": %d' % number)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: put(folder, "k.json", b""),
        lambda folder: put(folder, "k.json", encode(RECORD)[:-5]),
        lambda folder: put(folder, "k.json", b'{"version":1,"key":"\xff"}'),
        lambda folder: put(folder, "k.json", b'{"version":1,"key":"k","groups":[{"name":"k","reason":"\xff"}]}'),
        lambda folder: put(folder, "k.json", b"[" * 100_000),
        lambda folder: put(folder, "k.json", b'{"version":1,"x":' + b"[" * 100_000),
        lambda folder: put(folder, "k.json", version(3)),
        lambda folder: put(folder, "k.json", version(0)),
        lambda folder: put(folder, "k.json", encode(msgspec.structs.replace(RECORD, key="another"))),
        lambda folder: put(folder, "k.json", encode(RECORD) + b" " * (5 << 20)),
        link,
        fifo,
        directory,
    ],
    ids=[
        "empty",
        "truncated",
        "not-utf8",
        "not-utf8-later",
        "deep",
        "deep-inside",
        "newer",
        "version-0",
        "wrong-key",
        "huge",
        "link",
        "fifo",
        "directory",
    ],
)
def test_unreadable_records_are_reported_kept_and_do_not_hide_others(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    path = make(tmp_path)
    good = workload("z")
    save(Store(str(tmp_path)), good)
    put(tmp_path, ".half.json.new", b"{")
    before = os.lstat(path)
    store = Store(str(tmp_path))
    unreadable, found = list(store.read_all())
    assert isinstance(unreadable, UnreadableRecord)
    assert str(path) in str(unreadable)
    assert found == good
    assert os.lstat(path).st_mtime_ns == before.st_mtime_ns
    save(store, RECORD)
    kept = os.lstat(f"{path}.unreadable")
    assert (kept.st_ino, kept.st_size) == (before.st_ino, before.st_size)
    assert [item for item in Store(str(tmp_path)).read_all() if isinstance(item, Workload)] == [RECORD, good]


@pytest.mark.parametrize("failures, is_read", [(1, True), (2, False)])
def test_a_record_is_read_again_after_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, is_read: bool
) -> None:
    """A group without a record and without tasks was removed, although the error had passed."""
    save(Store(str(tmp_path)), RECORD)
    left = iter(range(failures))

    def fail(path: str) -> bytes:
        if next(left, None) is not None:
            raise NotRead("cannot read", path=path, errno=errno.EIO)
        return read_file(path)

    monkeypatch.setattr(store_module, "read_file", fail)
    (item,) = Store(str(tmp_path)).read_all()
    assert isinstance(item, Workload) == is_read


def test_missing_records_folder_is_reported() -> None:
    with pytest.raises(NotWritten, match=r"/nowhere.*ENOENT.*restart resctrlmond"):
        save(Store("/nowhere"), RECORD)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "k.json").mkdir()
    with pytest.raises(NotWritten, match="EISDIR"):
        save(Store(str(tmp_path)), RECORD)
    assert os.listdir(tmp_path) == ["k.json"]


def test_records_of_pods_are_readable_only_by_the_group(tmp_path: Path) -> None:
    save(Store(str(tmp_path)), RECORD)
    assert (tmp_path / "k.json").stat().st_mode & 0o777 == 0o640


def test_a_crash_loop_does_not_make_a_record_grow_for_ever() -> None:
    record = RECORD.with_member(Member(id="sandbox", kind="sandbox", owner="oci"))
    for number in range(3 * MAX_ENDED_MEMBERS):
        record = record.with_member(Member(id=f"{number}", kind="container", owner="oci", ended_at=utc_now()))
    assert [member.id for member in record.living] == ["sandbox"]
    assert len(record.members) == MAX_ENDED_MEMBERS + 1
    assert record.members[-1].id == f"{3 * MAX_ENDED_MEMBERS - 1}"


def test_a_member_keeps_its_place() -> None:
    two = RECORD.with_member(Member(id="a", kind="c", owner="o")).with_member(Member(id="b", kind="c", owner="o"))
    assert two.with_member(two.members[0]) == two
    assert [member.id for member in two.with_member(Member(id="a", kind="x", owner="o")).members] == ["a", "b"]


def test_an_owner_claims_once() -> None:
    twice = RECORD.with_claim("a", "1").with_claim("a", "2").with_claim("b", "3", EndRule.MEMBERS)
    last = Claim("b", "3", EndRule.MEMBERS)
    assert twice.claims == (Claim("a", "1", EndRule.RELEASE), last)
    assert twice.without_claim("a").claims == (last,)
    assert twice.without_claim("c") == twice


def test_a_claim_keeps_its_rule_until_its_owner_names_another() -> None:
    once = RECORD.with_claim("a", "1", EndRule.CONTAINER)
    assert once.with_claim("a", "2") == once
    assert once.with_claim("a", "2", EndRule.RELEASE).claims == (Claim("a", "1", EndRule.RELEASE),)


def test_the_store_reports_changes_after_they_are_on_disk(tmp_path: Path) -> None:
    changes: list[tuple[str, Workload | None, bool]] = []
    store = Store(str(tmp_path))
    store.on_change = lambda key, record: changes.append((key, record, (tmp_path / "k.json").exists()))
    save(store, RECORD)
    save(store, RECORD)
    drop(store, "k")
    drop(store, "k")
    assert changes == [("k", RECORD, True), ("k", None, False)]


def test_the_end_of_a_transaction_is_reported_once_after_its_changes(tmp_path: Path) -> None:
    calls: list[str] = []
    store = Store(str(tmp_path))
    store.on_change = lambda key, _: calls.append(f"{key} changed")

    def try_lock(key: str) -> None:
        with store.transaction_if_free(key) as txn:
            calls.append(f"{key} ended, {'free' if txn else 'locked'}")

    def at_end(key: str) -> None:
        store.on_end = lambda _: None
        other = threading.Thread(target=try_lock, args=[key])
        other.start()
        other.join()

    for transaction in (store.transaction, store.transaction_if_free):
        store.on_end = at_end
        with contextlib.suppress(LookupError), transaction("k") as txn:
            assert txn
            txn.save(RECORD)
            txn.drop()
            raise LookupError
        assert calls == ["k changed", "k changed", "k ended, free"]
        calls.clear()


def test_the_store_does_not_keep_what_it_could_not_write(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "gone"))
    with pytest.raises(NotWritten):
        save(store, RECORD)
    assert store.get("k") is None


def test_a_transaction_has_what_was_saved_last_also_after_an_error(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with store.transaction("k") as txn:
        assert txn.find() is None
        txn.save(RECORD)
        later = replace(RECORD, generation=2)
        txn.save(later)
        (tmp_path / "k.json").unlink()
        (tmp_path / "k.json").mkdir()
        with pytest.raises(NotWritten):
            txn.save(replace(RECORD, generation=3))
        assert txn.workload == later


def test_key_has_one_writer_and_unused_locks_are_removed(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with store.transaction("k"), store.transaction("k"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(500):
        with store.transaction(str(number)):
            pass
    for thread in threads:
        thread.join()
    assert most == 1
    assert len(store._locks) == 0


def test_times() -> None:
    def age_s(text: str) -> float:
        then = boot_ns_at(text)
        assert then is not None
        return (boot_ns() - then) / 1e9

    assert 0 <= age_s(utc_now()) < 60
    assert age_s("2000-01-01T00:00:00.000000Z") > 8e8
    assert 0 <= age_s("2999-01-01T00:00:00.000000Z") < 60
    for nonsense in ("", "yesterday", "2000-01-01T00:00:00Z", "2000-13-01T00:00:00.000000Z"):
        assert boot_ns_at(nonsense) is None


def test_an_unreadable_record_that_was_set_aside_is_removed_after_its_time(tmp_path: Path) -> None:
    (tmp_path / "web.json").write_text("damaged")
    store = Store(str(tmp_path))
    store.load()
    drop(store, "web")
    kept = tmp_path / "web.json.unreadable"
    assert store.prune(3600) == []
    assert kept.exists()
    # After a restart it is known again.
    after = Store(str(tmp_path))
    assert after.load() == []
    assert after.prune(3600) == []
    assert after.prune(0) == [str(kept)]
    assert list(tmp_path.iterdir()) == []
    assert store.prune(0) == [], "another program removed it"


def test_a_claim_without_its_rule_is_refused() -> None:
    """Its rule was guessed from the owner's name."""
    data = json.loads(encode(RECORD.with_claim("oci", "2026-11-22T00:00:00Z", EndRule.CONTAINER)))
    del data["claims"][0]["ends"]
    with pytest.raises(UnreadableRecord, match="ends"):
        decode(json.dumps(data).encode(), "file")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def fail(store: Store, change: Workload, error: ResctrlError) -> None:
    """Save the change while no file can be read or written."""

    def refuse(before: Workload | None, now: Workload) -> None:
        raise error

    store.before_save, allowed = refuse, store.before_save
    with pytest.raises(type(error)):
        save(store, change)
    store.before_save = allowed


def is_flagged(store: Store) -> bool:
    return bool(os.stat(os.path.join(store.folder, "k.json")).st_mode & stat.S_ISVTX)


@pytest.mark.parametrize("kind", [NotWritten, NotRead])
def test_mark_is_kept_for_any_error_of_its_write(store: Store, kind: type[ResctrlError]) -> None:
    exact = save(store, workload("k", nonce=1, has_begin=True, proof=SHOWN))
    fail(store, exact.doubted(exact.first, WHY), kind("full", errno=errno.EMFILE))
    known = store.known("k")
    assert (baseline_of(known), verdict(known).reasons, is_flagged(store)) == (Quality.LATE, (text_of(WHY),), True)
    save(store, replace(exact, priority=3))
    assert not is_flagged(store)
    again = Store(store.folder)
    assert again.load() == []
    assert (baseline_of(again.known("k")), again.known("k").priority) == (Quality.LATE, 3)


def test_a_mark_that_the_last_daemon_could_not_write_makes_the_next_one_estimate(store: Store) -> None:
    exact = save(store, workload("k", nonce=1, has_begin=True, proof=SHOWN))
    fail(store, exact.doubted(exact.first, WHY), NotWritten("full", errno=errno.ENOSPC))
    again = Store(store.folder)
    assert again.load() == []
    assert baseline_of(again.known("k")) is Quality.ESTIMATED
    assert is_flagged(again)
    save(again, again.known("k"))
    assert not is_flagged(again)


def test_a_group_that_was_not_created_marks_nothing_when_it_is(store: Store) -> None:
    waits = save(store, workload("k", nonce=1, boot_id="b", proof=SHOWN))
    waits = save(store, waits.with_group(replace(waits.first, state=GroupState.PENDING)))
    begun = replace(waits.first, state=GroupState.CREATED, has_begin=True, doubts=(WHY,))
    fail(store, waits.with_group(begun), NotWritten("full", errno=errno.ENOSPC))
    for daemon in (store, Store(store.folder)):
        daemon.load()
        saved = save(daemon, waits.with_group(replace(begun, doubts=())))
        assert (baseline_of(saved), verdict(saved).reasons) == (Quality.EXACT, ())
        save(daemon, waits)


def test_a_group_is_returned_with_the_marks_that_were_written_with_it(store: Store) -> None:
    """The caller saved the group without them again, and the mark was lost."""
    exact = save(store, workload("k", nonce=1, has_begin=True, proof=SHOWN))
    fail(store, exact.doubted(exact.first, WHY), NotWritten("full", errno=errno.ENOSPC))
    with store.transaction("k") as txn:
        group = txn.save_group(replace(exact.first, reason="ends"))
        txn.save_group(replace(group, state=GroupState.ENDING))
    first = Store(store.folder)
    assert first.load() == []
    assert (baseline_of(first.known("k")), verdict(first.known("k")).reasons) == (Quality.LATE, (text_of(WHY),))


def test_pending_workloads_are_listed_until_their_group_exists_or_they_are_dropped(store: Store) -> None:
    waits, stands = workload("waits", State.PENDING), workload("stands")
    save(store, stands)
    save(store, waits)
    save(store, workload("gone", State.PENDING))
    drop(store, "gone")
    again = Store(store.folder)
    assert again.load() == []
    for daemon in (store, again):
        assert daemon.pending() == [waits]
        save(daemon, workload("waits"))
        assert daemon.pending() == []
        save(daemon, waits)


def test_workloads_that_lack_counters_are_listed_until_they_have_them_or_are_dropped(store: Store) -> None:
    def lacking(key: str) -> Workload:
        made = workload(key)
        return made.with_group(replace(made.first, unassigned=(("mon_L3_00", "mbm_total_bytes"),)))

    save(store, workload("has"))
    save(store, lacking("lacks"))
    save(store, lacking("gone"))
    drop(store, "gone")
    again = Store(store.folder)
    assert again.load() == []
    for daemon in (store, again):
        assert daemon.without_counters() == [lacking("lacks")]
        save(daemon, workload("lacks"))
        assert daemon.without_counters() == []
        save(daemon, lacking("lacks"))


def test_finished_runs_are_apart_in_the_order_of_their_ends_also_after_a_restart(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for key in "abcd":
        save(store, workload(key))
    for key, at in (("c", 1), ("a", 2)):
        save(store, workload(key, State.COMPLETED, completed_ns=at))
    claim = Claim("oci", "2026-01-01T00:00:00Z", EndRule.RELEASE)
    save(store, workload("d", State.LOST, completed_ns=3, claims=(claim,)))
    for of in (store, loaded(tmp_path)):
        assert [found.key for found in of.finished()] == ["c", "a"]
        assert [found.key for found in of.unfinished()] == ["b", "d"], "a lost run that is claimed is resumed"
    save(store, workload("c", generation=2))
    drop(store, "a")
    assert list(store.finished()) == []
    assert [found.key for found in store.unfinished()] == ["b", "c", "d"]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([*State, None]), st.sampled_from(["", "gold"])), max_size=12
    )
)
def test_the_owner_of_a_group_is_the_workload_that_a_search_finds(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, State | None, str]]
) -> None:
    store = Store(str(tmp_path_factory.mktemp("records")))
    for key, state, class_ in changes:
        if state is None:
            drop(store, key)
        else:
            save(store, workload(key, state, class_=class_))
        for of in (store, loaded(Path(store.folder))):
            for ref in (GroupRef(class_, name) for class_ in ("", "gold") for name in "abc"):
                found = [one for one in of.unfinished() if one.group_at(ref) is not None]
                assert [one for one in (of.owner_of(ref),) if one is not None] == found


def test_a_group_has_its_owner_at_each_step_of_a_save(tmp_path: Path) -> None:
    """A thread that moved a task out of the group meanwhile found no owner, and the totals stayed exact."""
    store = Store(str(tmp_path))
    ref = save(store, workload("k")).first.ref
    found = []

    def look(frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code.co_filename == store_module.__file__:
            owner = store.owner_of(ref)
            found.append(owner.key if owner is not None else "")
        return look

    before = sys.gettrace()
    sys.settrace(look)  # a thread can be interrupted before each line
    try:
        save(store, workload("k", in_limbo=True))
    finally:
        sys.settrace(before)
    assert set(found) == {"k"}
    moved = save(store, workload("k", class_="gold")).first.ref
    owners = [store.owner_of(place) for place in (ref, moved)]
    assert [owner.key if owner is not None else "" for owner in owners] == ["", "k"]


def test_a_directory_of_two_records_has_an_owner_until_both_have_ended(tmp_path: Path) -> None:
    """The end of one of them left the group of the other without an owner."""
    store = Store(str(tmp_path))
    first = save(store, workload("a"))
    second = save(store, replace(workload("b"), groups=(replace(workload("b").first, name=first.first.name),)))
    ref = first.first.ref
    assert second.first.ref == ref
    drop(store, "b")
    owner = store.owner_of(ref)
    assert owner is not None
    assert owner.key == "a"
    drop(store, "a")
    assert store.owner_of(ref) is None
    assert not store._owners


def loaded(folder: Path) -> Store:
    store = Store(str(folder))
    store.load()
    return store


def test_a_late_member_that_could_not_be_saved_is_kept(store: Store) -> None:
    member = Member("m", "process", "o", pid=7, late=False)
    exact = save(store, workload("k", nonce=1, has_begin=True, proof=SHOWN, ids=(1, 2), members=(member,)))
    assert baseline_of(exact) is Quality.EXACT
    fail(store, exact.with_member(replace(member, late=True)), NotWritten("full", errno=errno.ENOSPC))
    assert baseline_of(store.known("k")) is Quality.LATE
    save(store, exact)
    again = Store(store.folder)
    assert again.load() == []
    assert baseline_of(again.known("k")) is Quality.LATE


def test_a_workload_stays_late_when_its_late_members_are_forgotten() -> None:
    late = Member("late", "process", "o", pid=1, ended_at="then")
    of = workload("k", has_begin=True, proof=SHOWN, ids=(1, 2), members=(late,))
    for number in range(MAX_ENDED_MEMBERS + 5):
        of = of.with_member(replace(late, id=f"m{number}", late=False))
    assert len(of.members) == MAX_ENDED_MEMBERS
    assert baseline_of(of) is Quality.LATE
