"""The scripts in examples/, as modules."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = str(Path(__file__).parents[2] / "examples")


def example(name: str) -> ModuleType:
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)  # as Python does for a script, whose neighbours it may import
    return importlib.import_module(name)
