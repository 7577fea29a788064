"""How configs refer to modules: exact names, names of their parents, shell patterns, `re:` expressions, and classes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from fnmatch import translate

_REGEX = "re:"
_GLOB = re.compile(r"[*?\[]")
_CLASS = re.compile(r"[A-Z]\w*")


class Match(IntEnum):
    """How closely a pattern matches a module. If several do, the closest counts."""

    NONE = 0
    CLASS = 1
    PATTERN = 2
    PARENT = 3
    EXACT = 4


class ModulePatterns:
    """Patterns for modules, as a config lists them.

    `re:` expressions match from the start of a name, as in compressed-tensors. Shell patterns match a module or one
    that contains it. A name means a module and everything in it. A name such as "Linear" is a class.

    Attributes:
        patterns: as written.

    Raises:
        re.error: a `re:` pattern is not a regular expression. Nothing else can be wrong, because any other text is a
            name.
    """

    def __init__(self, patterns: Sequence[str], *, nested: bool = False, inside: bool = False) -> None:
        """``nested``: the config is the text model's own, so its names may lack the prefix of the multimodal model.
        ``inside``: names may also lack the parents of a module, as in transformers' `modules_to_not_convert`."""
        self.patterns = tuple(patterns)
        self._nested, self._inside = nested, inside
        self._names: dict[str, str] = {}
        self._classes: set[str] = set()
        self._expressions: list[re.Pattern[str]] = []
        self._globs: list[re.Pattern[str]] = []
        for pattern in self.patterns:
            if pattern.startswith(_REGEX):
                self._expressions.append(re.compile(pattern.removeprefix(_REGEX)))
            elif _GLOB.search(pattern):
                self._globs.append(re.compile(translate(pattern)))
            elif _CLASS.fullmatch(pattern):
                self._classes.add(pattern)
            else:
                self._names[pattern] = self._names[unwrapped(pattern)] = pattern

    def match(self, module: str, module_class: str) -> Match:
        """How closely any of the patterns matches this module."""
        found = self.closest_name(module)
        if found is not None:
            return found[0]
        plain = unwrapped(module)
        candidates = [module, "model." + plain, plain] if self._nested else [module]
        if any(e.match(name) for e in self._expressions for name in candidates):
            return Match.PATTERN
        if any(g.match(parent) for g in self._globs for name in candidates for parent in _with_parents(name)):
            return Match.PATTERN
        if self._inside and any(f".{name}." in f".{module}." for name in self._names):
            return Match.PARENT
        return Match.CLASS if module_class in self._classes else Match.NONE

    def closest_name(self, module: str) -> tuple[Match, str] | None:
        """The longest pattern that is the name of the module or of one that contains it, as written, and which of the
        two it is."""
        for form in (module, unwrapped(module)):
            for parent in _with_parents(form):
                if parent in self._names:
                    return (Match.EXACT if parent == form else Match.PARENT), self._names[parent]
        return None


def unwrapped(module: str) -> str:
    """A module's name without the prefixes that multimodal models put before their text model, in either order."""
    parts = [part for part in module.split(".") if part != "language_model"]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] == "model" else parts) or module


def is_name(pattern: str) -> bool:
    """Whether a pattern is the name of a single module, and cannot match several."""
    return not (pattern.startswith(_REGEX) or _GLOB.search(pattern) or _CLASS.fullmatch(pattern))


def _with_parents(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]
