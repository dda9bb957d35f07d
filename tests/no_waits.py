"""What a launch would do to a GPU, seen on a CPU: no copy from pageable memory, no wait.

A tensor that is made of Python's or numpy's numbers, or without a `device`, is on the *host*. On a
GPU it would have to be copied, from memory that is not pinned, and such a copy first waits for all
that was queued. `sampler.put` copies through pinned memory. So within `NoWaits` a host's tensor may
only go through `put`, or be computed with others of the host; and nothing is read back.
"""

import sys
from unittest import mock

import torch
from stand_ins import waits_for
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoserve import sampler

MADE = (torch.arange, torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.randn)
FROM_HOST = (torch.tensor, torch.as_tensor)


class NoWaits:
    """A context manager; `faults` says what a GPU would have waited for. pinned: a step's
    buffers, which the host reads, and which are copied as they should be."""

    def __init__(self, pinned: list[torch.Tensor]):
        self.faults, self.hosts, self.pinned = [], [], [x.data_ptr() for x in pinned]
        self.true_from_numpy, put = torch.from_numpy, sampler.put
        self.parts = [Calls(self), Operators(self),
                      mock.patch.object(torch, "from_numpy", self.from_numpy),
                      *(mock.patch.object(module, "put", self.put)
                        for module in list(sys.modules.values())
                        if getattr(module, "put", None) is put)]

    def __enter__(self):
        for part in self.parts:
            part.__enter__()
        return self

    def __exit__(self, *error):
        for part in self.parts[::-1]:
            part.__exit__(*error)

    def from_numpy(self, array):
        return self.mark(self.true_from_numpy(array))

    def mark(self, out):
        self.hosts += [one.untyped_storage() for one in tree_leaves(out) if is_tensor(one)]
        return out

    def is_host(self, x) -> bool:
        return is_tensor(x) and x.device.type == "cpu" and any(
            x.untyped_storage().data_ptr() == one.data_ptr() for one in self.hosts if one.nbytes())

    def fault(self, what: str) -> None:
        self.faults.append(what)

    def put(self, values, dtype=torch.float32, *, device):
        """What `sampler.put` does on a GPU: out of pinned memory."""
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return torch.as_tensor(values, dtype=dtype).clone()


class Calls(TorchFunctionMode):
    def __init__(self, book: NoWaits):
        self.book = book

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function in FROM_HOST and not any(is_tensor(x) for x in args[:1]):
            if kwargs.get("device") is not None:
                self.book.fault(f"{function.__name__} of numbers, with a device")
            self.book.mark(out)
        elif function is torch.Tensor.__setitem__ and not is_tensor(args[2]) and any(
                is_tensor(x) and x.dim() for x in tree_leaves(args[1])):
            self.book.fault(f"{args[2]} is put at places that are on the device")
        elif function in MADE and kwargs.get("device") is None:
            self.book.mark(out)
        elif function is torch.Tensor.to and self.book.is_host(args[0]) and any(
                isinstance(x, torch.device) for x in (*args[1:], *kwargs.values())):
            self.book.fault(f"a copy of {tuple(args[0].shape)} from pageable memory")
        elif function in (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist) and (
                not self.book.is_host(args[0]) and args[0].data_ptr() not in self.book.pinned):
            self.book.fault(f"{function.__name__} of {tuple(args[0].shape)}")
        return out


class Operators(TorchDispatchMode):
    def __init__(self, book: NoWaits):
        super().__init__()
        self.book = book

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().split(".")[0]
        given = [x for x in tree_leaves((args, kwargs or {})) if is_tensor(x)]
        out = op(*args, **(kwargs or {}))
        hosts = [x for x in given if self.book.is_host(x)]
        if given and len(hosts) == len(given):
            self.book.mark(out)  # arithmetic of the host
        elif any(x.dim() for x in hosts):  # one number goes along with a launch
            self.book.fault(f"{name} of tensors of the host, {[tuple(x.shape) for x in hosts]}")
        if len(hosts) < len(given) and waits_for(op, args, kwargs or {}):
            self.book.fault(f"{name} reads from the device")
        return out


def is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)


def watch_launches(llm, monkeypatch) -> list[str]:
    """From now on each launch of the engine, and what extras do before it, adds its faults here."""
    faults = []

    def watched(call):
        def within(*args):
            with NoWaits(llm.runner.builder.buffers) as book:
                out = call(*args)
            faults.extend(book.faults)
            return out
        return within

    monkeypatch.setattr(llm.runner, "run", watched(llm.runner.run))
    llm.hooks.launching[:] = map(watched, llm.hooks.launching)
    return faults
