"""Every method of the papers on one data set: the runs, their results on disk, and a report."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .method import Options
    from .methods import METHODS
    from .run import Comparison, compare
    from .tasks import CompareError, Task, load_task

__all__ = ["METHODS", "CompareError", "Comparison", "Options", "Task", "compare", "load_task"]

_WHERE = {"METHODS": "methods", "Options": "method", "Task": "tasks", "load_task": "tasks", "CompareError": "tasks"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE.get(name, 'run')}", __name__), name)
