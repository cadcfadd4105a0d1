"""Models of Hugging Face's transformers as chains: built part by part, trained with or without LoRA, written back."""

from mpc_dist.models.hugging_face.export import write_adapters, write_pretrained
from mpc_dist.models.hugging_face.lora import LoraConfig, adapt
from mpc_dist.models.hugging_face.model import HuggingFace

__all__ = ["HuggingFace", "LoraConfig", "adapt", "write_adapters", "write_pretrained"]
