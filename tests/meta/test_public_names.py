"""The public surface: names, options and defaults that code outside this repository relies on.

Adding to it is free; a failure here means that something was renamed or taken away.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_type_hints

import pytest

import kqview
import kqview.state
from kqview import Capture, Engine, Generation, ModelInfo, Sampling, Slot, Token, errors
from kqview.submission import GenerateOptions
from kqview.types.sampling import SamplingOptions

SAMPLING_DEFAULTS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "seed": None,
    "logit_bias": {},
    "banned_tokens": (),
    "stop": (),
    "stop_tokens": (),
    "ignore_eos": False,
    "grammar": None,
    "json_schema": None,
    "regex": None,
    "top_logprobs": None,
}
SAMPLING_NAMES = {
    *SAMPLING_DEFAULTS,
    *("typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "xtc_probability", "xtc_threshold"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
}
GENERATE_DEFAULTS = {
    "max_tokens": 256,
    "sampling": None,
    "capture": None,
    "slot": None,
    "mods": (),
    "logits_processor": None,
    "stopping": None,
    "forcing": None,
    "mod_time_limit_s": None,
    "mods_strict": False,
    "trace": None,
    "request_id": None,
    "priority": 0,
    "reuse": "exact",
    "reuse_min_tokens": 16,
    "cache_prompt": True,
    "deterministic": False,
    "context_shift": False,
    "n_keep": 0,
    "n_discard": None,
    "lora": None,
    "add_special": True,
    "parse_special": True,
}
ENGINE_NAMES = {
    *("n_ctx", "n_slots", "n_batch", "n_ubatch", "n_threads", "n_gpu_layers", "flash_attn"),
    *("kv_type", "swa_full", "lora", "attention_budget_bytes", "run_ahead", "progress"),
    *("pooling", "chat_template", "template_options"),
    *("rpc_servers", "rpc_timeout_s"),
}
CAPTURE_DEFAULTS = {
    "kind": "probs",
    "layers": None,
    "heads": None,
    "reduce": None,
    "top_k": None,
    "dtype": "float32",
    "prompt": False,
    "hidden": (),
    "on_full": "raise",
    "wait_s": 10.0,
}
MODEL_NAMES = {
    *("name", "architecture", "n_vocab", "n_layer", "n_head", "n_head_kv", "n_embd"),
    *("n_ctx_train", "attention_layers", "attention_scale", "bos_token_id", "eos_token_id"),
    *("eot_token_id", "pad_token_id", "special_tokens", "rope_freq_base", "rope_freq_scale"),
    *("chat_template", "n_params", "size_bytes", "file_type", "classifier_labels", "metadata"),
    "adds_bos",
}
ENGINE_MEMBERS = {
    *("model", "slots", "tokenize", "detokenize", "token_bytes", "token_text", "generate"),
    *("attend", "stats", "system_info", "close", "demo", "__enter__", "__exit__"),
    *("chat", "apply_chat_template", "embed", "classify", "pooling", "lora", "set_lora_scales"),
    *("score", "ascore", "map", "aembed", "aclassify", "from_hub", "n_threads"),
}
GENERATION_MEMBERS = {
    *(
        "close",
        "cancel",
        "read",
        "aread",
        "prompt_attention",
        "request_id",
        "prompt_ids",
        "tokens",
        "text",
        "finish_reason",
        "usage",
        "slot",
        "trace",
        "mods",
        "tool_calls",
        "mod_errors",
        "deltas",
        "adeltas",
        "take_delta",
        "n_removed",
    ),
    *("__iter__", "__next__", "__aiter__", "__anext__", "__enter__", "__exit__"),
}
TOKEN_NAMES = {
    *("id", "text", "index", "logprob", "top_logprobs", "attention", "forced"),
    *("attention_positions", "hidden", "discarded", "n_removed"),
}
ERROR_NAMES = {
    *("KqviewError", "RequestError", "PromptTooLong", "InvalidToken", "UnknownSlot"),
    *("InvalidCapture", "InvalidSampling", "ModelError", "ModelLoadError", "UnsupportedModel"),
    *("CapacityError", "PoolExhausted", "QueueFull", "OutOfMemory", "StateError"),
    *("StateFormatError", "StateMismatch", "ClosedError", "BusyError", "DecodeError"),
    *("InternalError", "InvalidActionError", "EmittedError", "UnknownOption"),
    *("InvalidMod", "ModFailed", "ModFileError"),
}


def keyword_defaults(function: object) -> dict[str, object]:
    """Keyword-only parameters with their defaults."""
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def field_defaults(cls: type) -> dict[str, object]:
    made = cls()
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(cls)}


def test_package_exports_its_classes():
    names = {"Engine", "Capture", "Sampling", "Token", "Generation", "Slot", "ModelInfo", "errors"}
    assert names | {"Mod", "mod", "Usage", "EngineHealth", "EngineStats", "PoolStats"} <= set(
        kqview.__all__
    )
    assert all(hasattr(kqview, name) for name in kqview.__all__)


def test_engine_takes_its_options_by_name():
    assert keyword_defaults(Engine.__init__).keys() >= ENGINE_NAMES


def test_generate_has_the_documented_options_and_defaults():
    assert keyword_defaults(Engine.generate).items() >= GENERATE_DEFAULTS.items()


def test_chat_takes_the_options_of_generate():
    options = get_type_hints(GenerateOptions).keys()
    assert options == get_type_hints(SamplingOptions).keys() | GENERATE_DEFAULTS.keys()
    assert keyword_defaults(Engine.chat).items() >= {"tools": None}.items()
    assert keyword_defaults(Engine.apply_chat_template).items() >= (
        {"tools": None, "add_generation_prompt": True, "tokenize": True}.items()
    )


def test_generate_takes_every_field_of_sampling_by_name():
    fields = {field.name for field in dataclasses.fields(Sampling)}
    assert get_type_hints(SamplingOptions).keys() == fields
    assert fields >= SAMPLING_NAMES


def test_sampling_has_the_documented_defaults():
    assert field_defaults(Sampling).items() >= SAMPLING_DEFAULTS.items()


def test_capture_has_the_documented_options_and_defaults():
    assert field_defaults(Capture).items() >= CAPTURE_DEFAULTS.items()
    assert Capture("probs").kind == "probs"
    assert callable(Capture.bytes_per_token)


def test_engine_options_are_those_of_engine():
    assert get_type_hints(kqview.EngineOptions).keys() == keyword_defaults(Engine.__init__).keys()
    assert kqview.GenerateOptions is GenerateOptions


def test_tokens_and_prompts_name_their_columns():
    names = {"column_ids", "column_texts", "layers", "heads"}
    assert names | {"rows"} <= set(dir(Token))
    assert names | {"array", "usage"} <= set(dir(kqview.PromptAttention))
    assert {"to_hf", "named"} <= set(dir(Token)) & set(dir(kqview.PromptAttention))
    assert {"Tokenized", "ChatPrompt"} <= set(kqview.__all__)
    assert {"stack", "save", "load", "SavedFolder", "Finished"} <= set(kqview.__all__)
    assert keyword_defaults(Engine.tokenize).items() >= {"add_special": True}.items()


@pytest.mark.parametrize(("cls", "names"), [(ModelInfo, MODEL_NAMES), (Token, TOKEN_NAMES)])
def test_dataclass_has_the_documented_fields(cls: type, names: set[str]):
    assert {field.name for field in dataclasses.fields(cls)} >= names


@pytest.mark.parametrize(
    ("cls", "names"),
    [(Engine, ENGINE_MEMBERS), (Generation, GENERATION_MEMBERS)],
)
def test_class_has_the_documented_members(cls: type, names: set[str]):
    assert {name for name in names if not hasattr(cls, name)} == set()


def test_slot_has_the_documented_members():
    names = {
        "tokens",
        "n_tokens",
        "is_busy",
        "save",
        "restore",
        "save_file",
        "restore_file",
        "shift",
        "remove",
        "truncate",
        "clear",
        "messages",
    }
    assert names <= set(dir(Slot))


def test_viz_has_the_documented_names():
    names = {"heatmap", "head_grid", "coloured", "to_html", "overhead_plot"}
    assert names <= set(kqview.viz.__all__)
    for cls in (Engine, Generation, ModelInfo, kqview.PromptAttention):
        assert hasattr(cls, "_repr_html_")


def test_state_has_the_documented_names():
    names = {"inspect", "SavedState", "SessionStore", "SessionInfo", "read_state", "write_state"}
    assert names <= set(kqview.state.__all__)


def test_errors_has_the_documented_classes():
    assert set(errors.__all__) >= ERROR_NAMES
