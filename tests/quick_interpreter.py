"""Triton's interpreter in a third of the time; the results are the same.

A conftest imports the fixture. Each of its parts is a function of Triton's that is called for each
operation, or for each launch.
"""

import dataclasses
import inspect
import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """Where Triton's insides have other names, nothing is changed."""
    try:
        from triton.runtime import interpreter

        changed = [*patches_once_a_launch(interpreter), *members_once(interpreter),
                   *dtypes_once(interpreter), *shapes_once(interpreter),
                   *overflows_that_nobody_sees(interpreter)]
    except (ImportError, AttributeError):
        yield
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        for owner, name, value in changed:
            monkeypatch.setattr(owner, name, value)
        yield


def patches_once_a_launch(interpreter):
    """Before each call of a function inside a kernel, the interpreter looks through all names of
    `triton.language` for what it has to replace. It has been replaced since the kernel's launch."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    language, launches = (interpreter.tl, interpreter.tl.core), []

    def launch_once(self, *args, **kwargs):
        launches.append([])
        try:
            return launch(self, *args, **kwargs)
        finally:
            launches.pop()

    def patch_once(function):
        found = [any(x is module for x in function.__globals__.values()) for module in language]
        if launches and found in launches[-1]:
            return None
        if launches:
            launches[-1].append(found)
        return patch(function)

    return [(interpreter.GridExecutor, "__call__", launch_once),
            (interpreter, "_patch_lang", patch_once)]


def members_once(interpreter):
    """And which of the names those are is the same for each launch."""
    replace, is_builtin, known = interpreter._patch_attr, interpreter.tl.core.is_builtin, {}

    def patch_builtin(package, builder, scope):
        if package not in known:
            known[package] = [(name, member) for name, member in inspect.getmembers(package)
                              if is_builtin(member)]
        for name, member in known[package]:
            replace(package, name, member, builder, scope)

    return [(interpreter, "_patch_builtin", patch_builtin)]


def dtypes_once(interpreter):
    """NumPy's name of Triton's dtype, for which a table of all is written down each time."""
    look_up, known = interpreter._get_np_dtype, {}

    def np_dtype(dtype):
        key = type(dtype), dtype.name
        if key not in known:
            known[key] = look_up(dtype)
        return known[key]

    return [(interpreter, "_get_np_dtype", np_dtype)]


def shapes_once(interpreter):
    """Each result has a shape, of constants whose types are written down, and each comparison of
    two shapes makes new ones. They are made and checked once for each shape, and compared as
    numbers. Not where kernels are compiled, in which shapes are the same, but time is not."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return []
    block_type, tensor = interpreter.tl.core.block_type, interpreter.tl.core.tensor
    new_type, new_tensor, of_types, of_tensors = block_type.__init__, tensor.__init__, {}, {}
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def make_type(self, element_ty, shape):
        numbers = tuple(getattr(size, "value", size) for size in shape)
        if numbers not in of_types:
            new_type(self, element_ty, shape)
            of_types[numbers] = self.shape, self.numel, str(self.shape)
        self.element_ty, (self.shape, self.numel, text) = element_ty, of_types[numbers]
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self, handle, type):
        numbers = numbers_of(type)
        if numbers not in of_tensors:
            new_tensor(self, handle, type)
            of_tensors[numbers] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[numbers]

    def is_same_type(self, other):
        return isinstance(other, block_type) and self.element_ty == other.element_ty and (
            self.shape.values == other.shape.values)

    def broadcast_others(self, lhs, rhs):
        if numbers_of(lhs.type) == numbers_of(rhs.type):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return [(block_type, "__init__", make_type), (block_type, "__eq__", is_same_type),
            (tensor, "__init__", make_tensor), (semantic, "broadcast_impl_value", broadcast_others)]


def numbers_of(type) -> tuple[int, ...]:
    """A type's shape; () of one number."""
    return (*type.shape.values,) if type.is_block() else ()


def overflows_that_nobody_sees(interpreter):
    """Each operation on integers is done in 64 bits as well, for an assertion that is only there
    with `debug`, which is off."""
    builder = interpreter.interpreter_builder
    if builder.options.debug:
        return []
    return [(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))]
