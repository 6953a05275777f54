"""Lets vLLM serve text models whose files import image processing that is not installed.

vLLM keeps a family's text model and its model with images in one file, which imports torchvision. A
torchvision for CPUs is not on PyPI, and text needs none.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MISSING = "torchvision"


def register_without_images(architecture: str) -> None:
    """Make vLLM know a model whose file cannot be imported only because torchvision is missing.

    Does nothing for all other models.

    Args:
        architecture: name of the policy's class.
    """
    from vllm import ModelRegistry

    if importlib.util.find_spec(_MISSING) is not None:
        return
    lazy = ModelRegistry.models.get(architecture)
    module_name = getattr(lazy, "module_name", None)
    if module_name is None or module_name in sys.modules:
        return
    try:
        importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _MISSING:
            return  # vLLM says why
        with _stand_in():
            module = importlib.import_module(module_name)
        ModelRegistry.register_model(architecture, getattr(module, lazy.class_name))


@contextmanager
def _stand_in() -> Iterator[None]:
    """Let every import of torchvision succeed, with names that cannot be used."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # transformers remembers what it finds now
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == _MISSING]:
            del sys.modules[name]


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *args: Any) -> ModuleSpec | None:
        if fullname.partition(".")[0] == _MISSING:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Nothing(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{self.__name__}.{name}")
