"""Language models of transformers: configurations of tens of thousands of parameters."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.wild_models.broken_texts import SMALL, ids_of, labelled
from benchmarks.wild_models.registry import Case, add, own, wild

_GQA = {"num_key_value_heads": 2}
_GPT = {"vocab_size": 200, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
_NO_PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BERT = {**SMALL, "max_position_embeddings": 160}

DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, **_GQA}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SMALL, **_GQA, "sliding_window": 32}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SMALL, **_GQA, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {
        **SMALL, **_GQA, "head_dim": 16, "sliding_window": 32, **_NO_PAD}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {
        **SMALL, **_GQA, "head_dim": 16, "sliding_window": 32, **_NO_PAD}),
    "phi": ("PhiForCausalLM", "PhiConfig", {**SMALL, **_NO_PAD}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**SMALL, **_NO_PAD}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SMALL, **_NO_PAD}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 8, **_NO_PAD}),
    "opt": ("OPTForCausalLM", "OPTConfig", {
        "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "ffn_dim": 256, "max_position_embeddings": 160, "word_embed_proj_dim": 64}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {
        "vocab_size": 200, "hidden_size": 64, "n_layer": 3, "n_head": 4,
        "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {
        "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {
        "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", {
        "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "context_length": 128,
        "attention_hidden_size": 64}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {**SMALL, **_GQA, **_NO_PAD}),
}  # fmt: skip

ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _BERT),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**_BERT, "embedding_size": 32}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 32}),
    "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", {
        **_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 32}),
    "convbert": ("ConvBertForMaskedLM", "ConvBertConfig", {**_BERT, "embedding_size": 64}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", {
        "vocab_size": 200, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 256}),
    "funnel": ("FunnelForMaskedLM", "FunnelConfig", {
        "vocab_size": 200, "d_model": 64, "block_sizes": [1, 1, 1], "n_head": 4, "d_head": 16,
        "d_inner": 256}),
    "fnet": ("FNetForMaskedLM", "FNetConfig", {
        "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 256,
        "max_position_embeddings": 160}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {
        **_BERT, **_NO_PAD, "local_attention": 32, "cls_token_id": 1, "sep_token_id": 2}),
    "xlnet": ("XLNetLMHeadModel", "XLNetConfig", {
        "vocab_size": 200, "d_model": 64, "n_layer": 3, "n_head": 4, "d_inner": 256}),
}  # fmt: skip


def _make(name: str) -> Case:
    import transformers

    model, config, options = {**DECODERS, **ENCODERS}[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**options))
    others: dict[str, Any] = {"use_cache": False} if name in DECODERS else {}
    return labelled(made, ids_of(), **others)


for _name in (*DECODERS, *ENCODERS):
    add(_name, "transformers", lambda name=_name: _make(name))


@wild("transformers")
def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=200, d_model=64, d_kv=16, d_ff=256, num_layers=3, num_heads=4,
                      decoder_start_token_id=0)  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    return Case(model, (), {"input_ids": ids_of(), "labels": ids_of(4, 64)}, own)


@wild("transformers")
def bart() -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=200, d_model=64, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256,
        max_position_embeddings=160,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).train()
    return Case(model, (), {"input_ids": ids_of(), "labels": ids_of(4, 64)}, own)


@wild("peft")
def llama_lora() -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SMALL, **_GQA))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return labelled(get_peft_model(model, lora), ids_of(), use_cache=False)


@wild("transformers")
def clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "intermediate_size": 256}  # fmt: skip
    config = CLIPConfig(
        text_config={**tower, "vocab_size": 200, "max_position_embeddings": 64, **_NO_PAD},
        vision_config={**tower, "image_size": 64, "patch_size": 8}, projection_dim=32,
    )  # fmt: skip
    kwargs = {"input_ids": ids_of(8, 48), "pixel_values": torch.randn(8, 3, 64, 64)}
    return Case(CLIPModel(config).train(), (), {**kwargs, "return_loss": True}, own)
