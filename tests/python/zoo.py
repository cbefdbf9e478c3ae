"""A zoo of Transformers' architectures: small models with random weights, their inputs, and what stays dense.

`test_zoo.py` takes them through the cheap steps, `run_zoo.py` through all, each in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from helpers import seeded
from torch import Tensor, nn

BLOCK = (16, 16)
ROWS, TOKENS, VOCABULARY, IMAGE_TOKEN = 4, 16, 96, 95

Config = dict[str, Any]
Batch = dict[str, Tensor]

IDS: Config = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
# Sizes of encoders of images; of encoders and decoders of text, and with grouped keys and values.
VISION: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}
IMAGES: Config = VISION | {"image_size": 16, "patch_size": 8}
TEXT: Config = VISION | {"vocab_size": VOCABULARY, "max_position_embeddings": 64} | IDS
GROUPED: Config = TEXT | {"num_key_value_heads": 1}
EXPERTS: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
TWO_STACKS: Config = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
} | IDS


def text(seed: int) -> Batch:
    return {"input_ids": torch.randint(3, IMAGE_TOKEN, (ROWS, TOKENS), generator=seeded(seed))}


def text_to_text(seed: int) -> Batch:
    return text(seed) | {"decoder_input_ids": text(seed + 1000)["input_ids"]}


def images(size: int, rows: int = ROWS) -> Callable[[int], Batch]:
    return lambda seed: {"pixel_values": torch.randn(rows, 3, size, size, generator=seeded(seed))}


def text_and_images(seed: int) -> Batch:
    """Texts that end in padding, each with its image."""
    mask = torch.ones(4 * ROWS, TOKENS, dtype=torch.long)
    mask[::2, -5:] = 0
    tokens = torch.randint(3, IMAGE_TOKEN, mask.shape, generator=seeded(seed))
    tokens[:, -6] = VOCABULARY - 1  # the end of each text
    return {"input_ids": tokens, "attention_mask": mask, **images(16, 4 * ROWS)(seed)}


def text_with_images(seed: int) -> Batch:
    """One image in each text, in the places of four tokens."""
    tokens = text(seed)["input_ids"]
    tokens[:, 2:6] = IMAGE_TOKEN
    pixels = torch.randn(ROWS, 1, 3, 16, 16, generator=seeded(seed))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": pixels}


def sound_to_text(seed: int) -> Batch:
    features = torch.randn(ROWS, 16, 32, generator=seeded(seed))
    return {"input_features": features, "decoder_input_ids": text(seed)["input_ids"]}


def sound(seed: int) -> Batch:
    return {"input_values": torch.randn(ROWS, 200, generator=seeded(seed))}


@dataclass(frozen=True)
class Kind:
    """An architecture.

    Attributes:
        model: the name of its class in Transformers.
        config: a new configuration of a small model, without dropout.
        batch: some inputs, for a seed.
        dense: regular expressions of names of linear layers that `".*"` leaves dense, in blocks of BLOCK,
            and of the reason that reports give.
        uncalled: name of layers that are never called, which pruning has to leave out.
        fused: how many MLPs `fuse_mlps_` finds in a call.
        refused: steps that are refused, and a regular expression of the sentence that says so.
        subclasses: whether its layers are subclasses of `torch.nn.Linear`, which `sparsify_` skips.
        adapted: layers that get LoRA, where PEFT does not take all linear ones of the dense model either.
        output: the name of what is compared.
        compiled: whether `run_zoo.py` compiles it, which is slow.
    """

    model: str
    config: Callable[[], Any]
    batch: Callable[[int], Batch] = text
    dense: Mapping[str, str] = field(default_factory=dict)
    uncalled: str | None = None
    fused: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    subclasses: bool = False
    adapted: str = "all-linear"
    output: str = "logits"
    compiled: bool = False

    def skeleton(self) -> Any:
        """The model as its class makes it."""
        return getattr(transformers, self.model)(self.config())

    def make(self) -> Any:
        """The same model each time, in evaluation mode. Biases are not 0, and tokens make a difference."""
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(7)
            model = self.skeleton().eval()
            for parameter in model.parameters():
                if parameter.dim() > 1 or not bool(parameter.any()):
                    parameter.normal_(0, 0.1)
        return model


def _config(name: str, options: Config) -> Callable[[], Any]:
    return lambda: without_dropout(getattr(transformers, f"{name}Config")(**options))


def without_dropout(config: Any) -> Any:
    """Set all dropout of a configuration, and of those in it, to 0."""
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and "drop" in key:
            setattr(config, key, 0.0)
    return config


def _decoder(name: str, options: Config, **others: Any) -> Kind:
    dense = {r"lm_head": "output embedding"} | others.pop("dense", {})
    return Kind(f"{name}ForCausalLM", _config(name, options), dense=dense, **others)


def _encoder(name: str, options: Config, head: str, **others: Any) -> Kind:
    return Kind(f"{name}ForMaskedLM", _config(name, options), dense={head: "output embedding"}, **others)


def _kinds() -> dict[str, Kind]:
    zoo: dict[str, Kind] = {}
    zoo["llama"] = _decoder("Llama", GROUPED, fused=2, compiled=True)
    zoo["qwen2"] = _decoder("Qwen2", GROUPED, fused=2)
    zoo["qwen3"] = _decoder("Qwen3", GROUPED | {"head_dim": 32}, fused=2)
    gemma = GROUPED | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
    zoo["gemma3"] = Kind(
        "Gemma3ForCausalLM", _config("Gemma3Text", gemma), dense={"lm_head": "output"}, fused=2
    )
    zoo["mistral"] = _decoder("Mistral", GROUPED | {"sliding_window": 8}, fused=2)
    # Experts of dense models are adapted by PEFT in its own way, which block-sparse ones do not have.
    attention = {"adapted": r".*self_attn\.\w*proj\w*"}
    zoo["mixtral"] = _decoder("Mixtral", GROUPED | {"num_local_experts": 4}, **attention)
    qwen = GROUPED | EXPERTS | {"head_dim": 32, "num_experts": 4}
    zoo["qwen3_moe"] = _decoder("Qwen3Moe", qwen, **attention)
    zoo["qwen2_moe"] = _decoder(
        "Qwen2Moe",
        GROUPED | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64},
        dense={r".*shared_expert_gate": "no multiple of 16"},
        fused=2,
        **attention,
    )
    zoo["olmoe"] = _decoder("Olmoe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}, **attention)
    zoo["granitemoe"] = _decoder("GraniteMoe", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2})
    ranks = {
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    }
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    zoo["deepseek_v3"] = _decoder("DeepseekV3", TEXT | EXPERTS | ranks | groups, fused=2, **attention)
    oss = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    zoo["gpt_oss"] = _decoder("GptOss", GROUPED | oss)
    zoo["phi3"] = _decoder("Phi3", GROUPED, fused=2)
    gpt2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    zoo["gpt2"] = Kind(
        "GPT2LMHeadModel",
        _config("GPT2", gpt2 | IDS),
        dense={"lm_head": "output"},
        fused=2,
        compiled=True,
    )
    opt = TEXT | {"ffn_dim": 128, "word_embed_proj_dim": 64}
    zoo["opt"] = _decoder("OPT", opt)
    zoo["gpt_neox"] = _decoder("GPTNeoX", TEXT, fused=2)
    zoo["falcon"] = _decoder(
        "Falcon",
        TEXT | {"ffn_hidden_size": 128},
        fused=2,
        subclasses=True,
        refused={"prune": "no layer is left to prune; .*(FalconLinear|subclass)"},
    )
    zoo["bert"] = _encoder("Bert", TEXT, r"cls\.predictions\.decoder", fused=2, compiled=True)
    zoo["roberta"] = _encoder("Roberta", TEXT, r"lm_head\.decoder", fused=2)
    distilbert = {
        "vocab_size": VOCABULARY,
        "dim": 64,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 128,
        "max_position_embeddings": 64,
    }
    zoo["distilbert"] = _encoder("DistilBert", distilbert, "vocab_projector", fused=2)
    modern = {"cls_token_id": 3, "sep_token_id": 4, "local_attention": 8, "global_attn_every_n_layers": 2}
    zoo["modernbert"] = _encoder("ModernBert", TEXT | modern, "decoder", fused=2)
    t5 = {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "d_kv": 32,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    zoo["t5"] = Kind(
        "T5ForConditionalGeneration",
        _config("T5", t5),
        text_to_text,
        dense={"lm_head": "output"},
        compiled=True,
        fused=4,
    )
    bart = TWO_STACKS | {
        "max_position_embeddings": 64,
        "decoder_start_token_id": 3,
        "forced_eos_token_id": None,
    }
    zoo["bart"] = Kind(
        "BartForConditionalGeneration", _config("Bart", bart), text_to_text, dense={"lm_head": "output"}
    )
    zoo["vit"] = Kind(
        "ViTForImageClassification",
        _config("ViT", IMAGES),
        images(16, 4 * ROWS),
        dense={"classifier": "multiple of 16"},
        fused=2,
        compiled=True,
    )
    # 24 and 48 features: only what has 48 and 96 or more on both sides can be cut.
    swin = {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 24,
        "depths": [1, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    zoo["swin"] = Kind(
        "SwinForImageClassification",
        _config("Swin", swin),
        images(32),
        dense={r"swin\.encoder\.layers\.0\.blocks.*|classifier": "multiple of 16"},
        fused=2,
    )
    clip = {
        "text_config": dict(TEXT | {"eos_token_id": VOCABULARY - 1}),
        "vision_config": IMAGES,
        "projection_dim": 64,
    }
    zoo["clip"] = Kind(
        "CLIPModel", _config("CLIP", clip), text_and_images, fused=4, output="logits_per_image"
    )
    whisper = TWO_STACKS | {
        "num_mel_bins": 16,
        "max_source_positions": 16,
        "max_target_positions": 64,
        "decoder_start_token_id": 3,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    zoo["whisper"] = Kind(
        "WhisperForConditionalGeneration",
        _config("Whisper", whisper),
        sound_to_text,
        dense={"proj_out": "output"},
    )
    wav2vec2 = VISION | {
        "vocab_size": 32,
        "conv_dim": (32, 32),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "apply_spec_augment": False,
    }
    zoo["wav2vec2"] = Kind(
        "Wav2Vec2ForCTC",
        _config("Wav2Vec2", wav2vec2),
        sound,
        dense={"lm_head": "output"},
        fused=2,
        adapted=r".*\.([qv]_proj|output_dense)",
    )
    mamba = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "state_size": 16,
        "num_hidden_layers": 2,
        "time_step_rank": 16,
    }
    zoo["mamba"] = _decoder(
        "Mamba",
        mamba | IDS,
        dense={r".*\.dt_proj": "MambaMixer reads its weight|exclude"},
        uncalled="dt_proj",
        adapted=r".*\.(in|x)_proj",
    )
    smolvlm = {
        "text_config": GROUPED | {"model_type": "llama"},
        "vision_config": VISION | {"image_size": 16, "patch_size": 4},
        "scale_factor": 2,
        "image_token_id": IMAGE_TOKEN,
        "pad_token_id": 2,
    }
    zoo["smolvlm"] = Kind(
        "SmolVLMForConditionalGeneration",
        _config("SmolVLM", smolvlm),
        text_with_images,
        dense={"lm_head": "output"},
        fused=4,
    )
    return zoo


ZOO = _kinds()


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """By their first names."""
    conv1d = transformers.pytorch_utils.Conv1D
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear | conv1d)}
