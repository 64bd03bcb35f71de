"""Environment substitution in a run.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.errors import EnvironmentUnset, RunConfigInvalid, StackError
from distributions.environment import parse_env_options, substitute
from distributions.home import ensure_home, state_home

ENVIRON = {"SET": "value", "EMPTY": "", "ZERO": "0", "PORT": "8321", "HOME": "/home/user"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${env.SET}", "value"),
        ("${env.SET:other}", "value"),
        ("${env.UNSET:other}", "other"),
        ("${env.EMPTY:other}", "other"),
        ("${env.SET:=other}", "value"),
        ("${env.UNSET:=other}", "other"),
        ("${env.EMPTY:=other}", "other"),
        ("${env.UNSET:=}", None),
        ("${env.UNSET:}", None),
        ("${env.SET:+there}", "there"),
        ("${env.ZERO:+there}", "there"),
        ("${env.UNSET:+there}", None),
        ("${env.EMPTY:+there}", None),
        ("http://${env.UNSET:=localhost}:${env.PORT}/v1", "http://localhost:8321/v1"),
        ("${env.UNSET:=http://host:80/x}", "http://host:80/x"),
        ("${env.UNSET:=${env.ALSO_UNSET:=inner}}", "inner"),
        ("${env.SET:=${env.ALSO_UNSET}}", "value"),
        ("${env.SET:+${env.PORT}}", 8321),
        ("no expression", "no expression"),
        ("${SET}", "${SET}"),
        ("", ""),
    ],
)
def test_an_expression_becomes_what_its_syntax_says(text: str, expected: object):
    assert substitute(text, ENVIRON) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("true", True),
        ("False", False),
        ("12", 12),
        ("-3", -3),
        ("0.5", 0.5),
        ("1e-05", 1e-5),
        ("-2.5", -2.5),
        ("0", 0),
        ("9" * 18, 10**18 - 1),
        # What a number would not give back as it was written stays text.
        ("1.10", "1.10"),
        ("1e5", "1e5"),
        ("1e-4", "1e-4"),
        ("-0", "-0"),
        ("9" * 5000, "9" * 5000),
        ("007", "007"),
        ("1_000", "1_000"),
        ("nan", "nan"),
    ],
)
def test_a_whole_value_takes_the_type_it_reads_as(value: str, expected: object):
    result = substitute("${env.X}", {"X": value})
    assert result == expected
    assert type(result) is type(expected)


def test_a_number_inside_text_stays_text():
    assert substitute("v${env.PORT}", ENVIRON) == "v8321"
    assert substitute("${env.ZERO}${env.ZERO}", ENVIRON) == "00"


def test_a_literal_is_never_retyped():
    assert substitute({"a": "8321", "b": "true", "c": 3, "d": None}, ENVIRON) == {
        "a": "8321",
        "b": "true",
        "c": 3,
        "d": None,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("~/data", "/home/user/data"),
        ("~", "/home/user"),
        ("${env.UNSET:=~/.postgrad}/postgrad.db", "/home/user/.postgrad/postgrad.db"),
        ("a~/b", "a~/b"),
        ("~other/b", "~other/b"),
    ],
)
def test_a_leading_tilde_is_the_users_home(text: str, expected: str):
    assert substitute(text, ENVIRON) == expected


@pytest.mark.parametrize("name", ["UNSET", "EMPTY"])
def test_an_unset_or_empty_variable_is_named_with_its_place(name: str):
    document = {"providers": {"inference": [{"provider_id": "x", "config": {"url": f"http://${{env.{name}}}"}}]}}
    with pytest.raises(EnvironmentUnset) as caught:
        substitute(document, ENVIRON)
    assert name in caught.value.message
    assert "providers.inference.0.config.url" in caught.value.message


@pytest.mark.parametrize("text", ["${env.SET", "${env.SET-x}", "${env.}", "${env.1X}"])
def test_a_broken_expression_is_named_with_its_place(text: str):
    with pytest.raises(RunConfigInvalid, match=r"^a\.b: "):
        substitute({"a": {"b": text}}, ENVIRON)


@pytest.mark.parametrize("provider_id", ["__disabled__", "${env.UNSET:+on}", "${env.UNSET:=__disabled__}", ""])
def test_a_provider_that_is_off_needs_no_variables(provider_id: str):
    entries: Any = [{"provider_id": provider_id, "config": {"key": "${env.UNSET}"}}, {"provider_id": "on"}]
    assert substitute(entries, ENVIRON) == [{"provider_id": "__disabled__"}, {"provider_id": "on"}]


@given(st.text(st.characters(blacklist_characters="$~"), min_size=1))
def test_text_without_expressions_is_unchanged(text: str):
    assert substitute(text, {}) == text


@given(st.text(st.characters(blacklist_characters="${}"), min_size=1))
def test_a_value_is_put_in_as_it_is(value: str):
    assert substitute("<${env.X}>", {"X": value}) == f"<{value}>"


def test_a_value_is_not_substituted_again():
    assert substitute("<${env.X}>", {"X": "${env.SECRET}", "SECRET": "s"}) == "<${env.SECRET}>"


def test_env_options_are_split_at_the_first_equals_sign():
    assert parse_env_options(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}


@pytest.mark.parametrize("option", ["A", "=1", ""])
def test_an_env_option_without_a_name_or_value_is_refused(option: str):
    with pytest.raises(StackError, match="NAME=VALUE"):
        parse_env_options([option])


def test_the_state_folder_is_named_by_the_environment():
    assert state_home({"POSTGRAD_HOME": "/srv/pg"}) == Path("/srv/pg")
    assert state_home({"POSTGRAD_HOME": "~/pg", "HOME": "/home/user"}) == Path("/home/user/pg")
    assert state_home({"HOME": "/home/user"}) == Path("/home/user/.postgrad")


def test_the_state_folder_is_made_once_and_private(tmp_path: Path):
    home = tmp_path / "a" / "b"
    assert ensure_home(home) is True
    assert home.stat().st_mode & 0o777 == 0o700
    assert ensure_home(home) is False


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StackError, match="POSTGRAD_HOME"):
        ensure_home(tmp_path / "file" / "home")
