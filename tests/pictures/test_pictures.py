# SPDX-License-Identifier: Apache-2.0
"""The pictures in README.md are small and have alternative texts, and a screen is drawn as it is."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pyte
import pytest

from tests.pictures.svg import drawn

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "man" / "images").iterdir())
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    """Return the texts of a drawn screen."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_readme_shows_every_picture_with_an_alternative_text() -> None:
    found = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {path for _, path in found} == {str(image.relative_to(ROOT)) for image in IMAGES}
    assert all(len(alternative) > 20 for alternative, _ in found)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_picture_is_small_and_complete(image: Path) -> None:
    data = image.read_bytes()
    assert len(data) < 150_000
    if image.suffix == ".svg":
        assert len(texts(data.decode())) > 10
    else:
        assert data.startswith(b"\x89PNG\r\n")
        assert data.endswith(b"IEND\xaeB`\x82")


def test_screen_is_drawn_with_its_styles() -> None:
    screen = pyte.Screen(30, 5)
    pyte.Stream(screen).feed("\x1b[1mBold  here\x1b[0m <&>\r\n\x1b[7mreversed\x1b[0m\r\n   \x1b[31mred one\x1b[0m")
    svg = drawn(screen, 'a "terminal"')
    assert texts(svg) == ["Bold", "here", "<&>", "reversed", "red one"]
    top = ElementTree.fromstring(svg)
    assert (top.get("aria-label"), top.get("height")) == ('a "terminal"', "78")
    looks = {element.text: element.attrib for element in top.iter(f"{SVG}text")}
    assert looks["Bold"]["font-weight"] == "bold"
    assert "font-weight" not in looks["<&>"]
    assert looks["here"]["x"] == f"{12 + 6 * 8.4:.1f}"
    assert looks["red one"]["fill"] != looks["reversed"]["fill"]
    assert len(list(top.iter(f"{SVG}rect"))) == 2
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
