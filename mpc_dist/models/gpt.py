"""A decoder-only transformer: the embedding is part of block 0, the head is the last readout."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpc_dist.readout import LinearHead
from mpc_dist.task import Task
from mpc_dist.validation import MAX_WIDTH, check_real, check_whole
from mpc_dist.windows import MAX_BLOCKS


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocabulary: int, context: int, width: int, *, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, positions) to states (batch, positions, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        state: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return state


class CausalAttention(nn.Module):
    """Multi-head self-attention in which a position sees itself and the ones before it."""

    def __init__(self, width: int, num_heads: int, *, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.num_heads = num_heads
        self.dropout = dropout

    def forward(self, state: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        batch, positions, width = state.shape
        heads = self.qkv(state).view(batch, positions, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return out


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP, each added to the state."""

    def __init__(self, width: int, num_heads: int, *, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, num_heads, dropout=dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, state: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        state = state + self.dropout(self.attention(self.norm1(state)))
        hidden = F.gelu(self.expand(self.norm2(state)))
        out: Tensor = state + self.dropout(self.contract(hidden))
        return out


@dataclass(frozen=True)
class GPT:
    """Decoder-only transformer; context and vocabulary come from the data."""

    name: Literal["gpt"] = "gpt"
    """Model family."""
    num_blocks: int = 8
    """Transformer blocks; block 0 includes the embedding."""
    width: int = 128
    """Features of a position's state."""
    num_heads: int = 4
    """Attention heads; must divide the width."""
    dropout: float = 0.0
    """Probability of dropping a feature of the embedding, attention or a residual branch."""

    def __post_init__(self) -> None:
        check_whole("model.num_blocks", self.num_blocks, minimum=1, maximum=MAX_BLOCKS)
        check_whole("model.width", self.width, minimum=1, maximum=MAX_WIDTH)
        check_whole("model.num_heads", self.num_heads, minimum=1)
        check_real("model.dropout", self.dropout, minimum=0, maximum=1)
        if self.width % self.num_heads:
            raise ValueError(f"model.num_heads {self.num_heads} must divide model.width {self.width}; use a divisor")

    def check_task(self, task: Task) -> None:
        """Accept tokens."""
        if task.kind != "tokens":
            raise ValueError(f"gpt models tokens, but the data is {task.kind}; use data 'text'")

    def width_at(self, boundary: int, task: Task) -> int:  # noqa: ARG002
        """The same everywhere."""
        return self.width

    def build_block(self, index: int, task: Task) -> nn.Module:
        """Transformer block `index`, with the embedding before it for index 0."""
        block = TransformerBlock(self.width, self.num_heads, dropout=self.dropout).apply(_initialise)
        # Two branches per block add to the state: scaled so that its variance does not grow with the depth (GPT-2).
        for branch in (block.attention.out, block.contract):
            nn.init.normal_(branch.weight, std=0.02 / (2 * self.num_blocks) ** 0.5)
        if index > 0:
            return block
        (context,) = task.input_shape
        embedding = Embedding(task.num_outputs, context, self.width, dropout=self.dropout).apply(_initialise)
        return nn.Sequential(embedding, block)

    def build_head(self, boundary: int, task: Task) -> nn.Module:  # noqa: ARG002
        """A layer norm and a linear map to the vocabulary."""
        return LinearHead(self.width, task.num_outputs, norm=True, bias=False).apply(_initialise)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
