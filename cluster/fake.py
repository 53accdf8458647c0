"""Tensors without memory: shapes, strides, dtypes and the lifetimes of storages are real, elements do not exist.

torch's FakeTensorMode works out what each operator returns, as the CPU's kernels would return it. What is added here:

- [Note: sums] While any dispatch mode is active autograd adds gradients out of place, and a rehearsed step would hold
  one tensor more at a residual connection than the real one. `_adds_in_place` asks autograd's own question (torch's
  input_buffer.cpp, `can_accumulate_inplace`): is the first gradient dense, and does nobody else hold it or its
  storage? If so, the sum is made in place here. The counts of references that mean "nobody else" are taken from a sum
  that autograd is known to make in place, when a mode is made.
- An operator seen before with the same arguments is answered from a plan, without torch's own, slower cache.
- A number that the step asks for (`loss.item()`, Adam's step count) is 1: nothing that is counted depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter

_DEVICE_OF = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_ADD = torch.ops.aten.add.Tensor
_ADD_IN_PLACE = torch.ops.aten.add_.Tensor
# The profiler's ranges are operators without tensors, and the real ones will do.
_RANGES = frozenset(
    {torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction}
)
_KNOWN_TYPES = frozenset({FakeTensor, Tensor, Parameter})


class _Output(NamedTuple):
    """One tensor an operator returns. source: which of its argument tensors it shares its storage with, or None."""

    source: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class _Plan(NamedTuple):
    """What an operator returns: tensors it makes, arguments it passes on (by position), None.

    wrap: list or tuple; None for a single value.
    """

    wrap: type | None
    outputs: tuple[_Output | int | None, ...]


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """While it is active every new tensor is fake. `on_result`, if set, sees every tensor an operator returned."""

    def __init__(self, on_operator: Callable[[], None] | None = None) -> None:
        """on_operator: called before each of the step's operators; what it raises goes on to whoever called it."""
        super().__init__(allow_non_fake_inputs=False)
        self.on_result: Callable[[Tensor], None] | None = None
        self._on_operator = on_operator
        self._plans: dict[tuple[Any, ...], _Plan | None] = {}
        self._inside = False
        self._sole_owner: tuple[int, int] | None = None
        self._learn_sole_owner()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return args[0].fake_device
        if func in _RANGES:
            return func(*args, **(kwargs or {}))
        if not _KNOWN_TYPES.issuperset(types):  # a DTensor: its own dispatch comes back with the local parts
            return NotImplemented
        if self._inside:  # an operator made of others: only the outermost one is the step's
            return self.dispatch(func, types, args, kwargs or {})
        if func is _ITEM:
            return 1.0 if args[0].is_floating_point() else 1
        if self._on_operator is not None:
            self._on_operator()
        self._inside = True
        try:
            if func is _ADD and self._adds_in_place(*args):
                func = _ADD_IN_PLACE
            result = self._answer(func, types, args, kwargs or {})
        finally:
            self._inside = False
        if self.on_result is not None:
            for leaf in result if isinstance(result, (list, tuple)) else (result,):
                if isinstance(leaf, Tensor):
                    self.on_result(leaf)
        return result

    # ---- sums, see [Note: sums] ----

    def _adds_in_place(self, first: Any, second: Any) -> bool:
        """Whether this is autograd adding up two gradients of a tensor, and it would do so in place without a mode."""
        if torch._C._current_autograd_node() is None or torch.is_grad_enabled() or not isinstance(first, FakeTensor):
            return False
        owned: Any = first  # torch's stubs lack _use_count
        counts = (owned._use_count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata))
        if self._sole_owner is None:
            self._sole_owner = counts
        return counts == self._sole_owner and _is_dense(first)

    def _learn_sole_owner(self) -> None:
        """Read the counts of references to a fresh gradient, which nobody holds but the engine, at its sum."""
        with self, torch.enable_grad():
            x = torch.empty(3, requires_grad=True)
            y = x * 2
            torch.autograd.backward((y * 3 + y * 5).sum())
        if self._sole_owner is None:
            raise RuntimeError(f"torch {torch.__version__} adds gradients where a dispatch mode does not see it.")

    # ---- answers from a plan ----

    def _answer(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[FakeTensor] = []
        parts: list[Any] = [func]
        try:
            _describe(args, parts, tensors)
            _describe(kwargs, parts, tensors)
            key = tuple(parts)
            plan = self._plans[key]
        except KeyError:
            result = self.dispatch(func, types, args, kwargs)
            self._plans[key] = _plan(result, tensors)
            return result
        except TypeError:  # an argument without a hash, such as a process group, or a real tensor
            return self.dispatch(func, types, args, kwargs)
        if plan is None:
            return self.dispatch(func, types, args, kwargs)
        outputs = [self._make(output, tensors) for output in plan.outputs]
        return outputs[0] if plan.wrap is None else plan.wrap(outputs)

    def _make(self, output: _Output | int | None, tensors: list[FakeTensor]) -> FakeTensor | None:
        if output is None:
            return None
        if isinstance(output, int):
            return tensors[output]
        source, shape, stride, offset, dtype, device = output
        if source is None:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=dtype, device="meta")
            meta.set_(tensors[source].untyped_storage(), offset, shape, stride)
        return FakeTensor(self, meta, device)


def _describe(value: Any, parts: list[Any], tensors: list[FakeTensor]) -> None:
    """Add to `parts`, flat, what of an argument decides what is returned; to `tensors`, the tensors in it."""
    kind = type(value)
    if kind is FakeTensor:
        tensors.append(value)
        parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
    elif kind is tuple or kind is list or kind is dict:
        parts += (kind, len(value))
        for item in value.items() if kind is dict else value:
            _describe(item, parts, tensors)
    elif kind is torch.Generator:  # which numbers it gives decides nothing
        parts.append(kind)
    elif isinstance(value, Tensor):
        raise TypeError("only fake tensors can be described")
    else:
        parts += (kind, value)  # 1 and 1.0 are equal, and lead to different dtypes


def _plan(result: Any, tensors: list[FakeTensor]) -> _Plan | None:
    """How to make `result` again from arguments described alike; None if that cannot be told from outside."""
    wrap = list if isinstance(result, list) else tuple if isinstance(result, tuple) else None
    sources = {tensor.untyped_storage()._cdata: position for position, tensor in enumerate(tensors)}
    outputs: list[_Output | int | None] = []
    for leaf in result if wrap else (result,):
        if leaf is None:
            outputs.append(None)
            continue
        passed_on = [position for position, tensor in enumerate(tensors) if tensor is leaf]
        if passed_on:
            outputs.append(passed_on[0])
            continue
        if type(leaf) is not FakeTensor or leaf.constant is not None:
            return None
        source = sources.get(leaf.untyped_storage()._cdata)
        output = _Output(source, leaf.shape, leaf.stride(), int(leaf.storage_offset()), leaf.dtype, leaf.fake_device)
        if source is None and leaf.untyped_storage().nbytes() != _needed_nbytes(output):
            return None
        outputs.append(output)
    return _Plan(wrap, tuple(outputs))


def _needed_nbytes(output: _Output) -> int:
    """Bytes of a storage that a strided tensor fills from its beginning."""
    if output.shape.numel() == 0:
        return 0
    last = sum((length - 1) * step for length, step in zip(output.shape, output.stride, strict=True))
    return (last + 1) * output.dtype.itemsize + output.offset * output.dtype.itemsize


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their span without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if step != expected:
                return False
            expected *= length
    return True
