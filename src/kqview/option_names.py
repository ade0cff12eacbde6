"""Names of other libraries: says what an unknown option, method or attribute is called here.

Users bring the names of transformers, OpenAI, vLLM, llama.cpp and llama-cpp-python. Nothing is
accepted under two names: the error names the right one, or says what to do instead.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast

from kqview.errors import UnknownAttribute, UnknownOption

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])

_NEAR: Final = 0.8  # of difflib: a typing error, not another word that looks alike


def _by_name(names_of: Mapping[str, str]) -> Mapping[str, str]:
    """Advice by name, from the names of each advice."""
    return {name: advice for advice, names in names_of.items() for name in names.split()}


_ENUM: Final = 'json_schema={"enum": [...]}'
_PREFILL: Final = "continue_final_message=True, with the text as the last message"

# What an option of another library is here: the names of the others by ours.
_ELSEWHERE: Final = _by_name(
    {
        # limits
        "max_tokens": (
            "max_new_tokens max_length max_completion_tokens max_output_tokens max_gen_len "
            "n_predict num_predict"
        ),
        "min_tokens": "min_new_tokens min_length",
        # sampling
        "temperature": "temp",
        "typical_p": "typical",
        "repeat_penalty": "repetition_penalty penalty_repeat rep_pen",
        "repeat_last_n": "penalty_last_n rep_pen_range last_n_tokens_size",
        "presence_penalty": "penalty_present",
        "frequency_penalty": "penalty_freq",
        "dry_multiplier, with dry_allowed_length": "no_repeat_ngram_size",
        "mirostat": "mirostat_mode",
        "seed": "random_seed generator",
        "banned_tokens": "bad_words bad_words_ids suppress_tokens",
        "begin_suppress": "begin_suppress_tokens",
        "logit_bias": "sequence_bias",
        "logits_processor": "logits_processors",
        # ends
        "stop": "stop_sequences stop_sequence stop_strings stop_words",
        "stop_tokens": "stop_token_ids eos_token_id",
        "stopping": "stopping_criteria",
        "forcing": "forced_bos_token_id forced_eos_token_id",
        # results
        "top_logprobs": "logprobs n_probs output_scores",
        "capture=Capture(vocab_logits=True)": "output_logits",
        "engine.score(ids)": "prompt_logprobs echo logits_all",
        'capture="probs"': "output_attentions attentions return_dict_in_generate",
        "capture=Capture(hidden=[...])": "output_hidden_states",
        "engine.detokenize(generation.tokens, skip_special_tokens=True)": "skip_special_tokens",
        # constraints
        "json_schema": (
            "guided_json guided_decoding structured_outputs response_format response_model "
            "response_schema output_schema output_type text_format format schema"
        ),
        "regex": "guided_regex pattern",
        _ENUM: "guided_choice choices",
        "grammar": "guided_grammar",
        # chats
        "tools": "functions",
        "tool_choice": "function_call",
        "engine.chat(messages, tools=tools, tool_choice=...)": "tool_choice",
        "engine.chat(messages, continue_final_message=True)": "continue_final_message",
        _PREFILL: "prefill prefix",
        "engine.apply_chat_template(messages, add_generation_prompt=False)": (
            "add_generation_prompt"
        ),
        "template_options": "chat_template_kwargs",
        'template_options={"enable_thinking": False}': "enable_thinking think",
        'template_options={"reasoning_effort": "low"}': "reasoning_effort",
        'template_options={"documents": [...]}': "documents",
        # cache, slots and requests
        "cache_prompt": "use_cache",
        "slot": "id_slot slot_id",
        "engine.chat(messages)": "messages",
        "engine.chat(messages, tools=tools)": "tools",
        "engine.map(prompts)": "prompts",
        "mods": "steering control_vector",
        # Engine
        "Engine.from_hub(repo, file)": "repo_id",
        "n_ctx": "ctx_size num_ctx context_length max_model_len max_seq_len",
        "n_slots": "n_parallel parallel n_seq_max max_num_seqs",
        "n_batch": "batch_size",
        "n_ubatch": "ubatch_size",
        "n_threads": "threads n_threads_batch",
        "n_gpu_layers": "ngl gpu_layers n_gpu_layer device device_map",
        "flash_attn": "flash_attention attn_implementation",
        "kv_type": "type_k type_v cache_type_k cache_type_v kv_cache_dtype",
        "pooling": "embedding embeddings pooling_type",
        "chat_template": "chat_format",
        "lora": "lora_path lora_adapters lora_request",
        'logging.getLogger("kqview.llama")': "verbose",
    }
)

# Names of other libraries that stand for no option here, and what to do instead.
_INSTEAD: Final = _by_name(
    {
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
        "what guesses tokens belongs to the engine, Engine(draft=...); speculate says how many": (
            "draft_model assistant_model speculative_config prompt_lookup_num_tokens"
        ),
        "a second prompt is not offered; leave it out": (
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
    }
)

# What a method or an attribute of another library is here: of its Llama, LLM or model, and of what
# it returns.
OF_ENGINE: Final = _by_name(
    {
        "engine.generate(prompt).read()": "create_completion complete completion",
        "engine.chat(messages).reply, after read()": (
            "create_chat_completion create_chat_completion_openai_v1"
        ),
        "engine.embed(texts)": "create_embedding",
        "engine.generate(ids, max_tokens=1), whose slot then holds the ids": "eval",
        "engine.generate(ids, max_tokens=1)": "sample",
        "engine.slots[0].clear()": "reset",
        "engine.slots[0].save()": "save_state",
        "engine.slots[0].restore(blob)": "load_state",
        "nothing to call: slots keep their prompts, see reuse= of generate": "set_cache",
        "generate(prompt, seed=...)": "set_seed",
        "engine.model.n_vocab": "n_vocab",
        "engine.model.n_embd": "n_embd",
        "engine.slots[0].n_tokens": "n_tokens",
        "engine.slots[0].tokens": "input_ids",
        "capture=Capture(vocab_logits=True), and token.logits": "eval_logits logits",
        "engine.score(ids)": "scores",
        "engine.model.bos_token_id": "token_bos bos_token_id",
        "engine.model.eos_token_id": "token_eos eos_token_id",
        'engine.tokenize("\\n", add_special=False)': "token_nl",
        "engine.model.metadata": "metadata",
        "engine.model": "config",
        "engine.tokenize and engine.detokenize": "tokenizer",
        "engine.tokenize(text), or engine.embed(texts) for vectors": "encode",
        "engine.detokenize(ids)": "decode",
        "engine.detokenize(ids), for each": "batch_decode",
        "engine.chat(messages).read()": "invoke",
        'engine.attend(ids), or generate(ids, capture="probs")': "forward",
        "engine.generate(prompt), which is a stream": "generate_stream stream",
        "engine.generate(prompt), which is an async iterator as well": "agenerate",
        "engine.map(prompts)": "batch",
        "engine.model.chat_template": "chat_template",
        "Engine(model, lora=path)": "load_lora",
        "engine.set_lora_scales(scales)": "set_lora_adapters",
    }
)
OF_GENERATION: Final = _by_name(
    {
        "generation.read(), generation.reply or generation.text": "choices",
        "generation.read(), or generation.text": "outputs",
        "generation.text": "output",
        "generation.reply.content": "content",
        "generation.reply": "message",
        "generation.prompt_ids + generation.tokens": "sequences",
        "generation.tokens": "token_ids",
        'capture="probs", and token.attention of each token': "attentions",
        "capture=Capture(hidden=[...]), and token.hidden of each token": "hidden_states",
        "capture=Capture(vocab_logits=True), and token.logits of each token": "logits",
        "top_logprobs=..., and token.top_logprobs of each token": "scores",
        "top_logprobs=0, and token.logprob of each token": "logprobs",
        "engine.score(ids)": "prompt_logprobs",
        "generation.parsed": "json",
        "generation.reply.to_message()": "model_dump",
        "generation.deltas()": "stream text_stream",
        "generation.read()": "result",
    }
)


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


def lists_options(who: str, defaults: Mapping[str, Any], *, first: str = "") -> Callable[[_T], _T]:
    """Show the options of a function that takes them as ``**options`` and checks them itself.

    Args:
        who: Name of the function or class in messages.
        defaults: Its options.
        first: Name of a first argument.
    """
    for name in defaults:
        _HAVE.setdefault(name, who)

    def decorate(one: _T) -> _T:
        names = ["self"] * inspect.isfunction(one) + [first] * bool(first)
        own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        _show(one, own, defaults)
        return one

    return decorate


def _show(one: Any, own: list[inspect.Parameter], defaults: Mapping[str, Any]) -> None:
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in defaults.items()
    ]
    one.__signature__ = inspect.Signature([*own, *options])


def names_options(
    who: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[_Function], _Function]:
    """Make a function raise `unknown_option` instead of Python's TypeError.

    An option given as None has its default, as if it were not given, but for `_MEANS_NONE`.

    Args:
        who: Name of the function in messages, which do not list its first argument.
        defaults: What its ``**options`` take.
    """

    def decorate(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters.values()
        own = [p for p in parameters if p.kind != p.VAR_KEYWORD]
        first, *known = [p.name for p in own if p.name != "self"]
        unset = {p.name for p in own if p.kind == p.KEYWORD_ONLY and p.default is not None}
        unset = (unset | defaults.keys()) - _MEANS_NONE
        options = {first, *known, *defaults}
        for name in options - {first}:
            _HAVE.setdefault(name, who)

        def checked(given: dict[str, Any]) -> dict[str, Any]:
            for name in given:
                if name not in options:
                    raise unknown_option(who, name, options, unlisted=[first])
            return {k: v for k, v in given.items() if v is not None or k not in unset}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **checked(kwargs))

        @functools.wraps(function)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **checked(kwargs))

        made = acall if inspect.iscoroutinefunction(function) else call
        if defaults:
            _show(made, own, defaults)
        return cast("_Function", made)

    return decorate
