# pyright: basic, reportMissingImports=false
"""Writes the trained demo model as one GGUF file, weights F16 and norms F32.

Owns the metadata (architecture, tokenizer, chat template). Needs torch and gguf; only the training
script imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

from kqview.demo.bpe import SPECIAL_TOKENS
from kqview.demo.chat import CHAT_TEMPLATE

if TYPE_CHECKING:
    from pathlib import Path

    from kqview.demo.bpe import BytePairVocabulary
    from kqview.demo.net import Net


def write_gguf(path: Path, net: Net, vocabulary: BytePairVocabulary) -> None:
    """Write *net* and *vocabulary* to *path*.

    The first special token begins a text and ends it (bos, eos and padding), the last one ends a
    chat message. The tensors' torch names are the GGUF names already.
    """
    c = net.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("kqview demo")
    writer.add_description("Tiny story model whose names come back; trained by kqview.demo.train")
    writer.add_license("MIT")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(c.n_vocab)
    writer.add_context_length(c.n_ctx_train)
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(c.n_ff)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head_kv)
    writer.add_key_length(c.n_embd_head)
    writer.add_value_length(c.n_embd_head)
    writer.add_rope_dimension_count(c.n_embd_head)
    writer.add_rope_freq_base(c.rope_freq_base)
    writer.add_layer_norm_rms_eps(c.norm_eps)

    begin, _, end_of_message = range(len(SPECIAL_TOKENS))
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    kinds += [gguf.TokenType.NORMAL] * (c.n_vocab - len(SPECIAL_TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{a} {b}" for a, b in vocabulary.merges])
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(begin)
    writer.add_pad_token_id(begin)
    writer.add_eot_token_id(end_of_message)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    for name, tensor in net.state_dict().items():
        dtype = np.float32 if tensor.dim() == 1 else np.float16
        writer.add_tensor(name, tensor.numpy().astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
