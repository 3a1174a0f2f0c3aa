# SPDX-License-Identifier: Apache-2.0
"""The table of planted bugs, of the kind that a refactoring makes. ``make mutants`` runs them.

A new row: a bug that the code does not have, in the smallest text that occurs once in its file, and the tests that
must notice it. A row whose text is not found any more is an error: move the bug to where the code is now.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_WORKLOADS = "resctrlmond/workloads/"
_RESCTRL = "resctrlmond/resctrl/"
_API = "resctrlmond/api/"
_NRI = "resctrlmond/nri/"
_EXPORTER = "resctrlmond/exporter/"

MUTANTS = (
    Mutant(
        "what is known of a run's successor is forgotten with the run",
        _WORKLOADS + "upkeep/maintenance.py",
        """\
                if workload is not None and not workload.is_finished:
                    continue  # the next run of the key has begun
""",
        "",
        "tests/workloads/upkeep/test_skipped_ticks.py",
    ),
    Mutant(
        "a lost run that is claimed counts as finished, and is not resumed",
        _WORKLOADS + "model/workload.py",
        "return self.state.is_over and not self.is_interrupted and not self.existing_groups",
        "return self.state.is_over and not self.existing_groups",
        "tests/workloads/records/test_store.py tests/workloads/groups/test_resume.py",
    ),
    # -- workloads: pools of the machine
    Mutant(
        "a group that ended is counted again while its directory exists",
        _WORKLOADS + "machine/pools.py",
        "            ours[nonce] = _largest(ours.get(nonce, {}), counted)\n",
        "            ours[-nonce] = closed\n",
        "tests/workloads/machine/test_machine.py",
    ),
    Mutant(
        "the use of groups that ended is not kept",
        _WORKLOADS + "machine/pools.py",
        "        _add(self._state.ended[Pool.TRACKED], self._state.counted.pop(nonce))\n",
        "        self._state.counted.pop(nonce)\n",
        "tests/workloads/machine/test_machine.py",
    ),
    Mutant(
        "the last use of a group is not in the file before the group is removed",
        _WORKLOADS + "machine/pools.py",
        "            self._state.counted[group.nonce] = sums\n        self._save()\n",
        "            self._state.counted[group.nonce] = sums\n",
        "tests/workloads/machine/test_machine_file.py",
    ),
    Mutant(
        "a number of a pool falls after a restart",
        _WORKLOADS + "machine/pools.py",
        "        if use.number >= held:\n",
        "        if True:\n",
        "tests/workloads/machine/test_machine_file.py",
    ),
    Mutant(
        "what was used after a kill in a group that has ended is counted nowhere",
        _WORKLOADS + "groups/removal.py",
        "        _close_in_pool(ctx, txn, group)\n",
        "        pass\n",
        "tests/workloads/machine/test_machine_file.py",
    ),
    Mutant(
        "a workload without members ends exact while tasks of others run in its group",
        _WORKLOADS + "groups/ends.py",
        "    return not members or any(",
        "    return any(",
        "tests/workloads/machine/test_machine.py",
    ),
    Mutant(
        "an ended group that others removed after our removal failed is exact",
        _WORKLOADS + "machine/pools.py",
        "                if not is_own and REMOVED_BY_OTHERS",
        "                if False and REMOVED_BY_OTHERS",
        "tests/workloads/machine/test_machine_file.py",
    ),
    Mutant(
        "groups that a kill left as closed stay in the file for ever",
        _WORKLOADS + "upkeep/recovery.py",
        "            ctx.machine.fold()\n",
        "            pass\n",
        "tests/workloads/machine/test_machine_file.py",
    ),
    Mutant(
        "a closed group that still exists counts as removed",
        _WORKLOADS + "machine/pools.py",
        "        left -= {found.nonce for found in self._tree.scan() if found.gid == self._gid}\n",
        "",
        "tests/workloads/machine/test_machine_file.py",
    ),
    Mutant(
        "a value in the file of the pools is that of another counter",
        _WORKLOADS + "machine/state.py",
        "            packed[place] = ",
        "            packed[-1] = ",
        "tests/workloads/machine/test_machine_file.py",
    ),
    Mutant(
        "the file of the pools has the limit of a record",
        _WORKLOADS + "machine/state.py",
        "mode=_MODE, limit=_LIMIT)",
        "mode=_MODE)",
        "tests/workloads/machine/test_machine_file.py",
    ),
    Mutant(
        "a new mount passes for the one of the pools, with a changed attribute",
        _WORKLOADS + "machine/pools.py",
        " or mounting != self._mounting or root == self._root",
        " or root == self._root",
        "tests/workloads/machine/test_machine_file.py",
    ),
    Mutant(
        "groups that come and go during the reading of a class are not noticed",
        _RESCTRL + "class_counters.py",
        "if not is_same or _list_groups(class_, known, is_complete=True).keys() != before.keys():",
        "if not is_same:",
        "tests/workloads/machine/test_machine.py",
    ),
    Mutant(
        "directories of other programs that came and went are not noticed",
        _WORKLOADS + "machine/pools.py",
        "            if directory not in here:",
        "            if False:",
        "tests/workloads/machine/test_machine.py",
    ),
    # -- workloads: sums
    Mutant(
        "a run whose record does not state its end yet is not in the file of the sums",
        _WORKLOADS + "records/sums.py",
        "            self._counted[run] = counted\n            self._version += 1\n",
        "            self._version += 1\n",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "a start adds a run again that the file has and its record lacks",
        _WORKLOADS + "records/sums.py",
        "            if workload.uncounted and workload.is_finished:\n",
        "            if workload.uncounted and workload.is_finished:\n"
        "                self._counted.pop(run_of(workload), None)\n",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "a record does not state that the sums lack its run",
        _WORKLOADS + "records/store.py",
        "return workload if workload.uncounted == is_lacking else replace(workload, uncounted=is_lacking)",
        "del is_lacking\n        return workload",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "a reading from before an end counts the run twice",
        _WORKLOADS + "records/sums.py",
        "        if self._ends.get(workload.key, -1.0) >= begun:\n            return\n",
        "",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "a run that is between the file and its record is counted as running too",
        _WORKLOADS + "records/sums.py",
        "        if is_ending and run_of(workload) in self._counted:\n            return\n",
        "        del is_ending\n",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "an amount that was shown is taken back",
        _WORKLOADS + "records/sums.py",
        "use = self._shown.pop(workload.key, None) or RunUse(())",
        "self._shown.pop(workload.key, None)\n                use = RunUse(())",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "a sum falls while a workload has lost its group",
        _WORKLOADS + "verbs/read.py",
        "return self.sums.read([*usages, *lost], begun, self._ctx.store.get, list(groupings))",
        "return self.sums.read([*usages], begun, self._ctx.store.get, list(groupings))",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "an end encodes all names of the sums",
        _WORKLOADS + "records/sums_format.py",
        "of.encoded or _encode(name, of)",
        "_encode(name, of)",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "the names of the sums have no limit",
        _WORKLOADS + "records/sums.py",
        "sum(map(_takes_slot, known)) >= MAX_NAMES)",
        "False)",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "the next run of a key loses an end that the file of the sums lacks",
        _WORKLOADS + "records/store.py",
        "            sums.prepare_removal(before)\n",
        "            pass\n",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "a start believes a file of the sums that lacks a run without a record",
        _WORKLOADS + "records/sums.py",
        "                os.rename(self._path, self._path + _OUTDATED)\n",
        "                pass\n",
        "tests/workloads/records/test_sums.py",
    ),
    Mutant(
        "the files of a run that the sums lack are removed at its end",
        _WORKLOADS + "upkeep/maintenance.py",
        "            ttl_s = max(ttl_s, settings.snapshot_ttl_s)\n",
        "            pass\n",
        "tests/workloads/records/test_sums.py",
    ),
    # -- workloads: shared groups, RMIDs that units give up, memory settings, exposed files
    Mutant(
        "a unit with an RMID of its own stays a member of the shared group",
        _WORKLOADS + "rmids/overflow.py",
        "if (member.is_living or member.dormant) and not _is_same(wanted.get(member.id), member)",
        "if False",
        "tests/workloads/rmids/test_overflow.py",
    ),
    Mutant(
        "a unit that shares a group has its figures as exact",
        _WORKLOADS + "groups/units.py",
        "[Total(event(name), None, Quality.UNKNOWN, why) for",
        "[Total(event(name), None, Quality.EXACT, why) for",
        "tests/workloads/rmids/test_overflow.py",
    ),
    Mutant(
        "a unit is moved out of its slice, which counts it",
        _WORKLOADS + "rmids/overflow.py",
        "if not is_in_slice or _has(ctx.store.get(key), member):",
        "if True:",
        "tests/workloads/rmids/test_overflow.py",
    ),
    Mutant(
        "the workload of a client is used as a shared group",
        _WORKLOADS + "rmids/overflow.py",
        "if known is not None and not known.state.is_over and not is_overflow(known):",
        "if False:",
        "tests/workloads/rmids/test_overflow.py",
    ),
    Mutant(
        "tasks stay in the shared group after their unit has left it",
        _WORKLOADS + "rmids/overflow.py",
        "            tasks.take_out(ctx.tree, group.ref, cgroups.tasks(member.cgroup))\n",
        "            pass\n",
        "tests/workloads/rmids/test_overflow.py",
    ),
    Mutant(
        "a shared group without members keeps its RMID",
        _WORKLOADS + "rmids/overflow.py",
        "    if wanted or (seconds_since_ns(run.empty_since_ns) <",
        "    if True or (seconds_since_ns(run.empty_since_ns) <",
        "tests/workloads/rmids/test_overflow.py",
    ),
    Mutant(
        "a unit of a user shares the group of the system's slices",
        _WORKLOADS + "groups/units.py",
        '    if user := workload.attributes.get("user", ""):',
        '    if user := "":',
        "tests/workloads/rmids/test_overflow.py",
    ),
    Mutant(
        "the unit with the highest priority is the first to give up its RMID",
        _WORKLOADS + "rmids/rmid_transfer.py",
        "lowest = min((workload.priority",
        "lowest = max((workload.priority",
        "tests/workloads/rmids/test_rmid_transfer.py",
    ),
    Mutant(
        "a unit gives up the RMID that it has just got",
        _WORKLOADS + "rmids/rmid_transfer.py",
        "return is_running and is_settled and",
        "return is_running and",
        "tests/workloads/rmids/test_rmid_transfer.py",
    ),
    Mutant(
        "a container gives up its RMID",
        _WORKLOADS + "rmids/rmid_transfer.py",
        "is_own = is_unit(workload) and not is_overflow(workload)",
        "is_own = True",
        "tests/workloads/rmids/test_rmid_transfer.py",
    ),
    Mutant(
        "an exact service gives up its RMID before systemd was asked",
        _WORKLOADS + "rmids/rmid_transfer.py",
        "    if any(member.commands for member in workload.members):",
        "    if False:",
        "tests/workloads/rmids/test_taken_rmid.py",
    ),
    Mutant(
        "each tick takes another RMID for the same waiting group",
        _WORKLOADS + "rmids/rmid_transfer.py",
        "            taken.append(boot_ns())\n",
        "            pass\n",
        "tests/workloads/rmids/test_rmid_transfer.py",
    ),
    Mutant(
        "a busy unit gives up its RMID before an idle one",
        _WORKLOADS + "rmids/rmid_transfer.py",
        "key=lambda one: (_cpu_share(one), one.key)",
        "key=lambda one: (-_cpu_share(one), one.key)",
        "tests/workloads/rmids/test_rmid_transfer.py",
    ),
    Mutant(
        "an RMID is taken while another one in limbo becomes free soon",
        _WORKLOADS + "rmids/rmid_transfer.py",
        "if not groups or _is_freed_soon(groups[0]):",
        "if not groups:",
        "tests/workloads/rmids/test_rmid_transfer.py",
    ),
    Mutant(
        "tasks stay in the group of a unit until it is removed",
        _WORKLOADS + "rmids/rmid_transfer.py",
        "                take_out=functools.partial(_take_out, ctx),\n",
        "",
        "tests/workloads/rmids/test_rmid_transfer.py",
    ),
    Mutant(
        "the value of another program is replaced",
        _WORKLOADS + "profiles/unit_memory.py",
        "if known is not None and not known.is_ours(now):",
        "if False:",
        "tests/workloads/profiles/test_unit_memory.py",
    ),
    Mutant(
        "a change that was cut off before it was done counts as that of another program",
        _WORKLOADS + "profiles/unit_memory.py",
        " or (self.value is None and now == self.before)",
        "",
        "tests/workloads/profiles/test_unit_memory.py",
    ),
    Mutant(
        "the containers of pods get their memory settings twice",
        _WORKLOADS + "profiles/unit_memory.py",
        'is_of_pod = is_pod_uid(workload.key) or "pod.uid" in workload.attributes',
        "is_of_pod = False",
        "tests/workloads/profiles/test_unit_memory.py",
    ),
    Mutant(
        "a scope of a user's service manager is changed in that of the system",
        _WORKLOADS + "profiles/unit_memory.py",
        '    if _USER_MANAGER.search(f"{above}/"):',
        "    if False:",
        "tests/workloads/profiles/test_unit_memory.py",
    ),
    Mutant(
        "a unit is changed before its value from before is on disk",
        "resctrlmond/daemon/unit_memory.py",
        "            await self._save(unit, _changes(first, invocation))\n",
        "",
        "tests/workloads/profiles/test_unit_memory.py",
    ),
    Mutant(
        "another unit of the same name gets the value from before of the first one",
        "resctrlmond/daemon/unit_memory.py",
        'if found["Transient"] and known.invocation != invocation:',
        "if False:",
        "tests/workloads/profiles/test_unit_memory.py",
    ),
    Mutant(
        "a unit whose control group a user may change is limited by root",
        "resctrlmond/daemon/unit_memory.py",
        'if found.get("Delegate") and user not in ("", "root", "0"):',
        "if False:",
        "tests/workloads/profiles/test_unit_memory.py",
    ),
    Mutant(
        "the settings of a unit that has failed are not tried again",
        "resctrlmond/daemon/unit_memory.py",
        "        self._retries.add(unit)\n",
        "        pass\n",
        "tests/workloads/profiles/test_unit_memory.py",
    ),
    Mutant(
        "the files of a new run show the end of the one before",
        _WORKLOADS + "upkeep/exposures.py",
        "            if run != written.run:\n",
        "            if False:\n",
        "tests/workloads/upkeep/test_exposures.py",
    ),
    Mutant(
        "the folder of a container that runs is removed",
        _WORKLOADS + "upkeep/exposures.py",
        "if not inner or not any(cgroups.is_there(os.path.join(point, inner)) for point in points):",
        "if True:",
        "tests/workloads/upkeep/test_exposures.py",
    ),
    Mutant(
        "the folder of a container that is being created is removed",
        _WORKLOADS + "upkeep/exposures.py",
        "new_from = time.monotonic() - GRACE_S",
        "new_from = time.monotonic()",
        "tests/workloads/upkeep/test_exposures.py",
    ),
    Mutant(
        "events that the profile leaves out are exposed",
        _WORKLOADS + "upkeep/exposures.py",
        "return [reading for reading in found if workload.shows(reading.event)]",
        "return found",
        "tests/workloads/upkeep/test_exposures.py",
    ),
    Mutant(
        "a reading that failed replaces the exposed figures",
        _WORKLOADS + "upkeep/exposures.py",
        "        if usage.error:\n            return",
        "        if False:\n            return",
        "tests/workloads/upkeep/test_exposures.py",
    ),
    # -- exporter: sums and sockets
    Mutant(
        "a part of a sum that is not exact is not marked",
        _EXPORTER + "collector.py",
        "                _add_inexact(families, of, use, excess)\n",
        "",
        "tests/exporter/test_collector.py",
    ),
    Mutant(
        "only the first socket of the unit is served",
        _EXPORTER + "command.py",
        "for _, listener in sockets.passed_listeners()]",
        "for _, listener in sockets.passed_listeners()[:1]]",
        "tests/exporter/test_http.py",
    ),
    # -- workloads: groups of other programs
    Mutant(
        "an observed group is removed at its end",
        _WORKLOADS + "groups/removal.py",
        "    if group.observed:\n        return\n",
        "",
        "tests/workloads/verbs/test_observed.py",
    ),
    Mutant(
        "tasks of an observed container are moved",
        _WORKLOADS + "groups/placement.py",
        "    if txn.workload.is_observed:",
        "    if False:",
        "tests/workloads/verbs/test_observed.py",
    ),
    Mutant(
        "an observed group is cleared of tasks",
        _WORKLOADS + "groups/creation.py",
        "if quality is not Quality.UNKNOWN and not group.observed:",
        "if quality is not Quality.UNKNOWN:",
        "tests/workloads/verbs/test_observed.py",
    ),
    Mutant(
        "the use of an observed group is counted in two pools",
        _WORKLOADS + "machine/pools.py",
        "        self._ends += 1\n        if not self._state.since or group.observed:",
        "        self._ends += 1\n        if not self._state.since:",
        "tests/workloads/verbs/test_observed.py",
    ),
    Mutant(
        "a total of an observed group is exact",
        _WORKLOADS + "groups/creation.py",
        "group = group.downgraded(Quality.ESTIMATED, Reason.OBSERVED.text())",
        "pass",
        "tests/workloads/verbs/test_observed.py",
    ),
    Mutant(
        "the pod of an observed container says nothing about it",
        _WORKLOADS + "verbs/excluded.py",
        "        txn.save(workload.downgraded(workload.first, Quality.LATE, why))\n",
        "        del why\n",
        "tests/workloads/verbs/test_observed.py",
    ),
    Mutant(
        "a container whose Assign failed leaves its pod exact",
        _WORKLOADS + "verbs/excluded.py",
        "        if assignment.kind in CONTAINERS and assignment.member is not None:\n",
        "        if not error:\n",
        "tests/workloads/verbs/test_excluded.py",
    ),
    Mutant(
        "a gap of the witness leaves the figures exact",
        _WORKLOADS + "figures/verdict.py",
        "if seen.watch != workload.proof.watch:",
        "if False:",
        "tests/workloads/figures/test_verdict.py",
    ),
    Mutant(
        "use in the control group before the tasks were moved counts as use outside",
        _WORKLOADS + "figures/verdict.py",
        "used = {inode: outside_by.get(inode, 0) for inode in inodes}",
        "used = dict.fromkeys(inodes, 0)",
        "tests/workloads/evidence/test_witnessed.py tests/daemon/test_life_hook.py",
    ),
    Mutant(
        "the NRI plugin ends its connection while a container waits for a response",
        "resctrlmond/nri/session.py",
        "            not self._unanswered\n            and not self._transport",
        "            not self._transport",
        "tests/nri/test_reloads.py",
    ),
    Mutant(
        "a lost observed group is created again",
        _WORKLOADS + "groups/removal.py",
        "workload.first.boot_id == ctx.mark.boot_id and not workload.is_observed:",
        "workload.first.boot_id == ctx.mark.boot_id:",
        "tests/workloads/verbs/test_observed.py",
    ),
    Mutant(
        "another group of the name counts as the observed one",
        _WORKLOADS + "groups/location.py",
        "(found.ref, found.inode) == (group.ref, group.nonce)",
        "found.ref == group.ref",
        "tests/workloads/verbs/test_observed.py",
    ),
    Mutant(
        "a class of a runtime is not read when its container ends",
        _WORKLOADS + "groups/ends.py",
        "if group.observed or group.class_ == member.id:",
        "if group.observed:",
        "tests/workloads/verbs/test_observed.py",
    ),
    # -- workloads: ends
    Mutant(
        "ENDING is saved after the further groups end",
        _WORKLOADS + "groups/removal.py",
        """\
        workload = _summed(ctx, change(txn.workload))
""",
        """\
        _end_others(ctx, txn, reason)
        workload = _summed(ctx, change(txn.workload))
""",
        "tests/workloads/groups/test_cut.py tests/workloads",
    ),
    Mutant(
        "the last writes of other programs are not in the final quality",
        _WORKLOADS + "groups/removal.py",
        "    group, is_written = ctx.interference.after_last_reading(txn, group)\n",
        "    is_written = False\n",
        "tests/workloads/evidence/test_interference.py tests/workloads",
    ),
    Mutant(
        "a write that the kernel refuses hides one of another program",
        _RESCTRL + "foreign_writes.py",
        """\
                self._begun[directory] -= 1
                self._running -= 1
""",
        """\
                self._running -= 1
""",
        "tests/workloads/evidence/test_interference.py tests/workloads",
    ),
    Mutant(
        "moves of other programs are not counted",
        _WORKLOADS + "figures/verdict.py",
        "move.writer not in movers]",
        "move.writer in movers]",
        "tests/workloads/figures/test_verdict.py",
    ),
    Mutant(
        "moves are counted again by each look",
        _WORKLOADS + "figures/verdict.py",
        "moves=moves.last if is_due else proof.moves",
        "moves=proof.moves",
        "tests/workloads/figures/test_verdict.py",
    ),
    Mutant(
        "moves that the witness has forgotten are taken for none",
        _WORKLOADS + "evidence/witnessed.py",
        "if not proof.cgroups and moves.before > proof.moves:",
        "if False:",
        "tests/workloads/evidence/test_interference.py",
    ),
    Mutant(
        "moves of an earlier daemon are taken for those of another program",
        _WORKLOADS + "evidence/witnessed.py",
        "moves=look.moves.last, movers=(look.mover,)",
        "movers=(look.mover,)",
        "tests/workloads/evidence/test_interference.py",
    ),
    Mutant(
        "moves that were overwritten unread count as none",
        _RESCTRL + "witness.py",
        "tasks, before = tuple(new), oldest",
        "tasks = tuple(new)",
        "tests/resctrl/test_witness.py",
    ),
    Mutant(
        "a move that the witness is still recording is skipped",
        _RESCTRL + "witness.py",
        "elif oldest < number <= until:",
        "elif oldest < number:",
        "tests/resctrl/test_witness.py",
    ),
    Mutant(
        "control groups that were removed before the run began count as those of the run",
        _RESCTRL + "witness.py",
        "if each.parent in found and each.at_ns >= since_ns",
        "if each.parent in found",
        "tests/resctrl/test_witness.py",
    ),
    Mutant(
        "a removed control group of the same name below another parent counts as that of the path",
        _RESCTRL + "witness.py",
        "if each.parent in found and each.at_ns >= since_ns",
        "if each.at_ns >= since_ns",
        "tests/resctrl/test_witness.py",
    ),
    Mutant(
        "a file of removed control groups that was cut is read as whole",
        _RESCTRL + "witness.py",
        "if rest or not all(cgroup.name for cgroup in found):",
        "if not all(cgroup.name for cgroup in found):",
        "tests/resctrl/test_witness.py",
    ),
    Mutant(
        "tasks of others that a nested run hands on leave the outer one exact",
        _WORKLOADS + "groups/nested.py",
        "    if end.gave_others:\n",
        "    if False:\n",
        "tests/workloads/evidence/test_interference.py",
    ),
    Mutant(
        "a command whose own move was not seen is exact",
        _WORKLOADS + "evidence/witnessed.py",
        "            if moved and not seen.proof.cause",
        "            if False and not seen.proof.cause",
        "tests/workloads/evidence/test_interference.py",
    ),
    Mutant(
        "a small decrease of a counter leaves its total exact",
        _WORKLOADS + "figures/checkpoint.py",
        "            carried.setdefault(reading.event, 0)\n",
        "            pass\n",
        "tests/workloads/figures/test_checkpoint.py tests/workloads",
    ),
    Mutant(
        "a downgrade that could not be written is lost",
        _WORKLOADS + "records/store.py",
        " else _with_downgrades(before, _by_nonce(workload)))\n",
        " else before)\n",
        "tests/workloads/groups/test_cut.py tests/workloads",
    ),
    Mutant(
        "the undo of a failed Assign is lost while /run is full",
        _WORKLOADS + "records/store.py",
        "workload if is_undo else ",
        "",
        "tests/workloads/verbs/test_undo.py tests/workloads",
    ),
    Mutant(
        "completed_at is written before the links are gone",
        _WORKLOADS + "records/snapshot.py",
        """\
            for link in [entry.path for entry in entries if entry.is_symlink()]:
""",
        """\
            write_file(os.path.join(top, "completed_at"), completed_at.encode() + b"\\n")
            for link in [entry.path for entry in entries if entry.is_symlink()]:
""",
        "tests/workloads/groups/test_cut.py tests/workloads",
    ),
    Mutant(
        "the final totals are computed from begin values that the files do not have any more",
        _WORKLOADS + "records/snapshot.py",
        "        # The totals at the end are those of the files.\n        self._begin.pop(subfolder, None)\n",
        "",
        "tests/workloads/records/test_snapshot.py tests/workloads",
    ),
    Mutant(
        "children that cannot be listed for lack of descriptors count as not listed by the kernel",
        _RESCTRL + "processes.py",
        '            if error.errno in LACKS:\n                raise not_read(error, f"list the children',
        '            if False:\n                raise not_read(error, f"list the children',
        "tests/workloads/test_no_descriptors.py tests/workloads",
    ),
    Mutant(
        "the last reading does not wait for the energy lag",
        _WORKLOADS + "groups/removal.py",
        "            if any(event(reading.event).lags for reading",
        "            if all(event(reading.event).lags for reading",
        "tests/workloads/groups/test_lag.py tests/workloads",
    ),
    Mutant(
        "an adopted group's task need only live",
        _WORKLOADS + "groups/ends.py",
        "return ctx.tree.membership(tid) == Membership(ref.class_, ref.name)",
        "return ctx.tree.membership(tid) is not None",
        "tests/workloads/upkeep/test_maintenance.py tests/workloads",
    ),
    Mutant(
        "linger counts from the end of the first member",
        _WORKLOADS + "groups/ends.py",
        "idle_ns=boot_ns()",
        "idle_ns=workload.idle_ns or boot_ns()",
        "tests/workloads/upkeep/test_maintenance.py tests/workloads",
    ),
    Mutant(
        "a claim without a living member is over while a member lives",
        _WORKLOADS + "groups/claims.py",
        """\
    if workload.living:
        return -1.0
""",
        "",
        "tests/workloads/upkeep/test_maintenance.py tests/workloads",
    ),
    Mutant(
        "a container in a pod is known by its first process alone",
        _WORKLOADS + "groups/ends.py",
        "return not runs(member) and not (member.cgroup and cgroups.is_populated(member.cgroup))",
        "return not runs(member)",
        "tests/workloads/upkeep/test_maintenance.py tests/workloads",
    ),
    Mutant(
        "checkpoints are skipped although tasks of the workload have run",
        _WORKLOADS + "upkeep/maintenance.py",
        "        return self._activity(workload) != last.activity\n",
        "        return False\n",
        "tests/workloads/upkeep/test_skipped_ticks.py",
    ),
    Mutant(
        "checkpoints are skipped although groups can lose their counters",
        _WORKLOADS + "upkeep/maintenance.py",
        "is_final = has_slept and not self._has_assigned_counters()",
        "is_final = has_slept",
        "tests/workloads/upkeep/test_skipped_ticks.py",
    ),
    Mutant(
        "a lost run counts what it used until its last checkpoint as exact",
        _WORKLOADS + "records/totals.py",
        "        if group.state is GroupState.LOST and time != completed_at:\n",
        """\
        if group.state is GroupState.LOST and time:
            continue
        if group.state is GroupState.LOST and time != completed_at:
""",
        "tests/workloads/figures/test_checkpoint.py tests/workloads",
    ),
    Mutant(
        "the group is removed before its end is written",
        _WORKLOADS + "groups/removal.py",
        """\
    else:
        try:
            group = location.follow_group(ctx, txn, group)
""",
        """\
    else:
        ctx.tree.remove(group.ref)
        try:
            group = location.follow_group(ctx, txn, group)
""",
        "tests/workloads/test_manager.py tests/workloads",
    ),
    # -- workloads: the queue for RMIDs
    Mutant(
        "the RMID queue goes on after a refusal",
        _WORKLOADS + "rmids/rmid_queue.py",
        "                rmid_transfer.take(ctx, queue, guard)\n            return\n",
        "                rmid_transfer.take(ctx, queue, guard)\n            continue\n",
        "tests/workloads/rmids/test_rmid_queue.py tests/workloads",
    ),
    Mutant(
        "the RMID queue goes by priority from low to high",
        _WORKLOADS + "groups/queue_order.py",
        "not of.group.observed, -of.workload.priority",
        "not of.group.observed, of.workload.priority",
        "tests/workloads/groups/test_plan.py tests/workloads",
    ),
    Mutant(
        "units take the RMIDs that are kept for containers",
        _WORKLOADS + "groups/creation.py",
        "if workload.priority < 0:",
        "if False:",
        "tests/workloads/test_unit_watch.py tests/workloads",
    ),
    Mutant(
        "new requests overtake those that wait",
        _WORKLOADS + "groups/queue_order.py",
        "of.workload.priority >= workload.priority",
        "of.workload.priority > workload.priority",
        "tests/workloads/rmids/test_rmid_queue.py tests/workloads",
    ),
    Mutant(
        "a group that waited has an exact baseline",
        _WORKLOADS + "groups/queue_order.py",
        "        if workload.group_of(member).folder == group.folder\n",
        "        if workload.group_of(member).folder != group.folder\n",
        "tests/workloads/rmids/test_rmid_queue.py tests/workloads",
    ),
    # -- workloads: recovery
    Mutant(
        "a record of another boot finds its group",
        _WORKLOADS + "groups/plan.py",
        "same_boot = group.boot_id == boot_id",
        "same_boot = True",
        "tests/workloads/groups/test_plan.py tests/workloads",
    ),
    Mutant(
        "groups without the mark are adopted at a start",
        _WORKLOADS + "groups/plan.py",
        "for found in tree if found.gid == gid}",
        "for found in tree}",
        "tests/workloads/groups/test_plan.py tests/workloads",
    ),
    Mutant(
        "a group without a record is removed although it has tasks",
        _WORKLOADS + "upkeep/recovery.py",
        "if not ctx.tree.tasks(found.ref):",
        "if ctx.tree.tasks(found.ref) is not None:",
        "tests/workloads/upkeep/test_maintenance.py tests/workloads",
    ),
    Mutant(
        "a member that was joining at a kill is exact",
        _WORKLOADS + "groups/placement.py",
        "if member.joining else workload)",
        "if False else workload)",
        "tests/workloads/groups/test_cut.py tests/workloads",
    ),
    Mutant(
        "a lost run is begun anew without a delay",
        _WORKLOADS + "groups/resumption.py",
        "return min(RESUME_S * 2.0 ** min(losses, 16), MAX_RESUME_S)",
        "return 0.0",
        "tests/workloads/groups/test_resume.py tests/workloads",
    ),
    # -- workloads: joining and moving
    Mutant(
        "a failed Assign leaves the tasks that it moved",
        _WORKLOADS + "verbs/assign.py",
        "for nonce, here in reversed(origins) if put_back(ctx.tree, here, own)}",
        "for nonce, here in reversed(origins)}",
        "tests/workloads/groups/test_follow.py tests/workloads",
    ),
    Mutant(
        "a group in two classes is counted in one of them",
        _WORKLOADS + "records/totals.py",
        "for group in workload.groups if snapshots.exists(",
        "for group in workload.groups[:1] if snapshots.exists(",
        "tests/workloads/groups/test_classes.py tests/workloads",
    ),
    Mutant(
        "links still lead to the old class after a move",
        _WORKLOADS + "groups/location.py",
        "    ctx.snapshots.relink(workload.subfolder(group), ctx.tree.full_path(group.ref), workload.shows)\n",
        "",
        "tests/workloads/groups/test_classes.py tests/workloads",
    ),
    Mutant(
        "a start trusts a file quality that does not include the last checkpoint",
        _WORKLOADS + "upkeep/quality_stamps.py",
        "all(numbers) and run.kept_numbers == numbers",
        "all(numbers)",
        "tests/workloads/upkeep/test_quality_stamps.py",
    ),
    Mutant(
        "a start trusts a file quality although the record has changed",
        _WORKLOADS + "upkeep/quality_stamps.py",
        "return known is not None and known == _stamps(ctx, workload)",
        "return known is not None",
        "tests/workloads/upkeep/test_quality_stamps.py",
    ),
    Mutant(
        "a task that stayed outside does not make its group late",
        _WORKLOADS + "verbs/assign.py",
        "if member.late or member.tasks_outside or why:",
        "if member.late or why:",
        "tests/workloads/test_manager.py tests/workloads/groups/test_follow.py tests/workloads",
    ),
    Mutant(
        "a rejected member that ran in a group leaves its totals exact",
        _WORKLOADS + "verbs/assign.py",
        "        if group.nonce in used:\n",
        "        if group.nonce not in used:\n",
        "tests/workloads/verbs/test_undo.py tests/workloads",
    ),
    Mutant(
        "a rejected Assign gives a group that was created again the quality of the old one",
        _WORKLOADS + "verbs/assign.py",
        "    if old is None or old.created_ns != group.created_ns:\n",
        "    if old is None:\n",
        "tests/workloads/evidence/test_strangers.py tests/workloads",
    ),
    Mutant(
        "an error of the last sweep leaves the totals exact",
        _WORKLOADS + "groups/placement.py",
        "        txn.save(workload.with_late(member, Reason.NOT_SWEPT_AT_END.text(member=member.id, error=error)))\n",
        "        txn.save(workload)\n",
        "tests/workloads",
    ),
    Mutant(
        "a member that ended while its group waited leaves the totals exact",
        _WORKLOADS + "groups/queue_order.py",
        "members = [member for member in workload.members if member.has_tasks]",
        "members = [member for member in workload.living if member.has_tasks]",
        "tests/workloads/rmids/test_rmid_queue.py tests/workloads",
    ),
    Mutant(
        "a new group that cannot be removed is forgotten",
        _WORKLOADS + "groups/removal.py",
        "    elif group.state is GroupState.PENDING:\n",
        "    elif group.state is GroupState.ENDING:\n",
        "tests/workloads/verbs/test_undo.py tests/workloads",
    ),
    Mutant(
        "a member of a failed Assign that ends outside leaves its totals exact",
        _WORKLOADS + "groups/ends.py",
        "    if member.joining:\n",
        "    if not member.joining:\n",
        "tests/workloads/verbs/test_undo.py tests/workloads",
    ),
    # -- workloads: figures
    Mutant(
        "a workload that ended while no daemon ran is exact",
        _WORKLOADS + "upkeep/recovery.py",
        " as txn:\n                ends.add_unseen_end(ctx, txn)\n",
        " as txn:\n                pass\n",
        "tests/workloads/groups/test_unseen_end.py tests/workloads",
    ),
    Mutant(
        "a late read replaces newer values",
        _WORKLOADS + "records/snapshot.py",
        "if begun_ns < self._read_until.get(subfolder, 0) or",
        "if",
        "tests/workloads/figures/test_checkpoint.py tests/workloads",
    ),
    Mutant(
        "an event without a baseline counts the past of its RMID",
        _WORKLOADS + "figures/accounting.py",
        "return None if run.was_active_at_begin else 0",
        "return 0",
        "tests/workloads/figures/test_counter_words.py tests/workloads",
    ),
    Mutant(
        "bandwidth events that count something else are exact",
        _WORKLOADS + "groups/counters.py",
        "    if group.transactions:\n",
        "    if False:\n",
        "tests/workloads/figures/test_counter_words.py tests/workloads",
    ),
    Mutant(
        "a new run keeps the CPU times of the last one",
        _WORKLOADS + "evidence/run_state.py",
        "if state is None or state.generation != generation:",
        "if state is None:",
        "tests/workloads",
    ),
    Mutant(
        "tasks that are alive are not in what the witness has seen",
        _RESCTRL + "witness.py",
        "if (rest := int(cpu_ns) - int(charged_ns)) > 0:",
        "if (rest := 0) > 0:",
        "tests/resctrl/test_witness.py",
    ),
    Mutant(
        "a counter that went back is not called estimated",
        _WORKLOADS + "figures/accounting.py",
        "return _Delta(end.number, Quality.ESTIMATED, Reason.RESET.text(domain=domain))",
        "return _Delta(end.number, Quality.EXACT)",
        "tests/workloads/figures/test_accounting.py tests/workloads",
    ),
    Mutant(
        "a sum is as good as its best part",
        _WORKLOADS + "model/states.py",
        "return max(qualities, key=_RANKS.__getitem__)",
        "return min(qualities, key=_RANKS.__getitem__)",
        "tests/workloads/figures/test_accounting.py tests/workloads",
    ),
    Mutant(
        "a domain is counted in addition to its sub-domains",
        _WORKLOADS + "figures/accounting.py",
        "in sorted(counters - sums):",
        "in sorted(counters):",
        "tests/workloads/figures/test_accounting.py tests/workloads",
    ),
    Mutant(
        "a missing domain leaves the sum exact",
        _WORKLOADS + "figures/accounting.py",
        "    if len(known) < len(deltas):\n",
        "    if not known:\n",
        "tests/workloads/figures/test_accounting.py tests/workloads",
    ),
    Mutant(
        "a counter without a number at some reading in between is exact",
        _WORKLOADS + "figures/accounting.py",
        "    if past.has_gap:\n",
        "    if False:\n",
        "tests/workloads/figures/test_accounting.py tests/workloads",
    ),
    Mutant(
        "the workload that lost a task to a take-over is exact",
        _WORKLOADS + "evidence/takeover.py",
        "group.downgraded(Quality.LATE, Reason.TAKEN_OVER.text(key=key))",
        "group",
        "tests/workloads",
    ),
    Mutant(
        "tasks of a nested run are counted nowhere after its end",
        _WORKLOADS + "groups/removal.py",
        "        left_tasks = nested.give_back(ctx, txn.workload)\n",
        "        left_tasks = False\n",
        "tests/workloads/groups/test_nested.py",
    ),
    Mutant(
        "the outer run is exact although tasks of a nested one could not return",
        _WORKLOADS + "groups/nested.py",
        "_with_left_tasks(workload, part) if end.left_tasks else workload",
        "workload",
        "tests/workloads/groups/test_nested.py",
    ),
    Mutant(
        "a nested run is listed after its first task has moved",
        _WORKLOADS + "groups/nested.py",
        "                outer.save(workload)\n",
        "                outer.find()\n",
        "tests/workloads/groups/test_nested.py",
    ),
    Mutant(
        "a nested run without a file and a record counts as unused",
        _WORKLOADS + "groups/nested.py",
        "missing=nested.missing or part.key))",
        "missing=nested.missing))",
        "tests/workloads/groups/test_nested.py",
    ),
    Mutant(
        "nested use is exact after a loss of the outer group",
        _WORKLOADS + "groups/runs.py",
        "replace(nested.fold(ctx, txn).nested, has_gap=True)",
        "nested.fold(ctx, txn).nested",
        "tests/workloads/groups/test_nested.py",
    ),
    Mutant(
        "an event that only some nested runs have counted is exact",
        _WORKLOADS + "groups/nested.py",
        "        parts += [_uncounted(end.totals, nested.totals), _uncounted(nested.totals, end.totals)]\n",
        "        pass\n",
        "tests/workloads/groups/test_nested.py",
    ),
    Mutant(
        "the outer run is exact although the group of a nested one was removed",
        _WORKLOADS + "groups/nested.py",
        "workload.left_tasks or were_moved or workload.state is State.LOST",
        "workload.left_tasks or were_moved",
        "tests/workloads/groups/test_nested.py",
    ),
    Mutant(
        "a run is nested in a later run with the key of one around it",
        _WORKLOADS + "verbs/assign.py",
        "*(around.key for around in nested.outer_workloads(ctx, outer))",
        "*outer.part_of",
        "tests/workloads/groups/test_nested.py",
    ),
    # -- resctrl
    Mutant(
        "undoing moves does not check the start time",
        _RESCTRL + "tasks.py",
        "is_same = processes.is_same(tid, start_time)",
        "is_same = processes.stat(tid) is not None",
        "tests/resctrl/test_reused_numbers.py tests/resctrl",
    ),
    Mutant(
        "a stranger with a moved thread's number keeps the group",
        _RESCTRL + "tasks.py",
        "        self.give_back(tid, last)\n",
        "",
        "tests/resctrl/test_reused_numbers.py tests/resctrl",
    ),
    Mutant(
        "a control group whose name begins like another's is inside it",
        _RESCTRL + "cgroups.py",
        '(where.get(name, "") + "/").startswith(inner + "/")',
        '(where.get(name, "") + "/").startswith(inner)',
        "tests/resctrl/test_cgroups.py tests/resctrl",
    ),
    Mutant(
        "threads in other groups are taken over unasked",
        _RESCTRL + "tasks.py",
        "is_elsewhere = where.group and where not in self.options.own and self.options.may_take is None",
        "is_elsewhere = False",
        "tests/resctrl/test_tasks.py tests/resctrl",
    ),
    Mutant(
        "a process is the same if only its number is",
        _RESCTRL + "processes.py",
        "if not process.has_ended() and start_time in (None, found.start_time):",
        "if not process.has_ended():",
        "tests/resctrl/test_processes.py tests/resctrl",
    ),
    Mutant(
        "Unavailable is read as no number, but as the status ok",
        _RESCTRL + "counters.py",
        '"Unavailable": Status.UNAVAILABLE,',
        '"Unavailable": Status.OK,',
        "tests/resctrl/test_counters.py tests/workloads",
    ),
    Mutant(
        "a group that cannot be marked stays",
        _RESCTRL + "tree.py",
        "                self.remove(ref)\n",
        "                pass\n",
        "tests/resctrl/test_create.py tests/resctrl",
    ),
    Mutant(
        "a plain directory passes for resctrl",
        _RESCTRL + "tree.py",
        'if mount.fstype == "resctrl":',
        "if mount.fstype != SIMULATION_FSTYPE:",
        "tests/resctrl",
    ),
    # -- profiles
    Mutant(
        "a pod stays exact without a container that started while no daemon ran",
        _WORKLOADS + "figures/verdict.py",
        "            outside_ns[home] = outside_ns.get(home, 0) + use.cpu_ns\n",
        "            inside_ns += use.cpu_ns\n",
        "tests/daemon/test_profiles_hook.py",
    ),
    Mutant(
        "a pod stays exact without a container that its profile excludes",
        _WORKLOADS + "verbs/profiled.py",
        "            mark_excluded(ctx, txn, Reason.EXCLUDED.text(member=member, profile=choice.name))\n",
        "            pass\n",
        "tests/daemon/test_profiles_hook.py",
    ),
    Mutant(
        "a container that runs apart is forgotten at a restart of the daemon",
        _WORKLOADS + "verbs/excluded.py",
        "    elif workload.profile and not is_pod_uid(workload.key):\n",
        "    elif False:\n",
        "tests/daemon/test_profiles_hook.py",
    ),
    Mutant(
        "a container that is assigned again gets another profile",
        _WORKLOADS + "verbs/profiled.py",
        " or _runs_in(ctx, assignment, canonical_key(assignment.key))",
        "",
        "tests/daemon/test_profiles_hook.py",
    ),
    Mutant(
        "a profile cannot change the class",
        _WORKLOADS + "verbs/profiled.py",
        "class_=profile.class_, allow_class_change=True",
        "class_=profile.class_, allow_class_change=False",
        "tests/daemon/test_profiles_hook.py",
    ),
    Mutant(
        "wrong profiles at a reload replace the old ones",
        "resctrlmond/daemon/live_config.py",
        """\
            self._report("profiles", f"the profiles are wrong, and {otherwise}: {error}", error)
""",
        """\
            self._report("profiles", f"the profiles are wrong, and {otherwise}: {error}", error)
            self._ctx.config.profiles = Profiles()
""",
        "tests/daemon/test_profiles_hook.py",
    ),
    Mutant(
        "an annotation for one container is ignored",
        _WORKLOADS + "profiles/profile.py",
        "if 0 < len(container) <= _MAX_CONTAINER_NAME:",
        "if False:",
        "tests/workloads/profiles/test_profiles.py",
    ),
    Mutant(
        "an empty annotation does not opt out",
        _WORKLOADS + "profiles/profile.py",
        """\
        if not value:
            return Choice(None""",
        """\
        if False:
            return Choice(None""",
        "tests/workloads/profiles/test_profiles.py",
    ),
    Mutant(
        "a fact that is not known meets a condition",
        _WORKLOADS + "profiles/profile.py",
        "known.get(key) and any(",
        "not known.get(key) or any(",
        "tests/workloads/profiles/test_profiles.py",
    ),
    Mutant(
        "another user can define a companion, which runs as root",
        "resctrlmond/configuration/profile_files.py",
        "if file.owner != 0:",
        "if False:",
        "tests/daemon/test_companion_profiles.py",
    ),
    Mutant(
        "a new run keeps the companion of the earlier one",
        "resctrlmond/daemon/companions.py",
        "if run and self._runs.get(key) == run:",
        "if run:",
        "tests/workloads/profiles/test_companions.py",
    ),
    Mutant(
        "each change tries again at once while systemd is missing",
        "resctrlmond/daemon/systemd_loop.py",
        "await self._started.wait()",
        "await self._woken.wait()",
        "tests/daemon/test_systemd_loop.py",
    ),
    Mutant(
        "a failure after hours of success has the pause of the failures before",
        "resctrlmond/daemon/systemd_loop.py",
        "        self._pause_s = _FIRST_PAUSE_S\n        self._report",
        "        self._report",
        "tests/daemon/test_systemd_loop.py",
    ),
    Mutant(
        "a start that fails is tried again without a pause",
        "resctrlmond/daemon/systemd_loop.py",
        "self._by_key[key] = asyncio.get_running_loop().time() + pause,",
        "self._by_key[key] = asyncio.get_running_loop().time(),",
        "tests/workloads/profiles/test_companions.py",
    ),
    Mutant(
        "a pod gets the companion that only its containers are to have",
        _WORKLOADS + "profiles/companions.py",
        "or (profile.watch is Watch.CONTAINER and is_pod_uid(workload.key))",
        "",
        "tests/workloads/profiles/test_companions.py",
    ),
    Mutant(
        "a value ends its place in a template",
        _WORKLOADS + "profiles/companion_settings.py",
        "or not _VALUE.fullmatch(value)",
        "",
        "tests/workloads/profiles/test_companion_settings.py",
    ),
    Mutant(
        "a file of the distribution replaces that of the administrator",
        "resctrlmond/configuration/profile_files.py",
        "found.setdefault(name, os.path.join(directory, name))",
        "found[name] = os.path.join(directory, name)",
        "tests/daemon/test_profile_files.py",
    ),
    Mutant(
        "a container that is a workload of its own is assigned to its pod after the list of the runtime",
        _NRI + "pods.py",
        "known.key == reported.id",
        "False",
        "tests/nri/test_profiles.py",
    ),
    Mutant(
        "a sandbox keeps the pod of another one that had its id",
        _NRI + "pods.py",
        "if isinstance(entry, Member) and isinstance(known, Member) and known.key == reported.id:",
        "if True:",
        "tests/nri/test_hostile_runtime.py",
    ),
    Mutant(
        "containers that are not watched are not listed again after a restart of the daemon",
        _NRI + "pods.py",
        "            member.is_excluded = False\n",
        "            pass\n",
        "tests/nri/test_profiles.py",
    ),
    # -- the interfaces
    Mutant(
        "an init with several threads has no control group of its own",
        _API + "oci_hook.py",
        "others -= set(processes.threads(state.pid))",
        "pass",
        "tests/daemon/test_life_hook.py",
    ),
    Mutant(
        "hooks that gave up are served before those that wait",
        _API + "hook_queue.py",
        "if call.caller.waits():",
        "if True:",
        "tests/api/test_hook_queue.py",
    ),
    Mutant(
        "a workload whose call hangs takes a thread for each of its hooks",
        _API + "hook_queue.py",
        "self._key == other._key or ",
        "",
        "tests/api/test_hook_queue.py",
    ),
    Mutant(
        "hooks wait for calls that hang",
        _API + "hook_queue.py",
        " if is_moving else 0",
        "",
        "tests/api/test_hook_queue.py",
    ),
    Mutant(
        "after the end of its hook, a container is added wherever its process is",
        _API + "oci_hook.py",
        "if caller.pid_namespaces or not _is_in_own_cgroup(state):",
        "if caller.pid_namespaces:",
        "tests/daemon/test_hook_bursts.py",
    ),
    Mutant(
        "a process that got the number of a container's is moved for it",
        _API + "oci_hook.py",
        "        _check_start(state.pid, caller)\n",
        "        pass\n",
        "tests/daemon/test_hook_bursts.py",
    ),
    Mutant(
        "a poststop ends the container that came back under its id",
        _API + "oci_hook.py",
        ", confirms=True",
        "",
        "tests/daemon/test_life_hook.py",
    ),
    Mutant(
        "a hook in another PID namespace is believed",
        _API + "access.py",
        "if self.pid_namespaces != 1:",
        "if self.pid_namespaces < 1:",
        "tests/daemon/test_life_hook.py",
    ),
    Mutant(
        "members of the group may write as well as read",
        _API + "access.py",
        "if access is Access.READ and self._readers & caller.groups:",
        "if self._readers & caller.groups:",
        "tests/api",
    ),
    Mutant(
        "the access to varlink methods is not checked",
        _API + "varlink/connection.py",
        "if method.check is not None:",
        "if False:",
        "tests/api/test_access.py tests/api",
    ),
    Mutant(
        "the access of D-Bus calls is checked by the header only, before they are decoded",
        _API + "dbus/server.py",
        "self._objects.resolve(call, caller)",
        "self._objects._target(call)",
        "tests/api/test_access.py tests/api",
    ),
    Mutant(
        "an annotation that holds no UID is passed over",
        _API + "oci_state.py",
        "is_wrong = bool(name) and not is_pod_uid(uid)",
        "is_wrong = bool(name) and not uid",
        "tests/hook/test_oci_state.py",
    ),
    Mutant(
        "not_moved counts nothing of tasks in other groups",
        _RESCTRL + "tasks.py",
        "self.not_moved.union(self.in_other_groups, *self.in_other_classes.values())",
        "self.not_moved",
        "tests/workloads tests/resctrl",
    ),
    # -- NRI
    Mutant(
        "a start time is kept over a list that brings another pid",
        _NRI + "pods.py",
        "entry.started = known.started if _pid(entry) == _pid(known) else 0",
        "entry.started = known.started",
        "tests/nri/test_pods.py tests/nri",
    ),
    Mutant(
        "a container that runs already is assigned as early",
        _NRI + "updater.py",
        "is_late = is_late or not is_held()",
        "is_late = not is_held()",
        "tests/nri",
    ),
    Mutant(
        "a pod ends with its first sandbox",
        _NRI + "updater.py",
        """\
            return
        self._refusals.pop(key, None)
""",
        """\
            pass
        self._refusals.pop(key, None)
""",
        "tests/nri/test_adapter.py tests/nri",
    ),
    Mutant(
        "the list is newer than the events before it",
        _NRI + "pods.py",
        """\
            if reported.id in self._newer_ids:
                continue
""",
        "",
        "tests/nri/test_pods.py tests/nri",
    ),
    Mutant(
        "unreported pods are released without a list",
        _NRI + "updater.py",
        """\
        if not self.pods.has_list:
            # Pods that the runtime has not listed yet may still run.
            return
""",
        "",
        "tests/nri/test_launched.py tests/nri",
    ),
    # -- the command, and the configuration
    Mutant(
        "a command that resctrlctl could not monitor runs nevertheless",
        "resctrlctl/run/verb.py",
        "if is_fatal and not args.best_effort:",
        "if False:",
        "tests/ctl/run/test_run.py",
    ),
    Mutant(
        "a target of run that is a part of a workload is measured as all of it",
        "resctrlctl/run/target.py",
        "is_one = len(found) == 1 and target.is_all_of(reply.workload)",
        "is_one = len(found) == 1",
        "tests/ctl/test_with_daemon.py",
    ),
    Mutant(
        "the command's exit status is lost",
        "resctrlctl/run/verb.py",
        "        return reports[-1].exit_status\n",
        "        return 0\n",
        "tests/ctl/run/test_run.py",
    ),
    Mutant(
        "a total that is not known is shown as 0",
        "resctrlctl/screen/format.py",
        'return "unknown"',
        'return "0"',
        "tests/ctl",
    ),
    Mutant(
        "a recording lacks workloads that lived between two readings",
        "resctrlctl/live/record.py",
        "ReadAllRequest(with_ended=True)",
        "ReadAllRequest()",
        "tests/ctl/live/test_record.py",
    ),
    Mutant(
        "a full disk leaves a part of a line in a recording",
        "resctrlctl/live/record.py",
        "            if self._can_cut:\n",
        "            if False:\n",
        "tests/ctl/live/test_record.py",
    ),
    Mutant(
        "the use before a recording is plotted as use during its first interval",
        "resctrlctl/live/series.py",
        "if created and created >= begin else None",
        "if created else None",
        "tests/ctl/live/test_plot.py",
    ),
    Mutant(
        "a name is HTML in the page of plot",
        "resctrlctl/live/plot_page.py",
        "{escape(curve.label)}</li>",
        "{curve.label}</li>",
        "tests/plot/test_page.py",
    ),
    Mutant(
        "hooks disable removes links of others",
        "resctrlctl/host/hooks.py",
        "return os.path.islink(path) and os.path.dirname(os.readlink(path)) == self.source",
        "return os.path.islink(path)",
        "tests/ctl/host/test_hooks.py",
    ),
    Mutant(
        "paths inside another are compared as text",
        "resctrlmond/configuration/config.py",
        'path.startswith(f"{folder}/")',
        "path.startswith(folder)",
        "tests/daemon/test_config.py",
    ),
    Mutant(
        "a start sends an entry of an ended workload without asking the journal",
        "resctrlmond/daemon/ledger.py",
        "                if self._is_starting:\n",
        "                if not run:\n",
        "tests/daemon/test_ledger.py",
    ),
    Mutant(
        "a failed write of an end repeats its entry in the journal",
        "resctrlmond/daemon/ledger.py",
        "if run in self._recorded:",
        "if not run:",
        "tests/daemon/test_ledger.py",
    ),
    Mutant(
        "a lost run that continues has an entry in the journal",
        _WORKLOADS + "records/store.py",
        "is_end = workload.is_finished and not before.is_finished and not is_undo",
        "is_end = workload.state.is_over and not before.state.is_over and not is_undo",
        "tests/daemon/test_ledger.py",
    ),
    Mutant(
        "changes after the end of a run become one with it",
        _API + "watches.py",
        "        self._open.pop(item.key, None)\n",
        "",
        "tests/api/test_watches.py",
    ),
    Mutant(
        "an end that was under way when a watch began is not reported",
        _API + "watches.py",
        """\
        if now.is_finished and not before.is_finished:
            return (ChangeKind.ENDED,)
""",
        "",
        "tests/api/test_watches.py",
    ),
    Mutant(
        "a client that does not read gets changes after those that were dropped",
        _API + "watches.py",
        """\
        if self._error is not None:
            return
        for""",
        """\
        for""",
        "tests/api/test_watches.py",
    ),
    Mutant(
        "a run of a key that was removed seems to be the run before it",
        _API + "watches.py",
        "return workload.generation, workload.first.nonce",
        "return workload.generation, 0",
        "tests/api/test_watches.py",
    ),
    Mutant(
        "a run is reported as ended again if the next one fails to start",
        _API + "watches.py",
        "    return now.state.is_over and now.generation < before.generation",
        "    return False",
        "tests/api/test_watches.py",
    ),
    Mutant(
        "report counts an entry of any sender",
        "resctrlctl/workloads/report.py",
        'return trusted == (UNIT, "0", MessageId.ENDED)',
        "return bool(trusted)",
        "tests/ctl/workloads/test_report.py",
    ),
    # -- the exporter
    Mutant(
        "a scrape misses workloads that have ended",
        _EXPORTER + "source.py",
        "with_ended=True",
        "with_ended=False",
        "tests/exporter/test_figures.py",
    ),
    Mutant(
        "a counter falls while its start stays",
        "resctrlmond/api/monotone.py",
        "and before[1] > value:",
        "and before[1] < 0:",
        "tests/exporter/test_collector.py",
    ),
    Mutant(
        "a figure that is held is not marked",
        _EXPORTER + "collector.py",
        "elif total.event in held:",
        "elif False:",
        "tests/exporter/test_collector.py",
    ),
    Mutant(
        "an event without a number is 0",
        _EXPORTER + "collector.py",
        """\
            if row is None or use.value is None:
                continue
            labels = (key, domain_number(use.domain), *filter(None, (row.label,)))
            value = float(use.value)
""",
        """\
            if row is None:
                continue
            labels = (key, domain_number(use.domain), *filter(None, (row.label,)))
            value = float(use.value or 0)
""",
        "tests/exporter/test_figures.py",
    ),
    Mutant(
        "a pod that moves has another class in its labels",
        _EXPORTER + "collector.py",
        'domain, first[1], "pod"',
        'domain, workload.class_, "pod"',
        "tests/exporter/test_names.py",
    ),
    Mutant(
        "a sum of the machine lacks a pool without a number",
        _EXPORTER + "collector.py",
        "and len(known) == len(values):",
        "and known:",
        "tests/exporter/test_names.py",
    ),
    Mutant(
        "a figure under the name of another exporter has no mark",
        _EXPORTER + "collector.py",
        "            if total.event not in self._events:\n",
        "            if total.event not in self._events or Names.RESCTRLMOND not in names:\n",
        "tests/exporter/test_names.py",
    ),
    Mutant(
        "a daemon that never ends its reply delays a scrape for ever",
        _EXPORTER + "source.py",
        "limit.start()",
        "pass",
        "tests/exporter/test_hostile_daemon.py",
    ),
    # -- the exporter, over OTLP
    Mutant(
        "a delta that was refused is lost",
        _EXPORTER + "otlp/pusher.py",
        "if self._ledger.temporality is Temporality.CUMULATIVE:",
        "if True:",
        "tests/exporter/test_otlp_truth.py",
    ),
    Mutant(
        "a delta is counted again after a restart",
        _EXPORTER + "otlp/ledger.py",
        "            os.replace(temporary, self._path)",
        "            pass",
        "tests/exporter/test_otlp_truth.py",
    ),
    Mutant(
        "a run that continues a lost one is counted twice over OTLP",
        _EXPORTER + "otlp/ledger.py",
        "if known is None and figures.continues:",
        "if False:",
        "tests/exporter/test_otlp_truth.py",
    ),
    Mutant(
        "the end of a run whose key is used again is not pushed",
        _EXPORTER + "otlp/ends.py",
        "            self._waiting[figures.run] = figures\n",
        "",
        "tests/exporter/test_otlp_truth.py",
    ),
    Mutant(
        "an end that the receiver has is pushed again",
        _EXPORTER + "otlp/points.py",
        "            self.known.is_final = True\n",
        "",
        "tests/exporter/test_otlp.py",
    ),
    Mutant(
        "ends pile up while a receiver refuses",
        _EXPORTER + "otlp/ends.py",
        "while len(self._waiting) > self._most:",
        "while False:",
        "tests/exporter/test_otlp_ledger.py",
    ),
    Mutant(
        "a run whose names change becomes a second resource",
        _EXPORTER + "otlp/points.py",
        "{**self._host, **instance, **known.attributes}",
        "{**self._host, **instance, **figures.attributes}",
        "tests/exporter/test_otlp.py",
    ),
)
