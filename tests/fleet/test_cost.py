# SPDX-License-Identifier: Apache-2.0
"""The page states what the pods of a node cost Prometheus."""

from __future__ import annotations

import contextlib
import gzip
import random
import re
import uuid
from pathlib import Path

from tests.exporter.conftest import OPENMETRICS, Exporter, machine_of
from tests.fleet.conftest import PAGE

_TEXT = "text/plain;version=0.0.4"
# The numbers in the figures are not the same in each run, and random keys are compressed differently.
_ACCURACY = 0.05
_FIGURE = re.compile(r"^(\w*(joules_total|farads_total|bytes_total|occupancy_bytes)\{.*\}) \S+$", re.MULTILINE)


def stated() -> list[int]:
    """Return the numbers of the paragraph on 110 pods."""
    found = re.search(r"^110 pods\n\t(.*?)\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found
    return [int(number) for number in re.findall("[0-9]+", found[1])]


def with_use(text: str) -> str:
    """Return the text with the numbers of a day in the place of the figures, which are 0 and take little space."""
    chance = random.Random(1)

    def changed(figure: re.Match[str]) -> str:
        is_whole = figure[2].startswith(("bytes", "occupancy"))
        number = float(chance.randrange(10**7, 10**12)) if is_whole else round(chance.uniform(10, 10**5), 6)
        return f"{figure[1]} {number!r}"

    return _FIGURE.sub(changed, text)


def series(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_page_states_the_series_and_bytes_of_a_node(tmp_path: Path) -> None:
    measured, of_a_pod, of_sums = [], [], []
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(machine_of(tmp_path, "intel-aet"))
        machine.config.write_text("group: 4242\n")
        machine.start()
        for number in range(110):
            names = {"pod.namespace": f"team-{number % 10}", "pod.name": f"web-frontend-7d9c4b6f5-{number:05d}"}
            machine.call("Create", key=str(uuid.uuid4()), claim="me", attributes=names)
        exporter = stack.enter_context(contextlib.closing(Exporter(tmp_path, machine.socket)))
        exporter.start()
        for accept in (_TEXT, OPENMETRICS):
            reply = exporter.get(accept=accept)
            text = with_use(reply.text)
            found = series(text)
            of_pods = [line for line in found if 'key="' in line]
            measured += [len(found), len(text) / 1000, len(gzip.compress(text.encode(), 1)) / 1000]
            of_a_pod.append(len(of_pods) // 110)
            of_sums.append(len(found) - len(of_pods))
    page = stated()
    assert len(page) == len(measured)
    for expected, value in zip(page, measured, strict=True):
        assert abs(value - expected) <= _ACCURACY * expected + 0.5, (page, measured)
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"A pod has {of_a_pod[0]} series" in text
    assert f"or {of_a_pod[1]} if Prometheus stores start timestamps" in text
    rest = re.search(r"About (\d+) series, and (\d+) with start timestamps, for any number of pods", text)
    assert rest
    assert all(abs(int(number) - value) <= 10 for number, value in zip(rest.groups(), of_sums, strict=True)), of_sums
    rates = re.search(r"With a scrape every 30 seconds, they send (\d+) KB per second, compressed, or (\d+) KB", text)
    assert rates
    assert [int(rate) for rate in rates.groups()] == [round(100 * size / 30) for size in (page[2], page[5])]
    # The numbers of the page fit each other.
    assert page[0] == 110 * of_a_pod[0] + int(rest[1])
    assert page[3] == 110 * of_a_pod[1] + int(rest[2])
