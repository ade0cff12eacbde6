"""Classification: its bodies, its reply, and the handler."""

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Struct

from kqview.errors import RequestError
from kqview.server.errors import NotSupported, renamed
from kqview.server.models.service import Call
from kqview.server.web.described import about
from kqview.server.web.endpoint import HttpReply, json_in_slices
from kqview.types import Classification

_PREDICTION_BYTES = 256  # an object with a label and a number, and its JSON


class ClassifyBody(Struct, kw_only=True):
    """A text to classify, or a list of them."""

    inputs: Annotated[str | list[str], about("A text, or a list of them.", "I like it.")]
    model: Annotated[
        str | None, about("Id of a configured model; the default model if not given.", "demo")
    ] = None


class Prediction(Struct):
    """A label, and the classifier's raw value for it."""

    label: Annotated[str, about("Its name.", "positive")]
    score: Annotated[float, about("The raw value; null where it is not a number.", 2.5)]


class ClassifyUsage(Struct):
    """Tokens of all texts, with the special ones."""

    prompt_tokens: Annotated[int, about("Tokens of all texts.", 6)]
    total_tokens: Annotated[int, about("The same.", 6)]


class Classified(Struct, kw_only=True):
    """Labels by falling score: one list for a text, a list of lists for a list of texts."""

    model: Annotated[str, about("The model, as the request names it.", "demo")]
    object: Annotated[str, about('Always "list".', "list")] = "list"
    usage: Annotated[ClassifyUsage, about("Tokens of the request.")]
    predictions: Annotated[
        list[Prediction | list[Prediction]],
        about(
            "Labels by falling score; a list of them for each text where a list was sent.",
            [{"label": "positive", "score": 2.5}],
        ),
    ]


def predictions_of(result: Classification) -> list[Prediction]:
    """Every label with its raw value, the largest first; NaN last, equal ones as in the model."""
    found = [Prediction(*pair) for pair in zip(result.scores, result.raw, strict=True)]
    return sorted(found, key=lambda one: math.inf if math.isnan(one.score) else -one.score)


def classified(
    body: ClassifyBody, results: Sequence[Classification], *, n_tokens: int, model: str
) -> Classified:
    """The reply; a list of one text is answered with a list of one list."""
    predictions = [predictions_of(one) for one in results]
    is_one = isinstance(body.inputs, str)
    return Classified(
        model=model if body.model is None else body.model,
        usage=ClassifyUsage(n_tokens, n_tokens),
        predictions=[*predictions[0]] if is_one else [*predictions],
    )


async def classify(call: Call, body: ClassifyBody) -> HttpReply:
    """Scores of the labels of each text. Texts cannot contain special tokens."""
    service = call.service
    engine = call.model.engine
    if engine.pooling != "rank" or engine.n_classes < 2:
        raise NotSupported(
            f"{call.model.name} is not a classifier with two or more labels; serve one that is, "
            "such as a file that kqview convert-classifier wrote"
        )
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts:
        raise RequestError("inputs is empty; send at least one text", parameter="inputs")
    call.hold.take(_PREDICTION_BYTES * engine.n_classes * len(texts))
    ids = await call.model.texts.ids_of_each(texts, parse_special=False, hold=call.hold)
    n_tokens = sum(map(len, ids))
    async with service.working(call.model, call.caller) as engine:
        model = call.model.name
        try:
            if isinstance(body.inputs, str):
                results = [await engine.aclassify(ids[0])]
            else:
                results = await engine.aclassify(ids)
        except RequestError as error:
            raise renamed(error, {"texts": "inputs"}) from None

    def written() -> bytes:
        return json_in_slices(classified(body, results, n_tokens=n_tokens, model=model))

    n_bytes = _PREDICTION_BYTES * engine.n_classes * len(texts)
    return HttpReply(await service.converted(n_bytes, call.hold, written))
