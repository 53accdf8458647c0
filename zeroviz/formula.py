"""Arithmetic written as text, worked out exactly and safely: `evaluate("4*P + 12*P/N", {"P": 7, "N": 8})`.

The text is parsed, never executed: numbers, the names given, + - * / // % **, and calls of the functions given.
Everything else is refused. Results are fractions, so 12/(16/(0.9*4) - 4) is 27 and not a little more or less.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from math import ceil
from typing import Any

MAX_CHARS = 400
# 2**30 and 1024**2 are wanted; 9**9**9 is not.
MAX_EXPONENT = 64

Function = Callable[..., Fraction | int]
Names = Mapping[str, int | Decimal | Fraction]

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: lambda a, b: a % b,
}
PLAIN: dict[str, Function] = {"ceil": lambda x: ceil(x), "max": max, "min": min}


class FormulaError(ValueError):
    """A text that is no formula, or one that uses what is not allowed."""


def evaluate(text: str, names: Names | None = None, functions: Mapping[str, Function] | None = None) -> Fraction:
    """The value of the formula. `functions` are allowed besides ceil, max and min, and may be given words as well."""
    if len(text) > MAX_CHARS:
        raise FormulaError(f"A formula of {len(text)} characters is too long; at most {MAX_CHARS} are read.")
    try:
        tree = ast.parse(text, mode="eval")
        return _Evaluator(text, names or {}, PLAIN | dict(functions or {})).number(tree.body)
    except SyntaxError:
        raise FormulaError(f"{text!r} is not a formula.") from None
    except ZeroDivisionError:
        raise FormulaError(f"{text!r} divides by zero.") from None


class _Evaluator:
    def __init__(self, text: str, names: Names, functions: Mapping[str, Function]) -> None:
        self.text, self.names, self.functions = text, names, functions

    def number(self, node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                # The float's shortest text is what was written: 0.9 is nine tenths.
                return Fraction(str(value))
            case ast.Name(id=name) if name in self.names:
                return Fraction(self.names[name])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.number(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return self.power(self.number(left), self.number(right))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.number(left), self.number(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in self.functions:
                return Fraction(self.functions[name](*(self.argument(arg) for arg in args)))
        raise FormulaError(f"{self.text!r} uses {ast.unparse(node)!r}, which is not allowed in a formula.")

    def argument(self, node: ast.expr) -> Any:
        """A word, or a number; a whole one as int, so that it can count things."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        value = self.number(node)
        return int(value) if value.denominator == 1 else value

    def power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT or abs(base) > 10**18:
            raise FormulaError(f"{self.text!r} has the power {base}**{exponent}, which is too large or not whole.")
        return Fraction(base ** int(exponent))
