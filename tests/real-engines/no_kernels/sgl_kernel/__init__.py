"""Stands for SGLang's package of kernels, which cannot be loaded on many CPUs.

SGLang imports its names and calls few of them there: it computes with PyTorch. Those few are in `torch_kernels`.
"""

import importlib.abc
import importlib.machinery
import sys

from sgl_kernel import torch_kernels


class _AnyAttribute(type):
    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return cls


class _Name(metaclass=_AnyAttribute):
    """Any name of the package. A call of it is an error."""

    def __init__(self, *arguments, **named):
        raise RuntimeError("a kernel of SGLang was called, and this CPU has none")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(torch_kernels, name, _Name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        is_ours = name.startswith(__name__ + ".")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = __getattr__


sys.meta_path.append(_Submodules())
