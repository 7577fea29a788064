"""What the hub's builder, and every machine that loads the bundle, expect of its source.

Without these rules, faults would be noticed late: in the hub's build, on a machine with another torch or, worse, never,
like two builds whose operators overwrite each other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping

ALLOWED_PACKAGES = frozenset({"torch", "triton"})
OPERATOR_REGISTRARS = frozenset({"custom_op", "triton_op", "register_fake"})
PYTHON_FLOOR = (3, 9)


def violations(module: str, sources: Mapping[str, bytes]) -> list[str]:
    """Every broken rule of the bundle ``module``, as ``path:line: what to change``.

    Args:
        sources: contents of the bundle's files, by path relative to its top.
    """
    found = []
    if "__init__.py" not in sources:
        found.append("__init__.py: missing; it is what get_kernel imports")
    if any(path.startswith(f"{module}/") for path in sources):
        found.append(f"{module}/: a directory of the bundle's own name would be taken for the bundle itself")
    for path, content in sources.items():
        if path.rpartition("/")[2] == "_ops.py":
            found.append(f"{path}: generated at build time, because it holds the build's own id; remove it")
        elif path.endswith(".py"):
            found += [f"{path}:{line}: {message}" for line, message in _python_violations(path, content)]
    return found


def _python_violations(path: str, content: bytes) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(content, filename=path, feature_version=PYTHON_FLOOR)
    except SyntaxError as error:
        yield error.lineno or 0, f"not valid in Python {'.'.join(map(str, PYTHON_FLOOR))}: {error.msg}"
        return
    if path == "__init__.py" and not _has_literal_all(tree):
        yield 1, "__all__ must be assigned a literal list of names: tools read it without importing the bundle"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield from _import_violation(node.lineno, name.name)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield from _import_violation(node.lineno, node.module or "")
            elif node.level > path.count("/") + 1:
                yield node.lineno, "a relative import that leaves the bundle"
            if any(name.name == "*" for name in node.names):
                yield node.lineno, "a star import hides which names the bundle uses"
        elif isinstance(node, ast.Call) and _called_name(node) in OPERATOR_REGISTRARS and not _has_prefixed_name(node):
            function = _called_name(node)
            yield node.lineno, f'{function} must be given a literal add_op_namespace_prefix("...") call as its name'


def _import_violation(line: int, module: str) -> Iterator[tuple[int, str]]:
    package = module.partition(".")[0]
    if package not in ALLOWED_PACKAGES and package not in sys.stdlib_module_names:
        allowed = " and ".join(sorted(ALLOWED_PACKAGES))
        yield line, f"imports {module!r}: the bundle may import the standard library, {allowed}, and itself relatively"


def _has_literal_all(tree: ast.Module) -> bool:
    values = [
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and any(ast.unparse(target) == "__all__" for target in statement.targets)
    ]
    return len(values) == 1 and isinstance(values[0], ast.List) and all(map(_is_literal_string, values[0].elts))


def _is_literal_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _called_name(call: ast.Call) -> str:
    """The last part of the name that is called: ``custom_op`` for ``torch.library.custom_op(...)``."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _has_prefixed_name(call: ast.Call) -> bool:
    name = call.args[0] if call.args else None
    return (
        isinstance(name, ast.Call)
        and _called_name(name) == "add_op_namespace_prefix"
        and len(name.args) == 1
        and _is_literal_string(name.args[0])
    )
