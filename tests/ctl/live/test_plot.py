# SPDX-License-Identifier: Apache-2.0
"""The verb plot: in the terminal, with whole, damaged and hostile files. tests/plot has the page.

``python -m tests.ctl.live.test_plot`` writes the files in ``screens`` again. Look at each before you commit it.
"""

from __future__ import annotations

import json
import math
import os
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from resctrlctl.base.errors import CommandError
from resctrlctl.live.plot import screen, summary
from resctrlctl.live.series import BANDWIDTH, LLC, POWER, Series, Span, averages, read
from resctrlctl.screen.format import format_time
from resctrlctl.screen.layout import cell_width
from tests.ctl.conftest import Ctl
from tests.ctl.test_screens import SCREENS

LEVELS = ("▁▂▃▄▅▆▇█", "_.-:=+*#")
WIDTHS = (40, 80, 200)
BEGIN = 1_795_460_400  # 2026-11-23T19:00:00Z


def time(second: float) -> str:
    return f"2026-11-23T19:{int(second) // 60:02}:{second % 60:09.6f}Z"


def header(**fields: Any) -> dict[str, Any]:
    """Return the first line of a recording."""
    first = {"format": 1, "version": "0.1.0", "host": "node", "intervalS": 1.0, "events": {}}
    return {"type": "header", "readAt": time(0), **first, **fields}


def used(key: str, second: float, joules: float | None, **fields: Any) -> dict[str, Any]:
    """Return a workload in a reading: its traffic is 1 GiB for each joule."""
    totals: dict[str, Any] = {}
    if joules is not None:
        totals = {
            "core_energy": {"value": f"{joules:f}", "quality": "exact"},
            "mbm_total_bytes": {"value": f"{joules * 2**30:.0f}", "quality": "exact"},
        }
    known = {"key": key, "generation": 1, "name": key, "state": "active", "readAt": time(second)}
    return {**known, "totals": totals, "levels": {"llc_occupancy": "1048576"}, **fields}


def reading(second: float, *workloads: dict[str, Any]) -> dict[str, Any]:
    return {"type": "reading", "readAt": time(second), "workloads": list(workloads)}


def text_of(*lines: dict[str, Any]) -> bytes:
    """Return a recording of these lines."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def series_of(*lines: dict[str, Any]) -> Series:
    return read(BytesIO(text_of(header(), *lines)), "file")


def spans(series: Series) -> list[tuple[float, float, Any]]:
    """Return the power of the only workload, with times since the header."""
    (run,) = series.runs
    return [(span.start - BEGIN, span.end - BEGIN, pytest.approx(span.value)) for span in run.spans[POWER]]


SAMPLE = text_of(
    header(simulation="intel-aet"),
    *(
        reading(
            second,
            used("shop/cart-0", second, 3 * second - 10 * math.cos(second / 5) + 10),
            used("db", second, second * second / 30),
            used("idle", second, 5),
            *([used("late start", second, second - 30.5, createdAt=time(30.5))] if second > 30 else []),
            {"key": "waits", "generation": 1, "name": "waits", "state": "pending", "totals": {}, "levels": {}},
        )
        for second in range(60)
    ),
)


def drawn(width: int, levels: str) -> str:
    """Return the text of a screen."""
    return "".join(f"{line}\n" for line in screen(read(BytesIO(SAMPLE), "file"), levels, width))


def screen_file(width: int, levels: str) -> Path:
    return SCREENS / f"plot-{'ascii-' if levels.isascii() else ''}{width}.txt"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("levels", LEVELS)
def test_screen_is_as_it_was_looked_at(environment: dict[str, str], width: int, levels: str) -> None:
    text = drawn(width, levels)
    assert text == screen_file(width, levels).read_text(encoding="utf-8")
    assert text.isascii() or not levels.isascii()
    assert max(map(cell_width, text.splitlines())) <= width


def test_power_is_the_difference_of_two_readings() -> None:
    series = series_of(
        *(reading(second, used("k", second, joules)) for second, joules in ((1, 10), (2, 14), (4, 15)))
    )
    assert spans(series) == [(1, 2, 4), (2, 4, 0.5)]
    (run,) = series.runs
    assert (run.mean(POWER), run.greatest(POWER), run.total(POWER)) == pytest.approx((5 / 3, 4, 5))
    assert run.mean(BANDWIDTH) == pytest.approx(5 / 3 * 2**30)
    assert (run.mean(LLC), run.quality) == (2**20, "exact")


def test_first_use_counts_from_the_baseline_if_that_is_in_the_recording() -> None:
    begins = used("k", 5, 2, createdAt=time(4))
    assert spans(series_of(reading(5, begins))) == [(4, 5, 2)]
    earlier = used("k", 5, 2, createdAt="2026-11-23T18:00:00Z")
    assert series_of(reading(5, earlier)).measures == [LLC]


def test_final_totals_of_a_workload_that_lived_between_two_readings() -> None:
    ended = used("k", 4.5, 3, createdAt=time(4.25), completedAt=time(4.5), state="completed", levels={})
    assert spans(series_of(reading(5, ended))) == [(4.25, 4.5, 12)]


def test_use_of_a_reading_without_a_total_is_in_the_next_one() -> None:
    values = ((1, 10.0), (2, 12.0), (3, None), (4, 15.0), (5, 16.0))
    series = series_of(*(reading(second, used("k", second, joules)) for second, joules in values))
    assert spans(series) == [(1, 2, 2), (2, 4, 1.5), (4, 5, 1)]
    assert series.runs[0].total(POWER) == pytest.approx(6)


def test_total_that_falls_makes_the_sum_unknown() -> None:
    values = ((1, 10.0), (2, 16.0), (3, 1.0), (4, 3.0))
    series = series_of(*(reading(second, used("k", second, joules)) for second, joules in values))
    assert spans(series) == [(1, 2, 6), (3, 4, 2)]
    assert series.runs[0].quality == "unknown"


def test_outage_has_averages_of_totals_and_no_level() -> None:
    series = series_of(
        reading(1, used("k", 1, 0)),
        {"type": "outage", "readAt": time(2), "reason": "down"},
        reading(11, used("k", 11, 20)),
    )
    assert spans(series) == [(1, 11, 2)]
    (run,) = series.runs
    assert [(span.start - BEGIN, span.end - BEGIN) for span in run.spans[LLC]] == [(0, 1), (9, 11)]
    assert series.notes == ["1 outage of resctrlmond: power and bandwidth are averages over that time."]


def test_sum_without_the_final_totals_is_late() -> None:
    end = {"completedAt": time(1.5), "state": "completed"}
    series = series_of(
        reading(1, used("lost", 1, 5), used("ended", 1, 5), used("lives", 1, 5)),
        reading(2, used("ended", 2, 6, **end), used("lives", 2, 7)),
        reading(3, used("lives", 3, 8)),
    )
    assert {run.label: run.quality for run in series.runs} == {"lost": "late", "ended": "exact", "lives": "exact"}


def test_clock_that_is_set_back_loses_no_use() -> None:
    series = series_of(*(reading(second, used("k", second, joules)) for second, joules in ((9, 1), (5, 2), (10, 4))))
    assert spans(series) == [(9, 10, 3)]


def test_clock_that_was_set_back_after_the_header_extends_the_plot() -> None:
    series = series_of(*(reading(1, used("k", 1, n, readAt=f"2026-11-23T18:00:0{n}Z")) for n in (1, 3)))
    assert (series.begin - BEGIN, series.end - BEGIN) == (-3599, -3597)
    assert screen(series, "_#", 80)[-2].startswith("  power      #  ")


def test_runs_of_a_key_whose_generations_began_again_are_not_one() -> None:
    """The daemon had forgotten the first run. Its use was subtracted from that of the second one, as exact."""
    ended = used("k", 1, 2, createdAt=time(0.5), state="completed", completedAt=time(1))
    found = series_of(
        reading(0, used("k", 0, None, readAt=None, state="pending")),
        reading(1, ended),
        reading(2),
        reading(30, used("k", 30, 5, createdAt=time(20))),
        reading(31, used("k", 31, 6, createdAt=time(20))),
    )
    assert [(run.label, round(run.total(POWER), 6), run.quality) for run in found.runs] == [
        (f"k, run 1 of {format_time(time(20))}", 6, "exact"),
        (f"k, run 1 of {format_time(time(0.5))}", 2, "exact"),
    ]


def test_run_that_waits_for_an_rmid_does_not_change_the_ended_run_of_the_same_key_and_generation() -> None:
    """It has no time of its baseline yet. The first run, which was complete, was shown as pending and late."""
    found = series_of(
        reading(1, used("k", 1, 2, createdAt=time(0.5), state="completed", completedAt=time(1))),
        reading(2),
        reading(29, used("k", 29, None, readAt=None, state="pending")),
        reading(30, used("k", 30, 5, createdAt=time(29.5))),
    )
    assert [(run.total(POWER), run.state, run.quality) for run in found.runs] == [
        (5, "active", "exact"),
        (2, "completed", "exact"),
    ]


def test_first_run_of_a_key_whose_generations_began_again_is_late_without_its_final_totals() -> None:
    found = series_of(
        reading(1, used("k", 1, 0, createdAt=time(0.5))),
        reading(2, used("k", 2, 0, createdAt=time(1.5))),  # in another class
        reading(3, used("k", 3, 2, createdAt=time(1.5))),
        reading(30, used("k", 30, 5, createdAt=time(20))),
    )
    assert [(run.total(POWER), run.quality) for run in found.runs] == [(5, "exact"), (2, "late")]


def test_runs_of_one_name_have_different_labels() -> None:
    series = series_of(
        reading(
            1,
            used("a", 1, 1, name="same"),
            used("b", 1, 1, name="same"),
            used("b", 1, 1, name="same", generation=2),
            used("c", 1, 1),
        )
    )
    assert sorted(run.label for run in series.runs) == ["c", "same (a)", "same (b), run 1", "same (b), run 2"]


def test_averages_are_weighted_by_time() -> None:
    found = averages([Span(0, 1, 10), Span(1, 4, 2), Span(6, 8, 1)], 0, 8, 4)
    assert found == [pytest.approx(6), pytest.approx(2), None, pytest.approx(1)]


def test_patterns_select(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(SAMPLE)
    done = ctl("plot", str(path), "shop/*", "d?")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if line.endswith("]")] == [
        "shop/cart-0 [exact]",
        "db [exact]",
    ]
    done = ctl("plot", str(path), "none")
    assert (done.returncode, done.stderr) == (1, f"resctrlctl: no workload of {path} matches 'none'\n")


def test_ascii_where_the_locale_has_no_unicode(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(SAMPLE)
    assert ctl("plot", str(path), LC_ALL="C").stdout.isascii()
    assert "█" in ctl("plot", str(path), LC_ALL="C.UTF-8").stdout


ONE_READING = text_of(header(), reading(1, used("k", 1, 1, levels={})))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: it is not a recording of 'resctrlctl record'"),
        (b"\0" * 100, "is not a recording of 'resctrlctl record': its first line is not a header"),
        (b"hello\n", "is not a recording of 'resctrlctl record': its first line is not a header"),
        (text_of(reading(1)), "is not a recording of 'resctrlctl record': its first line is not a header"),
        (
            b'{"type":"header","x":' + b"[" * 100_000,
            "is not a recording of 'resctrlctl record': its first line is not a header",
        ),
        (text_of(header(format=2)), "was recorded by a newer version of resctrlctl: use that version or a later one"),
        (text_of(header(readAt="yesterday")), "is damaged: its first line has no valid time"),
        (text_of(header(intervalS=-1)), "is damaged: its first line has no valid time"),
        (text_of(header()), "it needs two readings of a workload with a group, and has 0 readings and 0 workloads"),
        (ONE_READING, "it needs two readings of a workload with a group, and has 1 reading and 1 workload"),
    ],
)
def test_file_without_a_plot_is_explained(ctl: Ctl, tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    done = ctl("plot", str(path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("resctrlctl: ")
    assert str(path) in done.stderr
    assert done.stderr.endswith(f"{message}\n")


def test_damaged_lines_are_left_out_and_counted(ctl: Ctl, tmp_path: Path) -> None:
    lines = SAMPLE.splitlines(keepends=True)
    lines[3] = lines[3].replace(b"generation", b"generatoin")
    lines[5] = b'{"type":"reading","readAt":"\xff"}\n'
    path = tmp_path / "file"
    path.write_bytes(b"".join(lines)[:-10])
    done = ctl("plot", str(path))
    assert done.returncode == 0
    assert "57 readings of 5 workloads" in done.stdout
    assert done.stderr == (
        f"resctrlctl: 2 lines of {path} are damaged and left out.\n"
        f"resctrlctl: The last line of {path} is incomplete: the recording was cut off.\n"
    )


@pytest.mark.parametrize(
    "hostile",
    [
        {"name": "\x1b[2J\u202e\n\x07"},
        {"readAt": "9999-12-31T23:59:59Z"},
        {"readAt": "0001-01-01T00:00:00+14:00"},
        {"createdAt": "2026-11-23T19:00:00"},
        {"totals": {"core_energy": {"value": "1e999999999", "quality": "\x1b"}}},
        {"totals": {"core_energy": {"value": "nan", "quality": "exact"}}},
        {"totals": {"core_energy": {"value": "-5", "quality": "exact"}}},
        {"levels": {"llc_occupancy": "inf"}},
        {"state": "\x1b[31m", "totals": {}},
    ],
    ids=str,
)
def test_hostile_values_do_not_reach_the_terminal(hostile: dict[str, Any]) -> None:
    series = series_of(
        *(reading(second, used("k", second, second), used("x", second, 1) | hostile) for second in (1, 2))
    )
    for line in screen(series, "_#", 80):
        assert line.isprintable()
    assert summary(series)


def test_no_mutant_of_a_recording_makes_the_reader_stumble() -> None:
    """A sample of what make fuzz does: bytes that were changed, removed or inserted."""
    source = random.Random(7)
    for _ in range(300):
        data = bytearray(SAMPLE[:6000])
        for _ in range(source.choice((1, 3, 30))):
            place = source.randrange(len(data))
            data[place : place + source.randrange(3)] = source.choice((b"", b'"', b"}", b"9", b"\n", b"\xff", b"-"))
        try:
            series = read(BytesIO(bytes(data)), "file")
        except CommandError:
            continue
        if series.measures:
            screen(series, "_#", 80)


def test_standard_input_is_read(environment: dict[str, str], tmp_path: Path) -> None:
    import subprocess
    import sys

    words = [sys.executable, "-W", "error", "-m", "resctrlctl", "plot", "-"]
    done = subprocess.run(words, env=environment, input=SAMPLE, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_missing_matplotlib_names_the_package(ctl: Ctl, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")")
    path = tmp_path / "file"
    path.write_bytes(SAMPLE)
    done = ctl(
        "plot",
        str(path),
        "--html",
        str(tmp_path / "page"),
        PYTHONPATH=os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]]),
    )
    assert done.returncode == 1
    assert done.stderr == (
        "resctrlctl: cannot plot a page: matplotlib cannot be imported: No module named 'matplotlib'. Install the "
        "Debian package python3-matplotlib, or run: pip install 'resctrlmond[plot]'\n"
    )
    assert not (tmp_path / "page").exists()


def test_recording_is_not_replaced_by_its_page(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(SAMPLE)
    done = ctl("plot", str(path), "--html", str(path))
    assert (done.returncode, path.read_bytes()) == (1, SAMPLE)
    assert "would replace the recording" in done.stderr


def test_json_is_refused(ctl: Ctl) -> None:
    done = ctl("--json", "plot", "file")
    assert done.returncode == 2
    assert "the recording itself is JSON" in done.stderr


def main() -> None:
    """Write the files again."""
    for width in WIDTHS:
        for levels in LEVELS:
            screen_file(width, levels).write_text(drawn(width, levels), encoding="utf-8")


if __name__ == "__main__":
    main()
