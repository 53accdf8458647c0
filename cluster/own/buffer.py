"""A flat buffer whose memory comes and goes while views into it stay valid."""

from __future__ import annotations

import torch

from cluster.meter import Meter
from zeroviz.trace import Category


class FlatBuffer:
    """`numel` elements in one storage, shape (numel,).

    [Note: storage resize] autograd stores views of the parameters for backward. Freeing by dropping references is
    therefore impossible; instead the storage under all views is resized to 0 and back (as FSDP does). The gather that
    refills it writes the same values again, so autograd's version check is told to overlook the write.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, meter: Meter, category: Category) -> None:
        """The buffer begins with its memory, zeroed, so that views can be made of it."""
        self._meter, self._category = meter, category
        self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._nbytes = numel * self.tensor.element_size()

    def allocate(self) -> None:
        """Get the memory, uninitialised."""
        self.tensor.untyped_storage().resize_(self._nbytes)
        self._meter.allocated(self.tensor, self._category)

    def release(self) -> None:
        """Give the memory back, if there is any. Views stay valid objects over nothing until the next `allocate`."""
        if not self.is_held:
            return
        self._meter.released(self.tensor)
        self.tensor.untyped_storage().resize_(0)

    @property
    def is_held(self) -> bool:
        """Whether there is memory."""
        return self.tensor.untyped_storage().nbytes() > 0

    def view(self, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the elements from `start` on, in `shape`."""
        return self.tensor[start : start + torch.Size(shape).numel()].view(shape)
