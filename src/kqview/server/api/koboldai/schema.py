"""Bodies of the KoboldAI API, field for field; requests for text are in `request`.

Requests accept every name that the dialects and their forks use for the same thing. Unknown names
are ignored.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.koboldai.pruning import PrunableSentence
from kqview.server.api.wire.event_parts import ROW, AttentionObject, ModCall, Removed, RowsDescribed
from kqview.server.api.wire.logprobs import TextLogprobs
from kqview.server.web.described import about

API_VERSION: Final = "1.2.5"
"""Version of the KoboldAI United API, by which clients decide what to send."""
KOBOLDCPP_VERSION: Final = "1.101"
"""The KoboldCpp whose routes these are."""


# ---- text and ids


class KoboldTokenizeBody(Struct, kw_only=True):
    """Text to tokenize."""

    text: Annotated[str | None, about("The text.", "Anna is a")] = None
    content: Annotated[str | None, about("Another name for ``text``.", "Anna is a")] = None
    add_special_tokens: Annotated[
        bool | None,
        about("Whether tokens that the model wants around a text are added.", default=False),
    ] = None
    add_special: Annotated[bool | None, about("Another name for it.")] = None
    with_pieces: Annotated[
        bool | None, about("Whether each id comes with its text.", default=True)
    ] = None


class TokenText(Struct):
    """One token."""

    token_id: Annotated[int, about("Its id.", 259)]
    text: Annotated[str | UnsetType, about("The text that it completes.", " a")] = UNSET


class KoboldTokenized(Struct):
    """Tokens of a text."""

    tokens: Annotated[list[TokenText], about("Each token; their texts join to the whole.")]
    token_ids: Annotated[list[int], about("Their ids.", [259, 354])]
    token_count: Annotated[int, about("How many there are.", 2)]


class KoboldDetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text."""

    token_ids: Annotated[list[int] | None, about("The ids.", [259, 354])] = None
    tokens: Annotated[list[int] | None, about("Another name for ``token_ids``.", [259, 354])] = None


class Detokenized(Struct):
    """Text of ids."""

    text: Annotated[str, about("The text.", "Anna is a")]


class TokenCountBody(Struct, kw_only=True):
    """Text whose tokens to count."""

    prompt: Annotated[str | None, about("The text.", "Anna is a")] = None
    special: Annotated[bool, about("Whether tokens that the model wants around it count.")] = True


class KoboldTokenCount(Struct):
    """How many tokens, and which."""

    value: Annotated[int, about("How many; -1 in a failure.", 2)]
    ids: Annotated[list[int], about("Which.", [259, 354])]


class ExtraDetokenizeBody(Struct, kw_only=True):
    """Ids to turn into text."""

    ids: Annotated[list[int], about("The ids.", [259, 354])]


class ExtraDetokenized(Struct):
    """Text of ids."""

    result: Annotated[str, about("The text.", "Anna is a")]
    success: Annotated[bool, about("Whether there is one.")]


# ---- what runs


class KoboldModel(Struct, kw_only=True):
    """What a client needs to read attention and to stay within the context."""

    result: Annotated[str, about("Its name.", "demo")]
    model_name: Annotated[str, about("The same.", "demo")]
    vocab_size: Annotated[int, about("Tokens of the vocabulary.", 1024)]
    num_layers: Annotated[int, about("Layers.", 4)]
    num_attention_heads: Annotated[int, about("Heads of each.", 8)]
    num_key_value_heads: Annotated[int, about("Heads with keys and values of their own.", 4)]
    embedding_size: Annotated[int, about("Numbers for each token between layers.", 256)]
    max_context_length: Annotated[int, about("Longest prompt in tokens.", 2048)]
    max_trained_context: Annotated[int, about("Tokens that it was trained with.", 512)]
    bos_token_id: Annotated[int, about("Id that begins a text; -1 if there is none.", 1)]
    eos_token_id: Annotated[int, about("Id that ends one; -1 if there is none.", 2)]
    eot_token_id: Annotated[int, about("Id that ends a message; -1 if there is none.", 2)]
    rope_freq_base: Annotated[float, about("Base frequency of its positions.", 10000.0)]
    rope_freq_scale: Annotated[float, about("Factor of its positions.", 1.0)]
    attention_layers: Annotated[
        tuple[int, ...] | UnsetType,
        about("Layers that rows come from, in their order; absent if all do.", [3, 7]),
    ] = UNSET


class ModelInfoReply(Struct, kw_only=True):
    """Reply of ``GET /api/v1/model/info``; null is what the model's file does not say."""

    model_name: Annotated[str, about("Its name.", "demo")]
    architecture: Annotated[str | None, about("Its architecture.", "llama")]
    vocab_size: Annotated[int, about("Tokens of the vocabulary.", 1024)]
    num_layers: Annotated[int, about("Layers.", 4)]
    num_attention_heads: Annotated[int, about("Heads of each.", 8)]
    num_key_value_heads: Annotated[int, about("Heads with keys and values of their own.", 4)]
    hidden_size: Annotated[int, about("Numbers for each token between layers.", 256)]
    max_position_embeddings: Annotated[int, about("Tokens that it was trained with.", 512)]
    rope_theta: Annotated[float | None, about("Base frequency of its positions.", 10000.0)]
    bos_token_id: Annotated[int | None, about("Id that begins a text.", 1)]
    eos_token_id: Annotated[int | None, about("Id that ends one.", 2)]
    special_tokens: Annotated[
        dict[str, str | int | None],
        about("Texts and ids of special tokens.", {"eos_token": "</s>"}),
    ]
    chat_template: Annotated[str | None, about("Its chat template.", "{{ messages }}")]
    torch_dtype: Annotated[None, about("Always null.", None)]
    context_length: Annotated[int, about("Longest prompt in tokens that is allowed.", 2048)]
    attention_layers: Annotated[
        list[int],
        about("Layers that rows come from, in the order of the rows' first axis.", [0, 1, 2, 3]),
    ]


class LoadBody(Struct, kw_only=True):
    """Body of ``POST /api/v1/model/load``; the numbers override the server's settings."""

    model: Annotated[
        str, about("Name of the file, as ``GET /api/v1/models`` lists it.", "model.gguf")
    ]
    n_ctx: Annotated[int | None, about("Tokens that a slot holds.", 4096)] = None
    n_slots: Annotated[int | None, about("Requests that run at the same time.", 2)] = None
    n_gpu_layers: Annotated[int | None, about("Layers on the GPU.", 99)] = None


class ModelsReply(Struct):
    """Reply of ``GET /api/v1/models``: what may be loaded, and what is."""

    models: Annotated[list[str], about("Names for ``POST /api/v1/model/load``.", ["model.gguf"])]
    loaded: Annotated[
        str | None,
        about(
            "The one of them that is loaded; the model's own name if it is none of them, null "
            "without one.",
            "model.gguf",
        ),
    ]
    model_name: Annotated[
        str | None, about("The loaded model's name, as in ``/api/v1/model/info``.", "demo")
    ]


class Result(Struct):
    """One text."""

    result: Annotated[str, about("The text.", "1.2.5")]


class Number(Struct):
    """One number."""

    value: Annotated[int, about("The number.", 2048)]


class Word(Struct):
    """One text."""

    value: Annotated[str, about("The text.", "")]


class Words(Struct):
    """A list of texts."""

    values: Annotated[list[str], about("The texts.", [])]


class Status(Struct):
    """Whether the server is there."""

    status: Annotated[str, about('Always "ok", such as "ok".', "ok")]


class Version(Struct, kw_only=True):
    """Which KoboldCpp this answers as, and which of its parts exist."""

    result: Annotated[str, about('Always "KoboldCpp".', "KoboldCpp")] = "KoboldCpp"
    version: Annotated[str, about("Its version.")] = KOBOLDCPP_VERSION
    protected: Annotated[bool, about("Whether a key is needed.")] = False
    llm: Annotated[bool, about("Whether it generates text.")] = True
    txt2img: Annotated[bool, about("Whether it draws.")] = False
    vision: Annotated[bool, about("Whether it reads pictures.")] = False
    audio: Annotated[bool, about("Whether it reads sound.")] = False
    transcribe: Annotated[bool, about("Whether it writes down speech.")] = False
    multiplayer: Annotated[bool, about("Whether stories are shared.")] = False
    websearch: Annotated[bool, about("Whether it searches the web.")] = False
    tts: Annotated[bool, about("Whether it speaks.")] = False
    embeddings: Annotated[bool, about("Whether KoboldCpp's own route of embeddings is there.")] = (
        False
    )
    savedata: Annotated[bool, about("Whether it keeps stories.")] = False
    admin: Annotated[int, about("Whether KoboldCpp's administration is there; 0 for no.")] = 0


class Software(Struct):
    """What serves."""

    name: Annotated[str, about("Its name.", "kqview")]
    version: Annotated[str, about("Its version.", "0.1.0")]


class Api(Struct, kw_only=True):
    """An API of the server."""

    name: Annotated[str, about("Its name.", "KoboldAI API")]
    rel_url: Annotated[str, about("Where its routes begin.", "/api")]
    documentation: Annotated[str, about("Path of its documentation.", "/docs")]
    version: Annotated[str, about("Its version.", "1.2.5")]


class Apis(Struct):
    """APIs of the server."""

    koboldai: Annotated[Api, about("KoboldAI's.")]


class ServiceInfo(Struct, kw_only=True):
    """Which APIs are here, as KoboldAI's services tell each other."""

    version: Annotated[str, about("Version of this form.", "0.2")]
    software: Annotated[Software, about("What serves.")]
    api: Annotated[Apis, about("Its APIs.")]


class Perf(Struct, kw_only=True):
    """What the last generation cost, and what the server does now."""

    last_process: Annotated[float, about("Milliseconds for a token of the prompt.", 0.7)]
    last_eval: Annotated[float, about("Milliseconds for a generated token.", 2.0)]
    last_token_count: Annotated[int, about("Tokens that were generated.", 20)]
    last_input_count: Annotated[int, about("Tokens of the prompt.", 12)]
    last_process_time: Annotated[float, about("Seconds of the prompt.", 0.0085)]
    last_eval_time: Annotated[float, about("Seconds of generating.", 0.04)]
    last_process_speed: Annotated[float, about("Tokens of the prompt a second.", 1411.8)]
    last_eval_speed: Annotated[float, about("Generated tokens a second.", 500.0)]
    last_seed: Annotated[int, about("Its seed; -1 if none was given.", 7)]
    total_gens: Annotated[int, about("Generations so far.", 3)]
    total_img_gens: Annotated[int, about("Always 0.", 0)] = 0
    stop_reason: Annotated[
        int,
        about(
            "Why it ended: -1 none, 0 length, 1 the model ended its text, 2 a stop of the request.",
            0,
        ),
    ]
    queue: Annotated[int, about("Requests that wait.", 0)]
    idle: Annotated[int, about("1 if nothing runs.", 1)]
    uptime: Annotated[float, about("Seconds since the start.", 60.0)]
    idletime: Annotated[float, about("Seconds since the last generation.", 12.0)]
    quiet: Annotated[bool, about("Always false.")] = False
    hordeexitcounter: Annotated[int, about("Always 0.", 0)] = 0


# ---- generations that run


class RunBody(Struct, kw_only=True):
    """Which generation is meant."""

    genkey: Annotated[str | None, about("KoboldAI's name of the request.", "KCPP1234")] = None
    request_id: Annotated[str | None, about("Name of the request.", "r1")] = None


class Aborted(Struct):
    """Whether something was ended; texts, not booleans."""

    success: Annotated[str, about('"true" if a generation was ended, else "false".', "true")]
    done: Annotated[str, about('"true" if it was clear which was meant.', "true")]


class ResultText(Struct):
    """Text so far."""

    text: Annotated[str, about('The text; "" if nothing runs.', " teacher.")]


class Texts(Struct):
    """Text of each result."""

    results: Annotated[list[ResultText], about("Each result.")]


class LastLogprobs(Struct):
    """Logprobs of the last generation that was asked for some."""

    logprobs: Annotated[
        TextLogprobs | None, about("Those of its tokens; null if none were asked for.")
    ]


EMPTY: Final = msgspec.Raw(b"{}")


# ---- events and replies of generations

PromptTokens = Annotated[int, about("Tokens of the prompt.", 7)]
CachedTokens = Annotated[
    int, about("Those of them that were in a cache; the others were evaluated.", 0)
]
Seed = Annotated[int, about("The seed that is used, also if the request gave none.", 2531011)]
QueueMs = Annotated[float, about("Milliseconds that it waited for a slot.", 0.1)]
PromptMs = Annotated[float, about("Milliseconds from then to the first token.", 4.2)]
GenerationMs = Annotated[float, about("Milliseconds from the first token to the last.", 1.7)]
TruncatedTokens = Annotated[
    int | UnsetType, about("Tokens at the front of a text that was too long.", 120)
]
Ignored = Annotated[
    Sequence[str] | UnsetType, about("Names in the request that had no effect.", ["max_lenght"])
]
RequestName = Annotated[
    str | UnsetType, about("Name of the request; absent in kobold's frames.", "r1")
]
_REASON: Final = about(
    'Why it ended exactly: "stop" if the model ended the text, "stop_token", "stop_sequence", '
    '"length", "cancelled" or "tool_calls".',
    "length",
)
SampleIndex = Annotated[int | UnsetType, about("Index of the sample, if there are several.", 0)]


class KoboldLeftOut(Struct, kw_only=True):
    """What the server left out of a request."""

    truncated_tokens: TruncatedTokens = UNSET
    ignored: Ignored = UNSET


class StartEvent(KoboldLeftOut, kw_only=True, tag_field="type", tag="start"):
    """What follows, with ``start_event``."""

    request_id: Annotated[str, about("Label of the request.", "r1")]
    prompt_tokens: PromptTokens
    cached_tokens: CachedTokens
    prompt_ids: Annotated[Sequence[int], about("Their ids, as they are evaluated.", [0, 35, 444])]
    seed: Seed
    attention: Annotated[
        RowsDescribed | UnsetType, about("What the rows are, if some were asked for.")
    ] = UNSET


class LikelyToken(Struct):
    """One of the most probable tokens at a place."""

    token_id: Annotated[int, about("Its id.", 354)]
    text: Annotated[str, about("Its text.", " the")]
    logprob: Annotated[float, about("Its logprob before bias, grammar and samplers.", -1.5)]


class KoboldToken(Struct, kw_only=True):
    """A token that was generated."""

    token_id: Annotated[int, about("Its id.", 354)]
    text: Annotated[
        str, about('The text that it completes; "" inside a character of several ids.', " teac")
    ]
    logprob: Annotated[
        float | UnsetType,
        about("Its logprob before bias, grammar and samplers, if asked for.", -0.6),
    ] = UNSET
    top_logprobs: Annotated[
        list[LikelyToken] | UnsetType, about("The most probable tokens at its place, if asked for.")
    ] = UNSET
    sample: Annotated[
        int | UnsetType,
        about("In a reply that is not streamed: index of the sample, if there are several.", 0),
    ] = UNSET


class KoboldTokenEvent(Struct, kw_only=True, tag_field="type", tag="token"):
    """A token, with its attention."""

    token: Annotated[KoboldToken, about("The token.")]
    request_id: Annotated[str, about("Name of the request.", "r1")]
    sample: SampleIndex = UNSET
    attention: Annotated[
        AttentionObject | UnsetType | None,
        about(
            "Its attention; null over SSE and absent over the WebSocket if none was asked for.", ROW
        ),
    ] = UNSET


class KoboldTokenFrame(Struct, kw_only=True, tag_field="type", tag="token"):
    """A token; a binary frame with its row follows."""

    token_id: Annotated[int, about("Its id.", 354)]
    text: Annotated[str, about("The text that it completes.", " teac")]
    attention: Annotated[
        AttentionObject | UnsetType | None,
        about(
            "What the row is, if it is anything but float32 of all layers and heads; formats "
            "that are not arrays are here completely."
        ),
    ] = UNSET


class PromptEntry(Struct, kw_only=True):
    """Rows of the prompt."""

    start: Annotated[int, about("Position of their first token.", 0)]
    rows: Annotated[int, about("How many tokens they are of.", 7)]
    attention: Annotated[
        AttentionObject | UnsetType | None,
        about(
            "Their attention, with an axis for the rows before that of the columns.",
            {**ROW, "shape": [4, 8, 7, 7]},
        ),
    ] = UNSET


class KoboldPromptEvent(PromptEntry, kw_only=True, tag_field="type", tag="prompt_attention"):
    """Rows of the prompt, with ``prompt_attention``."""

    request_id: RequestName = UNSET


class KoboldRemovedEvent(Removed, kw_only=True, tag_field="type", tag="removed"):
    """What mods took back, which a client drops; no binary frame follows."""

    request_id: RequestName = UNSET
    sample: SampleIndex = UNSET


class PruningEvent(Struct, kw_only=True, tag_field="type", tag="pruning_suggestion"):
    """Sentences that got little attention, before the end, if there were ``sentences``."""

    request_id: Annotated[str, about("Name of the request.", "r1")]
    prunable_sentences: Annotated[
        list[PrunableSentence], about("The sentences, the one with the least attention first.")
    ]


class SampleEnd(Struct, kw_only=True):
    """The end of a sample."""

    sample: Annotated[int, about("Its index.", 0)]
    finish_reason: Annotated[str | None, about("Why it ended.", "length")]
    total_tokens: Annotated[int, about("Tokens that were generated.", 2)]


class KoboldDoneEvent(Struct, kw_only=True, tag_field="type", tag="done"):
    """The end, with the figures of the request; times and counts are of its first sample."""

    finish_reason: Annotated[
        str,
        about('Why it ended: of kobold "stop" or "length", of dream the exact reason.', "length"),
    ]
    total_tokens: Annotated[int, about("Tokens that were generated.", 2)]
    request_id: RequestName = UNSET
    reason: Annotated[str | UnsetType, _REASON] = UNSET
    generation_time_ms: Annotated[
        int | UnsetType, about("Of dream, milliseconds from admission to the end.", 4)
    ] = UNSET
    seed: Seed
    prompt_tokens: PromptTokens
    cached_tokens: CachedTokens
    queue_ms: QueueMs
    prompt_ms: PromptMs
    generation_ms: GenerationMs
    truncated_tokens: TruncatedTokens = UNSET
    ignored: Ignored = UNSET

    tool_calls: Annotated[list[ModCall] | UnsetType, about("Calls that a mod made.")] = UNSET
    samples: Annotated[
        list[SampleEnd] | UnsetType,
        about("Of dream, the end of each sample, if there are several."),
    ] = UNSET
    text: Annotated[
        str | UnsetType,
        about(
            "Of kobold, text that no token completed, if the model ended inside a character.", "�"
        ),
    ] = UNSET


class PlainEvent(KoboldLeftOut, kw_only=True):
    """Text in KoboldAI's form, for requests without attention and ``request_id``."""

    token: Annotated[str, about("Text that is new.", " t")]
    finish_reason: Annotated[
        str | None, about('Why it ended: "length" or "stop"; null before the end.', None)
    ]
    removed: Annotated[Removed | UnsetType, about("What mods took back.")] = UNSET
    tool_calls: Annotated[list[ModCall] | UnsetType, about("Calls that a mod made.")] = UNSET


class AttentionEntry(Struct):
    """A token with its attention object."""

    token_id: Annotated[int, about("Id of the token.", 259)]
    text: Annotated[str, about("The text that it completes.", " t")]
    attention: Annotated[AttentionObject, about("Its attention.")]
    sample: SampleIndex = UNSET


class SampleResult(Struct):
    """One sample, as KoboldAI's clients expect it."""

    text: Annotated[str, about("The text.", " teacher.")]
    finish_reason: Annotated[str, about('Why it ended: "stop" or "length".', "length")]
    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 6)]
    completion_tokens: Annotated[int, about("Tokens that were generated.", 2)]
    logprobs: Annotated[
        TextLogprobs | UnsetType | None, about("Those of its tokens, if asked for.")
    ] = UNSET


class Details(KoboldLeftOut, kw_only=True):
    """What a reply tells of its request; times and counts are of its first sample."""

    reason: Annotated[str, _REASON]
    seed: Seed
    prompt_tokens: PromptTokens
    cached_tokens: CachedTokens
    queue_ms: QueueMs
    prompt_ms: PromptMs
    generation_ms: GenerationMs


class GenerateReply(Struct, kw_only=True):
    """Reply of ``POST /api/v1/generate``; all but ``results`` and ``details`` only if asked for."""

    results: Annotated[list[SampleResult], about("Each sample.")]
    details: Annotated[Details, about("Figures of the request, and what had no effect.")]
    generated_text: Annotated[str | UnsetType, about("Text of the first sample.", " teacher.")] = (
        UNSET
    )
    finish_reason: Annotated[str | UnsetType, about("Why the first sample ended.", "length")] = (
        UNSET
    )
    tool_calls: Annotated[list[ModCall] | UnsetType, about("Calls that a mod made.")] = UNSET
    prunable_sentences: Annotated[
        list[PrunableSentence] | UnsetType,
        about("Sentences that got little attention, if there were ``sentences``."),
    ] = UNSET
    generated_tokens: Annotated[list[KoboldToken] | UnsetType, about("Every token.")] = UNSET
    prompt_attention: Annotated[
        list[PromptEntry] | UnsetType, about("Rows of the prompt, with ``prompt_attention``.")
    ] = UNSET
    attention_data: Annotated[
        list[AttentionEntry] | UnsetType, about("Every token with its attention.")
    ] = UNSET
