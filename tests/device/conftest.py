"""Triton's interpreter, a quarter quicker."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """Before each call of a function inside a kernel, the interpreter looks through all names of
    `triton.language` for what it has to replace. It has been replaced since the kernel's launch:
    once a launch will do. Where Triton's insides have other names, nothing is changed."""
    try:
        from triton.runtime import interpreter

        launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
        language, launches = (interpreter.tl, interpreter.tl.core), []
    except (ImportError, AttributeError):
        yield
        return

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

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_once)
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield
