"""What kind of model a configuration describes, and whether it is one that can be converted."""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from mlx_lm import utils as mlx_lm_utils

from velox_pack.manifests.errors import SourceError

# What the end of an `architectures` entry says the model is for, where that is not text generation.
_PURPOSES = {
    "ForMaskedLM": "an encoder for masked words",
    "ForPreTraining": "an encoder for pre-training",
    "ForSequenceClassification": "a classifier of texts",
    "ForTokenClassification": "a tagger of tokens",
    "ForQuestionAnswering": "an extractor of answers",
    "ForMultipleChoice": "a chooser of answers",
    "ForImageClassification": "a classifier of images",
    "ForObjectDetection": "a detector of objects",
    "ForSemanticSegmentation": "a segmenter of images",
    "ForSpeechSeq2Seq": "a speech recognizer",
    "ForCTC": "a speech recognizer",
    "ForAudioClassification": "a classifier of sounds",
}
_FAMILIES = {
    "an encoder": (
        "albert bert camembert deberta deberta-v2 distilbert electra eurobert megatron-bert "
        "modernbert mpnet nomic_bert roberta xlm-roberta xlnet"
    ),
    "an encoder-decoder": "bart blenderbot m2m_100 marian mbart mt5 pegasus t5 umt5",
    "a vision model": "convnext deit detr dinov2 dinov3_vit resnet sam segformer swin vit yolos",
    "a model of images and texts": "align blip clip clipseg florence2 siglip siglip2",
    "a speech model": "hubert musicgen seamless_m4t speecht5 wav2vec2 wavlm whisper",
}
# What configurations call the number of positions; beyond a learned table of them lies NaN.
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length")
_KIND_OF = {name: kind for kind, names in _FAMILIES.items() for name in names.split()}


def check_config(said: str, config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a folder whose configuration is not that of a causal language model of mlx-lm.

    Args:
        said: the source as the user named it, for messages.
        config: parsed `config.json`.
        names: the names of the files beside it.

    Raises:
        SourceError: says what the folder holds instead, or what stands in the way.
    """
    if "velox.json" in names:
        raise SourceError(f"{said} is a velox-pack bundle: give the model that it was made from")
    if (file := config.get("model_file")) is not None:
        raise SourceError(
            f"{said}: config.json asks for the repo's own Python ({file!r:.80}) to be executed, "
            "which is never done"
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise SourceError(f"{said} is not a causal language model: config.json has no model_type")
    if kind := _other_kind(config, model_type):
        raise SourceError(
            f"{said} is not a causal language model but {kind} (model_type {model_type!r:.80})"
        )
    if not known_to_mlx_lm(config, model_type):
        raise SourceError(
            f"{said}: mlx-lm {version('mlx-lm')} has no model_type {model_type!r:.80}: "
            "a newer mlx-lm may"
        )


def positions(config: Mapping[str, Any]) -> int | None:
    """How many tokens the model takes at most, as far as its configuration says."""
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, Mapping) else [config]
    given = [place.get(key) for place in places for key in _POSITIONS]
    return min((n for n in given if type(n) is int and n > 0), default=None)


def explain_missing_config(said: str, names: Sequence[str]) -> str:
    """Say in one line what a folder without `config.json` seems to be."""
    missing = f"{said}: no config.json"
    if "adapter_config.json" in names:
        return f"{missing}; this is an adapter: fuse it into its base model first"
    if "model_index.json" in names:
        return f"{missing}; this is a diffusion pipeline, not a causal language model"
    if any(name.lower().endswith(".gguf") for name in names):
        return f"{missing}, only GGUF: convert to safetensors first"
    return f"{missing}: give a model in the Hub's layout"


def _other_kind(config: Mapping[str, Any], model_type: str) -> str | None:
    """Name the kind of a model that does not generate text from left to right, else None."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        for ending, purpose in _PURPOSES.items():
            if names[0].endswith(ending):
                return purpose
    if config.get("is_encoder_decoder") is True:
        return "an encoder-decoder"
    return _KIND_OF.get(model_type)


def known_to_mlx_lm(config: Mapping[str, Any], model_type: str) -> bool:
    """Whether mlx-lm has a model of this type; nothing but mlx-lm's own modules is imported."""
    if not re.fullmatch(r"[\w-]+", model_type):  # becomes part of a module's name
        return False
    try:
        mlx_lm_utils._get_classes(dict(config))
    except (ValueError, AttributeError):  # no such module, or a helper module without a Model
        return False
    return True
