"""``Template``: a user's text in Jinja2's language, sandboxed and bounded in time and size.

The module is imported only where there are templates: Jinja2 takes 2 MB and 0.1 s.

The bounds hold between the parts of a text and between the passes of loops. A single expression is
not interrupted. So the courier renders templates in a process of their own (``RenderProcess``).
"""

import time
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

import msgspec
from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from notbefore.core.record import TAG, Record, Value
from notbefore.core.text import without_mentions
from notbefore.wording.texts import LINK_TITLES

MAX_SOURCE: Final = 16_000  # characters of a template
MAX_RENDERED: Final = 64_000  # characters of its result
MAX_SECONDS: Final = 1.0  # of work: a busy machine takes longer for them
VARIABLES: Final = ("title", "body", "severity", "links", "record")  # the variables of a template
GLOBALS: Final = ("range", "namespace", "joiner", "cycler")  # functions of Jinja2
IMPLICIT: Final = ("loop", "caller", "varargs", "kwargs")  # that loops and macros declare
ATTRIBUTES: Final = frozenset(field.encode_name for field in msgspec.structs.fields(Record)) - {TAG}


class RenderError(Exception):
    """A template cannot make a text. The error says why."""


class Values(dict[str, Any]):
    """Values by name. A name of ``names`` without a value is empty; any other name is a mistake.

    ``owner``: the name of the variable that holds them.
    """

    def __init__(self, owner: str, values: Mapping[str, Any], names: Collection[str]) -> None:
        super().__init__(values)
        self._owner = owner
        self._names = names

    def __missing__(self, name: str) -> Undefined:
        if name in self._names or name.startswith(TAG):
            return Undefined(name=name)
        hint = f"there is no {name!r} in `{self._owner}`"
        for similar in get_close_matches(name, self._names, 1):
            hint = f"{hint}: did you mean {similar!r}?"
        return StrictUndefined(hint=hint)


def record_values(attributes: Mapping[str, Value]) -> Values:
    """Return the variable ``record``. Its texts mention no one in a chat."""
    values: dict[str, Value] = {}
    for name, value in attributes.items():
        if isinstance(value, str):
            values[name] = without_mentions(value)
        elif isinstance(value, list | tuple):
            values[name] = tuple(without_mentions(item) for item in value)
        else:
            values[name] = value
    return Values("record", values, ATTRIBUTES)


def link_values(addresses: Mapping[str, str]) -> Values:
    """Return the variable ``links``."""
    return Values("links", addresses, LINK_TITLES)


@pass_context
def _visible(_context: Context, value: object) -> object:
    """Show nothing for ``None``.

    The unused context keeps Jinja2 from computing output at compile time, when no bound holds.
    """
    if value is None:
        return ""
    return value


def _json_form(value: object) -> None:
    """Let ``tojson`` write ``null`` for an attribute that the record does not have."""
    if not isinstance(value, Undefined):
        raise TypeError(f"{type(value).__name__} has no JSON form")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    # operators that `call_binop` executes: a small expression with them makes a huge value
    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(
            undefined=StrictUndefined,
            finalize=_visible,
            optimized=False,  # nothing is computed at compile time
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,  # some formats end each line
        )
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.policies["json.dumps_kwargs"] = {"default": _json_form}
        self.deadline = 0.0  # seconds of this thread's work

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply numbers. Raises ``SecurityError`` for anything else."""
        are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or not are_numbers:
            raise SecurityError("expected numbers around `*`, and there is no `**` here")
        return super().call_binop(context, operator, left, right)

    def check_time(self) -> str:
        """Print nothing; raise ``RenderError`` after the deadline. All passes of loops call it."""
        if time.thread_time() > self.deadline:
            raise RenderError(f"it is not done after {MAX_SECONDS:g} s")
        return ""


class Template:
    """A template. Use it in one thread at a time.

    Raises ``ValueError`` if its syntax is wrong, or if it uses a name that does not exist.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise ValueError(f"expected a template of {MAX_SOURCE} characters or less")
        self._sandbox = _Sandbox()
        try:
            tree = self._sandbox.parse(source)
            _check_names(tree)
            self._add_time_checks(tree)
            self._template = self._sandbox.from_string(tree)
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of the template: {error.message}") from None
        except (SyntaxError, RecursionError, MemoryError):  # from Python's own compiler
            raise ValueError("the template is nested too deeply") from None

    def _add_time_checks(self, tree: nodes.Template) -> None:
        """Let every pass of a loop, and every call of a macro, check the time."""
        blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [*tree.find_all(nodes.For)]
        blocks += tree.find_all(nodes.Macro)
        blocks += tree.find_all(nodes.CallBlock)
        for block in blocks:
            check = nodes.EnvironmentAttribute("check_time")
            call = nodes.Call(check, [], [], None, None)
            output = nodes.Output([call])
            output.set_lineno(block.lineno)
            output.set_environment(self._sandbox)
            block.body.insert(0, output)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text; raises ``RenderError``."""
        self._sandbox.deadline = time.thread_time() + MAX_SECONDS
        try:
            return self._joined(self._template.generate(values))
        except RenderError:
            raise
        except Exception as error:  # noqa: BLE001 - an expression may raise anything
            raise RenderError(f"{type(error).__name__}: {error}") from None

    def _joined(self, parts: Iterable[str]) -> str:
        """Return the text of all parts; raises ``RenderError`` beyond the bounds."""
        texts: list[str] = []
        length = 0
        for part in parts:
            self._sandbox.check_time()
            length += len(part)
            if length > MAX_RENDERED:
                raise RenderError(f"it makes more than {MAX_RENDERED} characters")
            texts.append(part)
        text = "".join(texts)
        text.encode()  # raises for half a surrogate pair, which no receiver could read
        return text


def _check_names(tree: nodes.Template) -> None:
    """Raise ``ValueError`` if a template uses a name, or includes a file, that it cannot see."""
    unknown = sorted(_undeclared(tree).difference(VARIABLES, GLOBALS))
    if unknown:
        variables = ", ".join(VARIABLES)
        raise ValueError(f"the template uses {', '.join(unknown)}: it sees only {variables}")
    if any(True for _ in meta.find_referenced_templates(tree)):
        raise ValueError("a template cannot include another one")


def _undeclared(tree: nodes.Template) -> set[str]:
    """Return the names that a template uses, and declares nowhere.

    Jinja2's own function for this computes constant expressions, when no bound holds.
    """
    used: set[str] = set()
    declared = set(IMPLICIT)
    for name in tree.find_all(nodes.Name):
        if name.ctx == "load":
            used.add(name.name)
        else:
            declared.add(name.name)
    for macro in tree.find_all(nodes.Macro):
        declared.add(macro.name)
    return used - declared
