"""What a configuration says of answers: how they are split, what becomes of reasoning. Pure."""

from collections.abc import Mapping
from typing import Any

from kqview.chat.reasoning import THINK_TAGS, Split
from kqview.server.api.wire.fields import first
from kqview.server.apps.mia4.sampling import REASONING_MAX_TOKENS
from kqview.server.config import MARKER, Llm, Passport


def split_for(
    llm: Llm, passport: Passport, prompt: str, source: str, end: str, found: Split
) -> Split:
    """How the answer marks its reasoning; bound to the first three it is a `ChooseSplit`.

    The first of these that applies:

    1. The channels of Harmony, or ``<think>`` and its like, if the model's chat template has them;
       unless the passport names a marker.
    2. Tags, with the marker as their fallback, if ``llm.prompt.harmony`` is enabled.
    3. The marker, if the configuration names one or the prompt contains the default one. An answer
       is then held until the marker comes, so no model is suspected of it that was not told to.
    4. ``<think>`` and its like, should the answer begin with them.

    Args:
        llm: What holds for all models.
        passport: The model's own.
        prompt: All text that the model is given.
        source: Its chat template.
        end: The end of the rendered prompt.
        found: The split that template and prompt suggest.
    """
    own = passport.postproc.reasoning.marker
    given = first(own, llm.postproc.reasoning.marker)
    harmony = llm.prompt.harmony
    has_tags = found.opened is not None or any(
        mark in source for pair in THINK_TAGS.items() for mark in pair
    )
    if found.mode == "harmony" or (has_tags and own is None):
        return found
    marker: str = first(given, MARKER)
    if harmony.enabled:
        opening = f"<{harmony.analysis_tag}>"
        return Split(
            mode="tags",
            opened=opening if end.rstrip().endswith(opening) else None,
            tags=(harmony.analysis_tag, harmony.final_tag),
            marker=marker,
        )
    if given is not None or marker in prompt:
        return Split(mode="marker", marker=marker)
    return found


def passport_values(llm: Llm, passport: Passport) -> Mapping[str, Any]:
    """The level "passport" of `merge`: sampling, and the limit of reasoning."""
    most = first(passport.postproc.reasoning.max_tokens, llm.postproc.reasoning.max_tokens)
    return {REASONING_MAX_TOKENS: most, **passport.sampling}


def drops_reasoning(llm: Llm, passport: Passport) -> bool:
    """Whether reasoning is neither sent nor stored."""
    own = passport.postproc.reasoning.drop_from_history
    return first(own, llm.postproc.reasoning.drop_from_history, True)
