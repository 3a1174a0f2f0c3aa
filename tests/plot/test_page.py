# SPDX-License-Identifier: Apache-2.0
"""The page of resctrlctl plot, which matplotlib draws."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from resctrlctl.live.plot_page import page
from resctrlctl.live.series import Series, read
from tests.ctl.conftest import ROOT, environment
from tests.ctl.live.test_plot import SAMPLE, header, reading, text_of, used

__all__ = ["environment"]
SVG = "{http://www.w3.org/2000/svg}"


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of each element with that name."""
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(autouse=True)
def _utc(environment: dict[str, str]) -> None:
    """Show times in UTC."""


def sample(data: bytes = SAMPLE) -> Series:
    return read(BytesIO(data), "file")


def plots(text: str) -> list[ElementTree.Element]:
    """Return the plots of a page; each must be well-formed XML."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg role=.*?</svg>", text, re.DOTALL)]


def test_plots_have_titles_axes_with_units_and_alternative_texts() -> None:
    text = page(sample())
    found = plots(text)
    assert [plot.get("role") for plot in found] == ["img"] * 3
    labels = [{element.text for element in plot.iter(f"{SVG}text")} for plot in found]
    for of_plot, axis in zip(labels, ("Power (W)", "Bandwidth (GiB/s)", "LLC (MiB)"), strict=True):
        assert {axis, "Time (UTC)", "19:00:30"} <= of_plot
    for heading in ("Power of the cores", "Memory bandwidth", "Last-level cache occupancy"):
        assert f"<h2>{heading}</h2>" in text
    alternative = found[0].get("aria-label") or ""
    assert alternative.startswith("Power of the cores over time. shop/cart-0: mean 3.05W, maximum 4.99W; db: mean ")
    titles = [element.text for element in found[0].iter(f"{SVG}title")]
    assert titles == ["shop/cart-0", "db", "late start", "idle"]


def test_page_loads_nothing_and_runs_nothing() -> None:
    text = page(sample())
    elements = Elements(text)
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in elements.found}
    references = [
        value
        for _, attributes in elements.found
        for name, value in attributes.items()
        if name in ("href", "xlink:href", "src")
    ]
    assert references
    assert all((value or "").startswith("#") for value in references)
    assert not re.search(r"@import|url\((?!#)", text)
    (policy,) = [meta for meta in elements.all("meta") if meta.get("http-equiv")]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_ids_are_unique_and_references_exist() -> None:
    text = page(sample())
    ids = Counter(re.findall(r'\bid="([^"]*)"', text))
    assert ids
    assert set(ids.values()) == {1}
    assert set(re.findall(r'(?:url\(|href=")#([^")]*)', text)) <= set(ids)


def test_hostile_names_are_text() -> None:
    name = "<script>alert(1)</script> & \"'$x^2$ \\u202e\x00\ud7ff"
    lines = [header(host="<b>host</b>"), *(reading(second, used(name, second, second)) for second in (1, 2))]
    text = page(sample(text_of(*lines)))
    elements = Elements(text)
    assert not {"script", "b"} & {tag for tag, _ in elements.found}
    assert "<script>alert(1)</script> & \"'$x^2$ \\u202e\\x00" in elements.text
    assert "Workloads on <b>host</b>" in elements.text
    assert len(plots(text)) == 3


def test_500_workloads_have_ten_lines_and_500_rows() -> None:
    lines = [
        reading(second, *(used(f"k{number}", second, number * second) for number in range(500))) for second in (1, 2)
    ]
    text = page(sample(text_of(header(), *lines)))
    legend = re.findall(r"<li>.*?</svg>(.*?)</li>", text)
    assert legend == [*(f"k{number}" for number in range(499, 490, -1)), "491 other workloads, together"]
    assert len(Elements(text).all("tr")) == 501
    swatches = re.findall(r'<li><svg[^>]*><path[^>]*stroke="([^"]*)" stroke-width="3"([^>]*)/>', text)
    assert len(set(swatches)) == 10


def test_page_of_a_long_recording_is_small() -> None:
    lines = [reading(second, used("k", second, second * 2 + second % 2)) for second in range(3000)]
    assert len(page(sample(text_of(header(), *lines)))) < 150_000


@pytest.mark.parametrize("value", ["0", "1e-300", "1e24", "5e-324"], ids=["zero", "small", "large", "smallest"])
def test_extreme_values_are_drawn(value: str) -> None:
    def amount(number: str) -> dict[str, object]:
        totals = {name: {"value": number, "quality": "exact"} for name in ("core_energy", "mbm_total_bytes")}
        return {"totals": totals, "levels": {"llc_occupancy": number}}

    lines = [reading(1, used("k", 1, 0) | amount("0")), reading(2, used("k", 2, 0) | amount(value))]
    assert len(plots(page(sample(text_of(header(), *lines))))) == 3


def test_times_that_are_a_century_apart_are_drawn() -> None:
    lines = [
        header(readAt="1970-01-02T00:00:00Z"),
        reading(1, used("k", 1, 1, readAt="1970-01-03T00:00:00Z")),
        reading(1, used("k", 1, 2, readAt="2099-01-03T00:00:00Z")),
    ]
    assert len(plots(page(sample(text_of(*lines))))) == 3


def test_notes_about_the_file_are_on_the_page() -> None:
    assert "The last line of file is incomplete" in page(sample(SAMPLE[:-10]))


def run(*words: str, data: bytes = SAMPLE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "resctrlctl", "plot", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TZ": "America/New_York"},
        input=data.decode(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_command_writes_the_page_in_the_local_time_zone(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    done = run("-", "--html", str(path))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"5 workloads plotted in {path}\n")
    text = path.read_text(encoding="utf-8")
    assert "2026-11-23 14:00:00 to 14:00:59 EST" in text
    assert ">Time (EST)<" in text
    assert run("-", "--html", "-").stdout == text


@pytest.mark.parametrize(
    ("path", "reason"), [("/none/x", "No such file or directory"), ("/dev/full", "No space left")]
)
def test_page_that_cannot_be_written_is_an_error(path: str, reason: str) -> None:
    done = run("-", "--html", path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"resctrlctl: cannot write {path}: {reason}")
    assert done.stdout == ""
