"""The templates of users, in Jinja2's sandbox. Imported only where somebody writes one.

A template is the administrator's, and what fills it is not. What can make gigabytes out of a short one is refused, and
nothing of it is computed before it is rendered.
"""

from collections.abc import Callable
from typing import Any, Final

from jinja2 import StrictUndefined, Template, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from notbefore.errors import ConfigError

METHODS: Final = (  # of texts; others take a width, or a text for each letter
    *("capitalize", "casefold", "count", "endswith", "find", "lower", "lstrip", "removeprefix", "removesuffix"),
    *("rstrip", "split", "splitlines", "startswith", "strip", "title", "upper"),
)
FILTERS: Final = ("batch", "center", "format", "indent", "slice")  # they take a width or a count, and are left out


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply numbers, and nothing else: ``'a' * 10**9`` is a gigabyte."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if not numbers or operator == "**":
            raise SecurityError(f"`{operator}` is for numbers only, and `**` for none")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """Nothing takes its place: a width in it is a gigabyte as well."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and (not isinstance(obj, str) or attr in METHODS)


def compile_template(source: str, escape: Callable[[str], str]) -> Template:
    """Return a template whose values are escaped; raises ``ConfigError``."""

    def harmless(value: object) -> str:
        return escape(str(value))  # a list or a mapping holds Azure's words as well; `|safe` does not switch it off

    environment = _Environment(undefined=StrictUndefined, autoescape=False, finalize=harmless, optimized=False)
    for name in FILTERS:
        del environment.filters[name]
    del environment.globals["lipsum"]
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"this is not a template: {error.message} (its line {error.lineno})") from None
    except (RecursionError, ValueError, OverflowError, MemoryError, SyntaxError):
        raise ConfigError("this template is too deep, or a number in it too large: shorten it") from None
