"""Parameters of functions and fields of dataclasses, read from the source code: the help does not import torch."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Parameter(NamedTuple):
    """A parameter of a function, or a field of a dataclass."""

    kind: str
    """its type as source code, with our aliases replaced by what they stand for"""
    default: str | None
    """as source code; None: it has none"""
    help: str


def function_parameters(module: str, name: str) -> tuple[str, dict[str, Parameter]]:
    """The description of a function in its docstring, and its parameters."""
    from docstring_parser import parse

    module, node = _definition(module, name)
    assert isinstance(node, ast.FunctionDef)
    text = ast.get_docstring(node) or ""
    helps = {p.arg_name: " ".join((p.description or "").split()) for p in parse(text).params}
    arguments = node.args.args
    defaults = [None] * (len(arguments) - len(node.args.defaults)) + [ast.unparse(d) for d in node.args.defaults]
    description = text.partition("\n\nArgs:")[0].partition("\n\nReturns:")[0]
    return description, {
        each.arg: Parameter(_kind(module, each.annotation), default, helps.get(each.arg, ""))
        for each, default in zip(arguments, defaults, strict=True)
    }


def class_fields(module: str, name: str) -> dict[str, Parameter]:
    """The fields of a dataclass and of its bases, each with the string below it."""
    module, node = _definition(module, name)
    assert isinstance(node, ast.ClassDef)
    found: dict[str, Parameter] = {}
    for base in node.bases:
        found |= class_fields(module, ast.unparse(base))
    for each, below in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(each, ast.AnnAssign):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            default = ast.unparse(each.value) if each.value else None
            found[ast.unparse(each.target)] = Parameter(
                _kind(module, each.annotation), default, " ".join(str(text).split())
            )
    return found


def system_configs() -> dict[str, tuple[str, str]]:
    """For each system of `logpast.models`, module and name of its config."""
    _, systems = _definition("logpast.models.registry", "SYSTEMS")
    assert isinstance(systems, ast.AnnAssign)
    assert isinstance(systems.value, ast.Dict)
    found = {}
    for key, value in zip(systems.value.keys, systems.value.values, strict=True):
        module, model = _definition("logpast.models.registry", ast.unparse(value))
        assert isinstance(model, ast.ClassDef)
        config = next(each for each in model.body if isinstance(each, ast.Assign) and _names(each) == ["Config"])
        found[str(ast.literal_eval(key))] = (module, ast.unparse(config.value))  # type: ignore[arg-type]
    return found


@cache
def _statements(module: str) -> list[ast.stmt]:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")).body


def _definition(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """The module of ours that defines a name which this one uses, and the statement; None if it is not ours."""
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _definition(node.module, name) if str(node.module).startswith("logpast") else ("", None)  # type: ignore[arg-type]
        if name in _names(node):
            return module, node
    return "", None


def _names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else [getattr(node, "name", "")]


def _kind(module: str, annotation: ast.expr | None) -> str:
    """A type as source code: `Streams | None` as Literal['corpus', 'document'] | None, Annotated[int, …] as int."""

    class Resolve(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            where, alias = _definition(module, node.id)
            return ast.parse(_kind(where, alias.value)).body[0].value if isinstance(alias, ast.Assign) else node  # type: ignore[attr-defined]

        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
                return self.visit(node.slice.elts[0])
            return self.generic_visit(node)

    assert annotation is not None
    return ast.unparse(Resolve().visit(annotation))
