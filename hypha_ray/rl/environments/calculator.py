"""Environment with a tool: a calculator, whose result the policy may use for its answer.

    prompt 38+4=  ─► response 38+4 ─► result 42 ─► response 42: reward 1

A chat model calls it as Hermes and Qwen do: ``<tool_call>{"name": "calculator", "arguments": {"expression": "38+4"}}
</tool_call>``, once or more in a response. Of other models, a response that is only an expression with an operator is
a call.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from hypha_ray.rl.environments.environment import Message
from hypha_ray.rl.rewards.registered import last_number
from hypha_ray.rl.rewards.response import Response

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_EXPRESSION = re.compile(r"\s*[\d.+*/() -]*[\d)]\s*[-+*/][\d.+*/() -]*=?\s*")
_LONGEST = 200
"""Largest number of characters of an expression, so that results are computed at once."""
_LARGEST = 1e15
"""Largest size of a result: above it floats leave out integers."""
_OPERATORS: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_NOTHING: Final = "error"
"""Result of an expression without one."""


class Calculator:
    """Calculator for whole and decimal numbers, with ``+ - * /`` and brackets.

    A response without a call is the answer: it has a reward of 1 if its last number is that of the record's `answer`,
    otherwise 0.
    """

    tools: tuple[dict[str, Any], ...] = (
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Computes an arithmetic expression.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "expression": {"type": "string", "description": "Numbers with + - * / and brackets."}
                    },
                    "required": ["expression"],
                },
            },
        },
    )

    def __init__(self) -> None:
        self._answer = ""

    def reset(self, record: Mapping[str, Any]) -> None:
        """Begin with the prompt of the dataset."""
        self._answer = str(record["answer"])

    def step(self, response: Response) -> tuple[list[Message] | None, float]:
        """Compute the expressions of calls, each with a message, or reward an answer."""
        expressions = called_expressions(response.text)
        if response.ended and expressions:
            results = map(result_of, expressions)
            return [{"role": "tool", "name": "calculator", "content": result} for result in results], 0.0
        right_number = last_number(self._answer)
        response_number = last_number(response.text)
        return None, float(response.ended and response_number is not None and response_number == right_number)


def called_expressions(text: str) -> list[str]:
    """Return the expressions of the calls in a response; that of a call that can't be read is empty."""
    calls = _CALL.findall(text)
    if not calls and _EXPRESSION.fullmatch(text):
        return [text]
    return [_expression_of(call) for call in calls]


def _expression_of(text: str) -> str:
    try:
        call = json.loads(text)
        return str(call["arguments"]["expression"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def result_of(expression: str) -> str:
    """Return the result of an expression as text; ``error`` without one."""
    if len(expression) > _LONGEST:
        return _NOTHING
    try:
        result = _value(ast.parse(expression.strip(" ="), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return _NOTHING
    if not abs(result) <= _LARGEST:
        return _NOTHING
    return f"{result:.15g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=binary, right=right) if type(binary) in _OPERATORS:
            result: int | float = _OPERATORS[type(binary)](_value(left), _value(right))
            return result
    raise ValueError("no arithmetic")
