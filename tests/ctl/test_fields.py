# SPDX-License-Identifier: Apache-2.0
"""Each field of a reply changes the output of resctrlctl, or is in NOT_SHOWN of resctrlctl/workloads/render.py."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect as shapes
from msgspec.structs import replace

from resctrlctl.command import main
from resctrlctl.screen.layout import Sheet
from resctrlctl.workloads.render import NOT_SHOWN, render_workload
from resctrlctl.workloads.workload_table import FIELDS
from resctrlmond.api import types
from resctrlmond.api.verbs import VERBS
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import State
from tests.ctl.fake_manager import FakeManager, error
from tests.ctl.samples import Samples, present

# For each method whose reply resctrlctl prints: a command line that calls it.
COMMANDS = {
    "Read": ["show", "--raw", "k"],
    "Get": ["show", "--why", "k"],
    "List": ["list", "--all"],
    "ReadAll": ["list", "--columns", ",".join(FIELDS)],
    "ListPods": ["list", "--pods"],
    "ListUnwatched": ["list", "--all"],
    "ReadForeign": ["show", "foreign"],
    "Status": ["status"],
    "Create": ["create", "k"],
    "Assign": ["assign", "k", "--pid", str(os.getpid())],
    "Release": ["release", "k"],
    "Move": ["move", "k", "gold"],
}
# A field may change the output only for certain values of other fields, so several replies are tried.
REPLIES = 200


def fields(shape: shapes.Type, path: tuple[str, ...] = ()) -> Iterator[tuple[type, shapes.Field, tuple[str, ...]]]:
    """Yield each field of a type and of the types in it: its struct, the field and its path."""
    shape = present(shape)
    if isinstance(shape, shapes.ListType | shapes.VarTupleType):
        yield from fields(shape.item_type, path)
    if isinstance(shape, shapes.StructType):
        for field in shape.fields:
            yield shape.cls, field, (*path, field.name)
            yield from fields(field.type, (*path, field.name))


def changed(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """Return a copy of a reply with another value at a path; the reply itself if a list or field on it is empty."""
    if not path or not value:
        return value if path else new
    if isinstance(value, list | tuple):
        return type(value)([changed(value[0], path, new)])
    return replace(value, **{path[0]: changed(getattr(value, path[0]), path[1:], new)})


@pytest.fixture
def output_of(
    manager: FakeManager, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> Callable[[str, msgspec.Struct], tuple[str, str]]:
    """A function that returns the output of resctrlctl if a method of the daemon returns a reply."""

    def run(method: str, reply: msgspec.Struct) -> tuple[str, str]:
        manager.replies = {method: reply}
        assert main(["--socket", manager.socket, *COMMANDS[method]]) == 0
        return capsys.readouterr()

    assert environment["TZ"] == "UTC"
    manager.foreign.append(types.Foreign(class_="", name="foreign", path="/foreign"))
    manager.add("k")
    return run


def test_each_field_of_a_reply_is_shown_or_deliberately_not(
    manager: FakeManager, output_of: Callable[[str, msgspec.Struct], tuple[str, str]]
) -> None:
    not_shown = {kind.__name__: names for kind, names in NOT_SHOWN.items()}
    shown: set[tuple[type, str]] = set()
    declared: set[tuple[type, str]] = set()
    for method in COMMANDS:
        # "show" reads a foreign group only if there is no such workload.
        is_foreign = method == "ReadForeign"
        manager.refuse = {"Read": error("NoSuchWorkload", "there is no such workload")} if is_foreign else {}
        reply_type = shapes.type_info(VERBS[method].reply)
        left = [
            (kind, field, path)
            for kind, field, path in fields(reply_type)
            if field.name not in not_shown.get(kind.__name__, {}) and (kind, field.name) not in shown
        ]
        samples = Samples(random.Random(method))
        for _ in range(REPLIES):
            if shown >= {(kind, field.name) for kind, field, _ in left}:
                break
            reply = samples.of(reply_type)
            before = output_of(method, reply)
            for kind, field, path in left:
                other = changed(reply, path, samples.of(field.type, field.name))
                if (kind, field.name) not in shown and other != reply and output_of(method, other) != before:
                    shown.add((kind, field.name))
        declared |= {(kind, field.name) for kind, field, _ in left}
    hidden = sorted(f"{kind.__name__}.{name}" for kind, name in declared - shown)
    assert not hidden, (
        f"resctrlctl never shows {', '.join(hidden)}: show it in resctrlctl/workloads/render.py, or "
        "add it to NOT_SHOWN there, with the reason"
    )


class NewGroup(types.Workload, frozen=True, kw_only=True):
    """A workload with fields that resctrlctl does not know."""

    new_count: int
    new_flag: bool = True
    new_limit: int | None = None
    new_text: str = ""


def test_new_field_is_shown_unless_it_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: type[msgspec.Struct] = NewGroup
    monkeypatch.setitem(NOT_SHOWN, kind, NOT_SHOWN[types.Workload])
    new = NewGroup(
        key="k",
        class_="",
        state=State.ACTIVE,
        generation=1,
        baseline=Quality.EXACT,
        claims=(),
        members=(),
        attributes={},
        new_count=0,
    )

    def new_fields(workload: types.Workload) -> dict[str, tuple[str, ...]]:
        sheet = render_workload(types.ReadReply(workload=workload, readings=[], totals=[]))[-1]
        assert isinstance(sheet, Sheet)
        return {label: values for label, values in sheet.fields if label.startswith("New")}

    assert new_fields(new) == {"New count": ("0",)}
    changed = replace(new, new_flag=False, new_limit=0, new_text="text")
    assert new_fields(changed) == {
        "New count": ("0",),
        "New flag": ("false",),
        "New limit": ("0",),
        "New text": ("text",),
    }


@pytest.mark.parametrize("kind", NOT_SHOWN, ids=lambda kind: kind.__name__)
def test_not_shown_names_existing_fields(kind: type[msgspec.Struct]) -> None:
    unknown = set(NOT_SHOWN[kind]) - set(kind.__struct_fields__)
    assert not unknown, f"remove {unknown} from NOT_SHOWN[{kind.__name__}] in resctrlctl/workloads/render.py"
