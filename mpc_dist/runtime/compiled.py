"""Blocks compiled by torch.compile, in place: parameters keep their names, and blocks of a kind share their graphs."""

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

MOST_GRAPHS = 64
"""Of one forward function: kinds of blocks, times their modes. Beyond these, torch would run blocks uncompiled."""


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Let each block be compiled when it first runs; those that are stay so.

    Relays and halves go back through a graph more than once: no backward may write over what was saved.
    """
    # torch asks whenever a backward runs, and on GPUs that is on threads of autograd's, which do not see what this one
    # assigns: it must be so by default.
    config: Any = importlib.import_module("torch._functorch.config")
    config._config["donated_buffer"].default = False
    for block in blocks:
        if block._compiled_call_impl is None:
            # What is dropped is what would be, uncompiled: compiling does not change what is learnt.
            block.compile(options={"fallback_random": True}, recompile_limit=MOST_GRAPHS)


def uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled blocks run as they were written."""
    context: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return context


def check_compiler(device_type: str) -> None:
    """Raise unless there is what torch.compile makes code with."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device_type == "cuda":
        if not has_triton():
            raise ValueError("training.compile needs Triton, which is not there for this GPU; install it, or use false")
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ValueError(
            "training.compile needs a C++ compiler, and there is none; install g++, name one in CXX, or use false"
        ) from error
