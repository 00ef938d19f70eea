"""What the code of a forward reads from outside its modules: the globals of the file it was written in.

A graph freezes them too. Plain values are compared when it runs; what else they may be, short of functions, classes and
modules, can change without being another object, so that code is refused.
"""

import builtins
import dis
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

Names = tuple[str, ...]

_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


def globals_of(code: CodeType) -> Iterator[Names]:
    """The globals that code names, each with the attributes it asks of them: `config.FLAG` is two names."""
    names: Names = ()
    for instruction in dis.get_instructions(code):
        if names and instruction.opname in _ATTRIBUTES:
            names = (*names, instruction.argval)
            continue
        if names:
            yield names
        names = (instruction.argval,) if instruction.opname == "LOAD_GLOBAL" else ()
    if names:
        yield names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_of(constant)


def resolve(names: Names, scope: dict[str, Any]) -> tuple[Names, Any]:
    """How far these names lead by modules and classes, and to what; the names are empty where there is no such global.

    Example:
        >>> resolve(("math", "pi", "hex"), {"math": __import__("math")})
        (('math', 'pi'), 3.141592653589793)
    """
    if names[0] not in scope or hasattr(builtins, names[0]):
        return (), None
    value, used = scope[names[0]], names[:1]
    for name in names[1:]:
        if not isinstance(value, ModuleType | type) or not hasattr(value, name):
            break
        value, used = getattr(value, name), (*used, name)
    return used, value
