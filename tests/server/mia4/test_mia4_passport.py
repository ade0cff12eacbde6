"""Hashes of passports and prompts: equal for equal content, whatever its form."""

from __future__ import annotations

import hashlib

import pytest

from kqview.errors import RequestError
from kqview.server.apps.mia4.passport import Known, hash_of, passport_of, text_of
from kqview.server.config import Passport, Postproc, ReasoningConfig


def test_canonical_json_has_sorted_keys_and_no_white_space():
    text = '{"a":"é\\n","b":[1,0.5,null],"d":{"x":2,"y":true}}'
    value = {"b": [1.0, 0.5, None], "a": "é\n", "c": None, "d": {"y": True, "x": 2}}
    assert hash_of(value) == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def test_hash_is_that_of_the_canonical_json():
    expected = hashlib.sha256(b'{"a":1}').hexdigest()
    assert hash_of({"a": 1}) == hash_of({"a": 1.0}) == f"sha256:{expected}"
    expected = hashlib.sha256(b'"Be brief."').hexdigest()
    assert text_of("Be brief.", 3) == Known(f"sha256:{expected}", 3)


def test_passport_keeps_its_hash_until_its_content_changes():
    one = Passport(version=1, sampling={"temperature": 1, "top_p": 0.5})
    same = Passport(version=2, sampling={"top_p": 0.5, "temperature": 1.0})
    marker = Postproc(reasoning=ReasoningConfig(marker="##"))
    assert passport_of(one).hash == passport_of(same).hash
    assert (passport_of(one).version, passport_of(same).version) == (1, 2)
    others = [
        Passport(sampling={"temperature": 1, "top_p": 0.6}),
        Passport(sampling=one.sampling, postproc=marker),
        Passport(),
    ]
    assert len({passport_of(given).hash for given in (one, *others)}) == 4


@pytest.mark.parametrize("value", [float("nan"), "\ud800", object(), {"a": float("inf")}])
def test_what_is_no_json_is_refused(value: object):
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        hash_of(value)
