"""Count the bytes that a computation really holds: live tensor storages, one by one.

A process's peak resident size says little: allocators keep freed pages, and threads have stacks.
"""

import weakref
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Within the `with` block, track every storage that an operator allocates; `peak` is the most bytes alive at once.

    Storages that existed before do not count, views count once, and buffers that an operator holds only inside itself
    are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and account for the storages that came to life in it."""
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._remember(storage, 0)
        result = func(*args, **kwargs)
        for storage in _storages(result):
            self._remember(storage, storage.nbytes())
        return result

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop tracking; `peak` stays readable."""
        super().__exit__(kind, value, trace)

    def _remember(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
