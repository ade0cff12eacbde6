"""How answers are split, by configuration, template and prompt."""

from __future__ import annotations

import msgspec
import pytest

from kqview.chat.reasoning import Split
from kqview.server.apps.mia4.passport import merge
from kqview.server.apps.mia4.request import drops_reasoning, passport_values, split_for
from kqview.server.config import Llm, Passport

THINK = Split()
OPENED = Split(opened="<think>")
CHANNELS = Split(mode="harmony")


def llm(*, marker: str | None = None, tags: bool = False, **reasoning: object) -> Llm:
    given = {"marker": marker, **reasoning}
    harmony = {"enabled": tags, "analysis_tag": "plan"}
    table = {"postproc": {"reasoning": given}, "prompt": {"harmony": harmony}}
    return msgspec.convert(table, Llm)


def passport(**reasoning: object) -> Passport:
    return msgspec.convert({"postproc": {"reasoning": reasoning}}, Passport)


DEFAULT = "===FINAL==="


def tagged(marker: str = DEFAULT, opened: str | None = None) -> Split:
    return Split(mode="tags", tags=("plan", "final"), marker=marker, opened=opened)


@pytest.mark.parametrize(
    ("given", "own", "prompt", "source", "found", "expected"),
    [
        (llm(), passport(), "", "", THINK, THINK),
        (llm(), passport(), f"End with {DEFAULT}.", "", THINK,
         Split(mode="marker", marker=DEFAULT)),
        (llm(marker="##"), passport(), "", "", THINK, Split(mode="marker", marker="##")),
        (llm(marker="##"), passport(marker="@@"), "", "", THINK,
         Split(mode="marker", marker="@@")),
        (llm(marker="##", tags=True), passport(), "", "{# <think> #}", THINK, THINK),
        (llm(marker="##", tags=True), passport(), "", "", OPENED, OPENED),
        (llm(marker="##", tags=True), passport(marker="@@"), "", "{# <think> #}", THINK,
         tagged("@@")),
        (llm(tags=True), passport(marker="@@"), "", "", CHANNELS, CHANNELS),
        (llm(tags=True), passport(), "", "", THINK, tagged()),
    ],
)  # fmt: skip
def test_split_follows_template_then_configuration_then_prompt(
    given: Llm, own: Passport, prompt: str, source: str, found: Split, expected: Split
):
    assert split_for(given, own, prompt, source, "", found) == expected


def test_prompt_that_opens_the_tag_of_reasoning_is_noticed():
    split = split_for(llm(tags=True), passport(), "", "", "Assistant: <plan>\n", THINK)
    assert split == tagged(opened="<plan>")
    assert split.splitter().closing == "</plan><final>"


@pytest.mark.parametrize(
    ("given", "own", "expected"),
    [(None, None, True), (False, None, False), (False, True, True), (True, False, False)],
)
def test_passport_decides_whether_reasoning_is_dropped(
    given: bool | None, own: bool | None, expected: bool
):
    both = llm(drop_from_history=given), passport(drop_from_history=own)
    assert drops_reasoning(*both) is expected


@pytest.mark.parametrize(
    ("given", "own", "preset", "expected"),
    [
        (None, None, {}, None),
        (64, None, {}, 64),
        (64, 32, {}, 32),
        (64, 32, {"reasoning_max_tokens": 16}, 16),
        (64, 0, {}, 0),
        (64, 32, {"reasoning_max_tokens": -1}, None),
    ],
)
def test_limit_of_reasoning_comes_from_the_highest_level(
    given: int | None, own: int | None, preset: dict[str, int], expected: int | None
):
    values = passport_values(llm(max_tokens=given), passport(max_tokens=own))
    assert merge(values, preset, {}).reasoning_max_tokens == expected
