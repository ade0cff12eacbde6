"""Names of other libraries: says what an unknown option, method or attribute is called here.

Users bring the names of transformers, OpenAI, vLLM, llama.cpp and llama-cpp-python. Nothing is
accepted under two names: the error names the right one, or says what to do instead.
"""

import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, ParamSpec, TypeVar, cast

from kqview.errors import UnknownAttribute, UnknownOption

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_NEAR: Final = 0.8  # of difflib: a typing error, not another word that looks alike

_ENUM: Final = 'json_schema={"enum": [...]}'
_PREFILL: Final = "continue_final_message=True, with the text as the last message"

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
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    # sampling
    "temp": "temperature",
    "typical": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "penalty_repeat": "repeat_penalty",
    "rep_pen": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
    "rep_pen_range": "repeat_last_n",
    "last_n_tokens_size": "repeat_last_n",
    "penalty_present": "presence_penalty",
    "penalty_freq": "frequency_penalty",
    "no_repeat_ngram_size": "dry_multiplier, with dry_allowed_length",
    "mirostat_mode": "mirostat",
    "random_seed": "seed",
    "generator": "seed",
    "bad_words": "banned_tokens",
    "bad_words_ids": "banned_tokens",
    "suppress_tokens": "banned_tokens",
    "begin_suppress_tokens": "begin_suppress",
    "sequence_bias": "logit_bias",
    "logits_processors": "logits_processor",
    # ends
    "stop_sequences": "stop",
    "stop_sequence": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "stop_token_ids": "stop_tokens",
    "eos_token_id": "stop_tokens",
    "stopping_criteria": "stopping",
    "forced_bos_token_id": "forcing",
    "forced_eos_token_id": "forcing",
    # results
    "logprobs": "top_logprobs",
    "n_probs": "top_logprobs",
    "output_scores": "top_logprobs",
    "output_logits": "capture=Capture(vocab_logits=True)",
    "prompt_logprobs": "engine.score(ids)",
    "echo": "engine.score(ids)",
    "output_attentions": 'capture="probs"',
    "output_hidden_states": "capture=Capture(hidden=[...])",
    "attentions": 'capture="probs"',
    "return_dict_in_generate": 'capture="probs"',
    "skip_special_tokens": "engine.detokenize(generation.tokens, skip_special_tokens=True)",
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
    "think": 'template_options={"enable_thinking": False}',
    "reasoning_effort": 'template_options={"reasoning_effort": "low"}',
    "documents": 'template_options={"documents": [...]}',
    # cache, slots and requests
    "use_cache": "cache_prompt",
    "id_slot": "slot",
    "slot_id": "slot",
    "lora_request": "lora",
    "messages": "engine.chat(messages)",
    "tools": "engine.chat(messages, tools=tools)",
    "prompts": "engine.map(prompts)",
    "steering": "mods",
    "control_vector": "mods",
    # Engine
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

# Names of other libraries that stand for no option here, and what to do instead.
_INSTEAD: Final[Mapping[str, str]] = {
    name: sentence
    for sentence, names in {
        "temperature=0 is greedy decoding": "do_sample greedy",
        "one call makes one answer; call it again, or use engine.map": (
            "n best_of num_return_sequences"
        ),
        "a generation is always a stream; iterate over it, or call read()": (
            "stream streaming streamer stream_options"
        ),
        "kqview samples and does not search; leave it out": (
            "num_beams use_beam_search length_penalty early_stopping num_beam_groups "
            "diversity_penalty penalty_alpha"
        ),
        "the order of samplers is fixed; set their options, and leave it out": (
            "samplers sampler_order"
        ),
        "that sampler is not offered; min_p and typical_p are near to it": (
            "tfs tfs_z top_a epsilon_cutoff eta_cutoff smoothing_factor"
        ),
        "a second model, or a second prompt, is not offered; leave it out": (
            "draft_model assistant_model speculative_config prompt_lookup_num_tokens "
            "guidance_scale negative_prompt negative_prompt_ids"
        ),
        "the prompt is the first argument": "input_ids inputs input text prompt_token_ids",
        "texts are not padded; leave it out, and use engine.map for several": (
            "attention_mask pad_token_id padding truncation"
        ),
        "ids are a list; leave it out, or pass them to numpy.array": "return_tensors return_dict",
        "it is an option of OpenAI's service; leave it out, request_id names a request": (
            "user metadata store service_tier safety_identifier"
        ),
        "a generation has no time limit; call its cancel(), or use asyncio.timeout": (
            "timeout max_time t_max_predict_ms"
        ),
        "models read text only; leave it out": (
            "images audio chat_handler clip_model_path mmproj pixel_values"
        ),
        "the prompt of an infill is made of engine.model.fim_token_ids": "suffix input_suffix",
        "the path of the model is the first argument": "model_path path model_name",
        "llama.cpp decides it; leave it out": (
            "gpu_memory_utilization use_mmap use_mlock main_gpu tensor_split split_mode "
            "offload_kqv numa tensor_parallel_size low_vram"
        ),
        "the model's file says it; leave it out, or open another GGUF file": (
            "torch_dtype dtype quantization load_in_4bit load_in_8bit rope_scaling_type "
            "rope_freq_base rope_freq_scale rope_scaling yarn_ext_factor trust_remote_code "
            "tokenizer kv_overrides"
        ),
    }.items()
    for name in names.split()
}

# What a method or an attribute of another library is here: of its Llama, LLM or model, and of what
# it returns.
_OF_ENGINE: Final[Mapping[str, str]] = {
    "create_completion": "engine.generate(prompt).read()",
    "create_chat_completion": "engine.chat(messages).reply, after read()",
    "create_chat_completion_openai_v1": "engine.chat(messages).reply, after read()",
    "create_embedding": "engine.embed(texts)",
    "eval": "engine.generate(ids, max_tokens=1), whose slot then holds the ids",
    "sample": "engine.generate(ids, max_tokens=1)",
    "reset": "engine.slots[0].clear()",
    "save_state": "engine.slots[0].save()",
    "load_state": "engine.slots[0].restore(blob)",
    "set_cache": "nothing to call: slots keep their prompts, see reuse= of generate",
    "set_seed": "generate(prompt, seed=...)",
    "n_vocab": "engine.model.n_vocab",
    "n_embd": "engine.model.n_embd",
    "n_tokens": "engine.slots[0].n_tokens",
    "input_ids": "engine.slots[0].tokens",
    "eval_logits": "capture=Capture(vocab_logits=True), and token.logits",
    "scores": "engine.score(ids)",
    "logits": "capture=Capture(vocab_logits=True), and token.logits",
    "token_bos": "engine.model.bos_token_id",
    "token_eos": "engine.model.eos_token_id",
    "token_nl": 'engine.tokenize("\\n", add_special=False)',
    "metadata": "engine.model.metadata",
    "config": "engine.model",
    "tokenizer": "engine.tokenize and engine.detokenize",
    "encode": "engine.tokenize(text), or engine.embed(texts) for vectors",
    "decode": "engine.detokenize(ids)",
    "batch_decode": "engine.detokenize(ids), for each",
    "complete": "engine.generate(prompt).read()",
    "completion": "engine.generate(prompt).read()",
    "invoke": "engine.chat(messages).read()",
    "forward": 'engine.attend(ids), or generate(ids, capture="probs")',
    "generate_stream": "engine.generate(prompt), which is a stream",
    "stream": "engine.generate(prompt), which is a stream",
    "agenerate": "engine.generate(prompt), which is an async iterator as well",
    "batch": "engine.map(prompts)",
    "eos_token_id": "engine.model.eos_token_id",
    "bos_token_id": "engine.model.bos_token_id",
    "chat_template": "engine.model.chat_template",
    "load_lora": "Engine(model, lora=path)",
    "set_lora_adapters": "engine.set_lora_scales(scales)",
}
_OF_GENERATION: Final[Mapping[str, str]] = {
    "choices": "generation.read(), generation.reply or generation.text",
    "outputs": "generation.read(), or generation.text",
    "output": "generation.text",
    "content": "generation.reply.content",
    "message": "generation.reply",
    "sequences": "generation.prompt_ids + generation.tokens",
    "token_ids": "generation.tokens",
    "attentions": 'capture="probs", and token.attention of each token',
    "hidden_states": "capture=Capture(hidden=[...]), and token.hidden of each token",
    "logits": "capture=Capture(vocab_logits=True), and token.logits of each token",
    "scores": "top_logprobs=..., and token.top_logprobs of each token",
    "logprobs": "top_logprobs=0, and token.logprob of each token",
    "prompt_logprobs": "engine.score(ids)",
    "json": "generation.parsed",
    "model_dump": "generation.reply.to_message()",
    "stream": "generation.deltas()",
    "result": "generation.read()",
    "text_stream": "generation.deltas()",
}


class NamesAttributes:
    """Base of a class that tells what an attribute of another library is called here."""

    _elsewhere: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker would allow every attribute

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            here = self._elsewhere.get(name)
            if here is None:
                text = f"{kind!r} object has no attribute {name!r}"
                raise AttributeError(text, name=name, obj=self)
            raise UnknownAttribute(f"{kind} has no {name}; here it is {here}", parameter=name)


class NamesMethods(NamesAttributes):
    """For Engine."""

    _elsewhere = _OF_ENGINE


class NamesResults(NamesAttributes):
    """For Generation."""

    _elsewhere = _OF_GENERATION


# The first function or class that has an option, by the option's name.
_HAVE: Final[dict[str, str]] = {}


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
    if here is None and name not in _INSTEAD:
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=_NEAR)
        here = near[0] if near else None
    if here is not None:
        advice = f"here it is {here}"
    elif name in _INSTEAD:
        advice = _INSTEAD[name]
    elif name in _HAVE:
        advice = f"it is an option of {_HAVE[name]}"
    else:
        left_out = set(unlisted)
        advice = f"it has {', '.join(one for one in names if one not in left_out)}"
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
        for name in options.difference(unlisted):
            _HAVE.setdefault(name, who)
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
