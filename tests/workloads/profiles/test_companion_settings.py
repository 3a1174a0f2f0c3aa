# SPDX-License-Identifier: Apache-2.0
"""The arguments and the configuration file of a companion: values, and how they are escaped in each format."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.workloads.profiles.companion_settings import (
    MAX_VALUE_LENGTH,
    VARIABLES,
    Companion,
    Format,
    TemplateError,
    check_argument,
    check_template,
    render,
)

PATH = "/sys/fs/cgroup/kubepods.slice/cri-containerd-5e.scope"
ESCAPED = "/sys/fs/cgroup/system.slice/a\\x2db.service"


def rendered(template: str, format_: Format = Format.YAML, **values: str) -> str:
    """Return the text of a configuration file."""
    found = render(Companion(("/bin/true",), template, format=format_), values).text
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("template", "value", "expected"),
    [
        ("a: $KEY", "web", 'a: "web"'),
        ("a: $KEY  # $KEY", "web", 'a: "web"  # $KEY'),
        ("a: ${KEY}s", "web", 'a: "webs"'),
        ("a: '$KEY'", ESCAPED, 'a: "/sys/fs/cgroup/system.slice/a\\\\x2db.service"'),
        ('a: "$KEY \\u00e9"', "web", 'a: "web \\U000000e9"'),
        ("- $KEY\n- [$KEY, b]\n", "123", '- "123"\n- ["123", b]\n'),
        ("$KEY: {$KEY: b}", "null", '"null": {"null": b}'),
        ("a: |\n  - $KEY\n", PATH, f"a: |\n  - {PATH}\n"),
        ("a: >-\n  $KEY\n", PATH, f"a: >-\n  {PATH}\n"),
        ("a: $$KEY", "web", 'a: "$KEY"'),
        ("a: $key $1 $", "web", "a: $key $1 $"),
        ("# $KEY\nb: 1\n", "web", "# $KEY\nb: 1\n"),
    ],
)
def test_yaml_scalars_get_the_value(template: str, value: str, expected: str) -> None:
    assert rendered(template, KEY=value) == expected


def test_json_strings_get_the_value() -> None:
    text = rendered('{"a": ["$KEY", 1, true, null], "$KEY": {"b": "x$KEY"}}', Format.JSON, KEY=ESCAPED)
    assert json.loads(text) == {"a": [ESCAPED, 1, True, None], ESCAPED: {"b": f"x{ESCAPED}"}}


def test_plain_text_gets_the_value_as_it_is() -> None:
    assert rendered("path=$KEY\ncost=$$5 {$KEY}\n", Format.PLAIN, KEY=ESCAPED) == (
        f"path={ESCAPED}\ncost=$5 {{{ESCAPED}}}\n"
    )


def test_argument_stays_one_argument() -> None:
    companion = Companion(("/bin/x", "--path=$KEY", "; rm -rf $$HOME", "%n"))
    assert render(companion, {"KEY": PATH}).arguments == ("/bin/x", f"--path={PATH}", "; rm -rf $HOME", "%n")
    assert render(companion, {"KEY": PATH}).text is None


@pytest.mark.parametrize("format_", Format)
def test_unknown_variable_is_refused_before_a_workload_starts(format_: Format) -> None:
    with pytest.raises(TemplateError, match=r"there is no variable \$KEYS: write \$\$"):
        check_template('{"a": "$KEYS"}', format_)
    with pytest.raises(TemplateError, match=r"no variable \$KEYS"):
        check_argument("--key=$KEYS")


def test_value_that_the_workload_lacks_is_named() -> None:
    with pytest.raises(TemplateError, match=r"^the workload has no value for \$POD_NAME$"):
        rendered("a: $POD_NAME", KEY="web")


@pytest.mark.parametrize(
    "value",
    [
        "a b",
        "a\nb: c",
        "a'b",
        'a"b',
        "a`b",
        "a,b",
        "a]",
        "a#b",
        "a:",
        "-a",
        "@a",
        ":a",
        "*a",
        "$HOME",
        "a;b",
        "a\x7f",
        "ä",
        "a\u202eb",
        "a" * (MAX_VALUE_LENGTH + 1),
    ],
)
@pytest.mark.parametrize("format_", Format)
def test_value_with_another_character_is_refused(format_: Format, value: str) -> None:
    with pytest.raises(TemplateError, match=r"the value of \$KEY has a character that is not allowed"):
        rendered('{"a": "$KEY"}', format_, KEY=value)
    with pytest.raises(TemplateError, match="not allowed"):
        render(Companion(("/bin/x", "$KEY")), {"KEY": value})


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("a: b: c", Format.YAML),
        ("a: [", Format.YAML),
        ("\t- a", Format.YAML),
        ("{", Format.JSON),
        ("[" * 9999, Format.JSON),
    ],
)
def test_template_that_is_wrong_in_its_format_is_refused(template: str, format_: Format) -> None:
    with pytest.raises(TemplateError, match=f"the template is not valid {format_.upper()}"):
        check_template(template, format_)


def test_number_of_variables_is_limited() -> None:
    check_template("$KEY " * 256, Format.PLAIN)
    with pytest.raises(TemplateError, match="more than 256 variables"):
        check_template("$KEY " * 257, Format.PLAIN)


@pytest.mark.parametrize("name", ["POD_UID", "POD_NAME", "NAMESPACE", "CONTAINER"])
def test_name_that_leads_to_another_path_is_refused(name: str) -> None:
    """Annotations of a pod can be the source of its names, and "/var/log/$NAMESPACE" is a path."""
    for value in ("/etc/shadow", "a/b"):
        with pytest.raises(TemplateError, match=rf"the value of \${name} is a path, and not a name: '{value}'"):
            render(Companion(("/bin/x", f"/var/log/${name}")), {name: value})
    assert render(Companion(("/bin/x", f"/var/log/${name}")), {name: "a..b"}).arguments[1] == "/var/log/a..b"


@pytest.mark.parametrize("value", ["a/../../etc", "/a/..", "/.."])
def test_path_that_leads_upwards_is_refused(value: str) -> None:
    with pytest.raises(TemplateError, match=r"the value of \$KEY is a path with '\.\.'"):
        render(Companion(("/bin/x", "/var/log/$KEY")), {"KEY": value})


# Text that ends a value in some format, and text that is a value.
_HARD = st.text(alphabet="aB7/._-:@\\ \n\t'\"`,;[]{}#&*!|>%$~=+\u2028\x00", max_size=12)
_PLACES = (
    "a: $KEY\nz: 1\n",
    "a: '$KEY'\nz: 1\n",
    'a: "$KEY"\nz: 1\n',
    "{a: $KEY, z: 1}\n",
    "a:\n  - $KEY\nz: 1\n",
    "a: |-\n  $KEY\nz: 1\n",
    "a: >-\n  $KEY\nz: 1\n",
)


@given(value=_HARD | st.text(max_size=20) | st.from_regex(r"[A-Za-z0-9_/][A-Za-z0-9_./@:\\-]{0,20}", fullmatch=True))
def test_no_value_escapes_from_its_place(value: str) -> None:
    for place in _PLACES:
        try:
            text = rendered(place, KEY=value)
        except TemplateError:
            continue
        found: dict[str, Any] = yaml.safe_load(text)
        one = found["a"][0] if isinstance(found["a"], list) else found["a"]
        assert (one, found["z"], len(found)) == (value, 1, 2), text
    try:
        text = rendered('{"a": "$KEY", "z": 1}', Format.JSON, KEY=value)
    except TemplateError:
        return
    assert json.loads(text) == {"a": value, "z": 1}
    assert re.fullmatch(r"[^\s'\"`$;&|<>]+", value), "it is one word for a shell too"


@given(
    template=st.text(alphabet="$KEY{}:-'\"|>#\n ab&*[],%\\\ufeff\r", max_size=40) | st.text(max_size=40),
    format_=st.sampled_from(Format),
)
def test_template_is_checked_once_and_then_never_fails(template: str, format_: Format) -> None:
    try:
        check_template(template, format_)
    except TemplateError:
        return
    text = rendered(template, format_, **dict.fromkeys(VARIABLES, PATH))
    if format_ is Format.YAML:
        [*yaml.parse(text, yaml.SafeLoader)]
