"""A fixture for Triton's interpreter, and the sizes of tiles in it."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

# Matrix products on GPUs need at least 16 rows and dimensions.
TILE = (8, 16, 4, 4) if not torch.cuda.is_available() else (16, 64, 16, 4)


@pytest.fixture(scope="module")
def a_quick_interpreter():
    """Leave out most of the time of Triton's interpreter, which gives the same without.

    It replaces its language's functions at each call of any jitted function; once per launch, for
    each module with such functions, is enough. It looks for overflows of integers, which it reports
    in its debug mode only. And it makes a table of NumPy's types for each operation.
    """
    with pytest.MonkeyPatch.context() as patch:
        # other versions of Triton
        with contextlib.suppress(ImportError, AttributeError, TypeError):
            from triton.runtime import interpreter

            replace, restore, replaced = (
                interpreter._patch_lang,
                interpreter._LangPatchScope.restore,
                set(),
            )

            def replace_once(function):
                if id(function.__globals__) in replaced:
                    return None  # of a call within a launch, which restores nothing
                replaced.add(id(function.__globals__))
                return replace(function)

            def restore_all(scope):  # at the end of a launch
                replaced.clear()
                restore(scope)

            patch.setattr(interpreter._LangPatchScope, "restore", restore_all)
            patch.setattr(interpreter, "_patch_lang", replace_once)

            options, find, found = (
                interpreter.interpreter_builder.options,
                interpreter._get_np_dtype,
                {},
            )

            def find_once(dtype):
                name = dtype.scalar.name
                if name not in found:
                    found[name] = find(dtype)
                return found[name]

            patch.setattr(interpreter, "_get_np_dtype", find_once)
            if not options.debug:
                quick = dataclasses.replace(options, sanitize_overflow=False)
                patch.setattr(interpreter.interpreter_builder, "options", quick)
        yield
