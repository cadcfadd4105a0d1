"""Model families by name, the chain they build, and the protocol that another family follows."""

from mpc_dist.models.block_model import BlockModel, Parts, build_chain, build_parts, build_readout
from mpc_dist.models.chain import Chain
from mpc_dist.models.gpt import GPT
from mpc_dist.models.hugging_face import HuggingFace
from mpc_dist.models.residual_mlp import ResLinear, ResMLP
from mpc_dist.models.resnet_cifar import ResNetCifar

MODELS: dict[str, type[ResLinear] | type[ResMLP] | type[ResNetCifar] | type[GPT] | type[HuggingFace]] = {
    "res_linear": ResLinear,
    "res_mlp": ResMLP,
    "resnet_cifar": ResNetCifar,
    "gpt": GPT,
    "hf": HuggingFace,
}

__all__ = [
    "GPT",
    "MODELS",
    "BlockModel",
    "Chain",
    "HuggingFace",
    "Parts",
    "ResLinear",
    "ResMLP",
    "ResNetCifar",
    "build_chain",
    "build_parts",
    "build_readout",
]
