"""Names of options: says what an unknown option is called here.

Users bring the names of transformers, OpenAI, vLLM, llama.cpp and llama-cpp-python. Nothing is
accepted under two names: the error names the right one.
"""

import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, ParamSpec, TypeVar, cast

from kqview.errors import UnknownOption

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_GREEDY: Final = "temperature=0 is greedy decoding"
_ONE: Final = "one call makes one answer; call it again, or use engine.map"
_STREAM: Final = "a generation is always a stream; iterate over it, or call read()"
_NO_BEAMS: Final = "kqview samples and does not search; leave it out"
_NO_END: Final = "ignore_eos=True keeps a text from ending early"
_PROMPT: Final = "the prompt is the first argument"
_MODEL: Final = "the path of the model is the first argument"
_MEMORY: Final = "llama.cpp decides it; leave it out"
_ENUM: Final = 'json_schema={"enum": [...]}'
_PREFILL: Final = "continue_final_message=True, with the text as the last message"
_ORDER: Final = "the order of samplers is fixed; set their options, and leave it out"
_LISTS: Final = "ids are a list; leave it out, or pass them to numpy.array"

_SENTENCES: Final = frozenset(
    {_GREEDY, _ONE, _STREAM, _NO_BEAMS, _NO_END, _PROMPT, _MODEL, _MEMORY, _ORDER, _LISTS}
)

# What an option of another library is here.
_ELSEWHERE: Final[Mapping[str, str]] = {
    # limits
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_gen_len": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    # sampling
    "do_sample": _GREEDY,
    "greedy": _GREEDY,
    "temp": "temperature",
    "typical": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "penalty_repeat": "repeat_penalty",
    "rep_pen": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
    "rep_pen_range": "repeat_last_n",
    "penalty_present": "presence_penalty",
    "penalty_freq": "frequency_penalty",
    "mirostat_mode": "mirostat",
    "random_seed": "seed",
    "generator": "seed",
    "num_beams": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
    "bad_words": "banned_tokens",
    "bad_words_ids": "banned_tokens",
    "suppress_tokens": "banned_tokens",
    "sequence_bias": "logit_bias",
    "samplers": _ORDER,
    # ends
    "stop_sequences": "stop",
    "stop_sequence": "stop",
    "stop_strings": "stop",
    "stop_token_ids": "stop_tokens",
    "eos_token_id": "stop_tokens",
    "stopping_criteria": "stopping",
    "min_new_tokens": _NO_END,
    "min_tokens": _NO_END,
    # several answers, streams
    "n": _ONE,
    "best_of": _ONE,
    "num_return_sequences": _ONE,
    "stream": _STREAM,
    "streaming": _STREAM,
    "streamer": _STREAM,
    # results
    "logprobs": "top_logprobs",
    "n_probs": "top_logprobs",
    "output_scores": "top_logprobs",
    "prompt_logprobs": "engine.score(ids)",
    "echo": "engine.score(ids)",
    "output_attentions": 'capture="probs"',
    "output_hidden_states": "capture=Capture(hidden=[...])",
    "attentions": 'capture="probs"',
    "return_dict_in_generate": 'capture="probs"',
    # constraints
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": _ENUM,
    "guided_grammar": "grammar",
    "guided_decoding": "json_schema",
    "structured_outputs": "json_schema",
    "response_format": "json_schema",
    "response_model": "json_schema",
    "response_schema": "json_schema",
    "output_schema": "json_schema",
    "output_type": "json_schema",
    "text_format": "json_schema",
    "format": "json_schema",
    "schema": "json_schema",
    "choices": _ENUM,
    "pattern": "regex",
    # chats
    "functions": "tools",
    "function_call": "tool_choice",
    "tool_choice": "engine.chat(messages, tools=tools, tool_choice=...)",
    "continue_final_message": "engine.chat(messages, continue_final_message=True)",
    "prefill": _PREFILL,
    "prefix": _PREFILL,
    "add_generation_prompt": "engine.apply_chat_template(messages, add_generation_prompt=False)",
    "chat_template_kwargs": "template_options",
    "enable_thinking": 'template_options={"enable_thinking": False}',
    "reasoning_effort": 'template_options={"reasoning_effort": "low"}',
    "documents": 'template_options={"documents": [...]}',
    "return_tensors": _LISTS,
    "return_dict": _LISTS,
    "logits_processors": "logits_processor",
    # cache, slots and requests
    "use_cache": "cache_prompt",
    "id_slot": "slot",
    "slot_id": "slot",
    "lora_request": "lora",
    "messages": "engine.chat(messages)",
    "tools": "engine.chat(messages, tools=tools)",
    "input_ids": _PROMPT,
    "inputs": _PROMPT,
    # Engine
    "model_path": _MODEL,
    "path": _MODEL,
    "repo_id": "Engine.from_hub(repo, file)",
    "ctx_size": "n_ctx",
    "num_ctx": "n_ctx",
    "context_length": "n_ctx",
    "max_model_len": "n_ctx",
    "max_seq_len": "n_ctx",
    "n_parallel": "n_slots",
    "parallel": "n_slots",
    "n_seq_max": "n_slots",
    "max_num_seqs": "n_slots",
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "threads": "n_threads",
    "n_threads_batch": "n_threads",
    "ngl": "n_gpu_layers",
    "gpu_layers": "n_gpu_layers",
    "n_gpu_layer": "n_gpu_layers",
    "device": "n_gpu_layers",
    "device_map": "n_gpu_layers",
    "gpu_memory_utilization": _MEMORY,
    "use_mmap": _MEMORY,
    "use_mlock": _MEMORY,
    "flash_attention": "flash_attn",
    "attn_implementation": "flash_attn",
    "type_k": "kv_type",
    "type_v": "kv_type",
    "cache_type_k": "kv_type",
    "cache_type_v": "kv_type",
    "kv_cache_dtype": "kv_type",
    "embedding": "pooling",
    "embeddings": "pooling",
    "pooling_type": "pooling",
    "chat_format": "chat_template",
    "lora_path": "lora",
    "lora_adapters": "lora",
    "verbose": 'logging.getLogger("kqview.llama")',
    "logits_all": "engine.score(ids)",
}


# Options for which None is a value of its own: no limit but the slot's.
_MEANS_NONE: Final = frozenset({"max_tokens"})


def unknown_option(
    who: str, name: str, known: Iterable[str], *, unlisted: Iterable[str] = ()
) -> UnknownOption:
    """The error for the option *name* that *who*, a function or a class, does not have.

    Args:
        who: Name of the function or class.
        name: What was given.
        known: The names that *who* has.
        unlisted: Those of *known* that a message does not list.
    """
    names = sorted(known)
    here = _ELSEWHERE.get(name)
    if here is not None and here.isidentifier() and here not in names:
        here = None
    if here is None:
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
        here = near[0] if near else None
    if here is None:
        left_out = set(unlisted)
        advice = f"it has {', '.join(one for one in names if one not in left_out)}"
    else:
        advice = here if here in _SENTENCES else f"here it is {here}"
    return UnknownOption(f"{who} has no option {name}; {advice}", parameter=name)


def names_options(
    who: str, *, also: Iterable[str] = (), hides_first: bool = True
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a function raise `unknown_option` instead of Python's TypeError.

    An option given as None has its default, as if it were not given, but for `_MEANS_NONE`.

    Args:
        who: Name of the function or class in messages.
        also: Names that its ``**options`` take.
        hides_first: Whether the first argument is left out of the names that a message lists: a
            function is called with it, whatever else is wrong.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = [*inspect.signature(function).parameters.values()]
        known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        known = [name for name in known if name != "self"]
        passed_on = set(also) - set(known)
        options = {*known, *passed_on}
        unlisted = known[:1] if hides_first else []
        has_default = {
            p.name
            for p in parameters
            if p.kind == p.KEYWORD_ONLY and p.default is not None and p.default is not p.empty
        }
        unset = (has_default | passed_on) - _MEANS_NONE

        def check(given: dict[str, Any]) -> None:
            for name in given:
                if name not in options:
                    raise unknown_option(who, name, options, unlisted=unlisted)
            for name in [name for name, value in given.items() if value is None]:
                if name in unset:
                    del given[name]

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            check(kwargs)
            return function(*args, **kwargs)

        @functools.wraps(function)
        async def achecked(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            check(kwargs)
            return await cast("Awaitable[Any]", function(*args, **kwargs))

        if inspect.iscoroutinefunction(function):
            return cast("Callable[_P, _R]", achecked)
        return checked

    return decorate


def names_fields(cls: type[_T]) -> type[_T]:
    """Like `names_options`, for a dataclass."""
    made: Any = cls
    made.__init__ = names_options(cls.__name__, hides_first=False)(made.__init__)
    return cls
