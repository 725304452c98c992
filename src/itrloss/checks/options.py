"""Options that are declared in the bodies of classes, and checked whenever they are set."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
)

import numpy as np
import torch
from torch import Tensor, nn

from ..torch_versions import require_version
from .values import as_int, as_number, no_word, unknown_keyword

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Return a decorator that changes nothing: it is for type checkers and editors."""
        return lambda cls: cls


class Learnt(NamedTuple):
    """How an option may be learnt: as which parameter, and in which other forms it is passed, such
    as the scale ``1/τ`` of a temperature τ.
    """

    parameter: str  # the form in which a loss holds one of its own
    # a form's tensors as those of another, by the names of both
    conversions: Mapping[tuple[str, str], Callable[[Tensor], Tensor]] = MappingProxyType({})

    def converted(self, x: Any, given: str, wanted: str) -> Any:
        """Return a number, or a tensor, of one form in another."""
        if given == wanted:
            return x
        if isinstance(x, Tensor):
            return self.conversions[given, wanted](x)
        exact = torch.tensor(x, dtype=torch.float64, device="cpu")
        return self.conversions[given, wanted](exact).item()


@dataclass(eq=False)
class Option:
    """An option of a class of :class:`Options`; for what is passed see :func:`option`.

    One that has several forms stays an attribute of the class, by which each form is read. It has
    no ``__set__``, so that a number in the instance's ``__dict__`` comes first.
    """

    default: object
    above: float
    at_least: float
    at_most: float
    converter: Callable[[Any], Any] | None
    learnt: Learnt | None
    form_of: str
    fixed: bool
    local: bool
    # what the class's body says
    name: str = ""
    stands_for: str = ""  # the option of which it is a form, or its own name
    kind: object = None  # its type
    keyword_only: bool = False
    words: tuple[object, ...] = ()  # that the type allows, such as "mean", True or None
    number: type | None = None  # float or int, if the type allows numbers

    def declare(self, name: str, kind: object, keyword_only: bool) -> None:
        """Set the name and the type."""
        self.name = name
        self.stands_for = self.form_of or name
        self.kind = kind
        self.keyword_only = keyword_only
        words, others = parts_of_type(kind)
        if self.learnt is not None:
            others.discard(Tensor)  # which it then is, and is set to numbers all the same
        if others <= {float, int}:
            self.words = words
            if others:
                self.number = float if float in others else int

    @property
    def may_be_anything(self) -> bool:
        """Whether its type is none that is checked."""
        return self.converter is None and self.number is None and not self.words

    def __get__(self, module: CheckedModule | None, owner: type) -> object:
        """Return the option in this form, of the number or of the parameter that is held."""
        if module is None:
            return self
        held = module._held.get(self.stands_for, self.stands_for)
        if held == self.name:
            return module.__getattr__(held)
        value = getattr(module, held)  # also what a parametrization computes
        if isinstance(value, Tensor):
            if value.dtype != torch.float64:
                # in half precision its exponential or reciprocal would be up to 0.4 % off
                value = value.float()
            value = value.squeeze()  # 0-dim, so that it is printed as a number is
        assert self.learnt is not None
        return self.learnt.converted(value, held, self.name)

    def parse(self, value: object) -> object:
        """Return an allowed value in the type in which it is kept; raise an error for another."""
        if self.converter is not None:
            return self.converter(value)
        if self.may_be_anything:
            return value
        is_array = isinstance(value, (Tensor, np.ndarray))
        if not is_array and value in self.words:
            return self.words[self.words.index(value)]
        listed = [repr(word) for word in self.words]
        if self.number is None:
            raise no_word(self.name, value, *listed)
        if listed and isinstance(value, str):
            raise no_word(self.name, value, *listed, "a number")
        number = as_int(self.name, value) if self.number is int else as_number(self.name, value)
        if not (number > self.above and self.at_least <= number <= self.at_most):
            raise ValueError(f"{self.name}: expected {self._bounds()}, got {value}")
        return number

    def _bounds(self) -> str:
        """Return what numbers are allowed, in words."""
        bounds = {"above": self.above, "of at least": self.at_least, "at most": self.at_most}
        parts = [f"{word} {x:g}" for word, x in bounds.items() if math.isfinite(x)]
        return f"a number {' and '.join(parts)}"

    def parameter(self) -> inspect.Parameter:
        """Return the option as a parameter of a signature."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        if self.keyword_only:
            kind = inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if self.default is ... else self.default
        return inspect.Parameter(self.name, kind, default=default, annotation=self.kind)


def option(  # noqa: PLR0913 (what a declaration may say, by keyword)
    *,
    default: object = ...,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    converter: Callable[[Any], Any] | None = None,
    learnt: Learnt | None = None,
    form_of: str = "",
    fixed: bool = False,
    local: bool = False,
) -> Any:
    """Return the declaration of an option, in the body of a class: ``margin: float =
    option(default=0.2, above=0)``.

    Args:
        default: ``...``: there is none, the option has to be passed.
        above, at_least, at_most: bounds of a number.
        converter: a function that returns the value in the type in which it is kept, and raises an
            error for another; it takes the place of the check by the type.
        learnt: as which parameter the losses here learn the option, and its other forms. A loss of
            yours makes its parameters in ``__post_init__``.
        form_of: the name of the option that this is another form of. ``repr`` shows that one, and
            processes compare it.
        fixed: parameters depend on it, so that it is set once.
        local: each process of a job may have its own, and ``repr`` leaves it out.
    """
    if learnt is not None and not isinstance(learnt, Learnt):
        raise TypeError(
            "learnt: expected None in a loss of yours, which makes its parameters in "
            f"__post_init__, got {learnt!r}"
        )
    local = local or form_of != ""
    return Option(default, above, at_least, at_most, converter, learnt, form_of, fixed, local)


def parts_of_type(kind: object) -> tuple[tuple[object, ...], set[object]]:
    """Return the words that a type allows, such as those of a Literal, and the types of others."""
    words: tuple[object, ...] = ()
    others: set[object] = set()
    is_union = get_origin(kind) in (Union, UnionType)
    for part in get_args(kind) if is_union else (kind,):
        if get_origin(part) is Literal:
            words += get_args(part)
        elif part is bool:
            words += (True, False)
        elif part in (None, type(None)):
            words += (None,)
        else:
            others.add(part)
    return words, others


def evaluated(annotation: object, owner: type) -> object:
    """Return the type that an annotation in a class's body stands for; an unknown one as it is,
    such as a name that is imported for type checkers alone.
    """
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[owner.__module__]), dict(vars(owner)))
    except Exception:
        return annotation


@dataclass_transform(field_specifiers=(option,), eq_default=False)
class Options:
    """A class whose options are declared in its body, with a type and a default, as the fields of
    dataclasses are.

    The type says what an option may be: ``float``, ``int``, ``bool``, words in a ``Literal``, or
    several of these; other types are not checked. :func:`option` adds bounds. What follows ``_:
    KW_ONLY`` is passed by name. The constructor, its signature, ``repr``, and the check whenever an
    option is set are made of the declarations. A value is in the instance's ``__dict__``, so that
    it is read without a call.
    """

    _own_options: ClassVar[dict[str, Option]] = {}  # of one class
    _all_options: ClassVar[dict[str, Option]] = {}
    _signature: ClassVar[inspect.Signature]
    __signature__: ClassVar[inspect.Signature]  # what inspect and help show

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Make the options and the signature of a class."""
        super().__init_subclass__(**kwargs)
        cls._own_options = own_options(cls)
        cls._all_options = all_options(cls)
        cls._signature = inspect.Signature([x.parameter() for x in cls._all_options.values()])
        cls.__signature__ = cls._signature
        if cls.__init__ is not Options.__init__:
            cls.__signature__ = extended_signature(cls)

    def __init__(self, *args: Any, **options: Any):
        super().__init__()
        name = type(self).__name__
        for given in options:
            if given not in self._all_options:
                raise unknown_keyword(name, given, self._all_options)
        bind = self._signature.bind
        # a constructor of one's own may set some of them later
        if type(self).__init__ is not Options.__init__:
            bind = self._signature.bind_partial
        try:
            bound = bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        self._check_forms(bound.arguments)
        bound.apply_defaults()
        parameters = {}
        for given, value in bound.arguments.items():
            declared = self._all_options[given]
            if declared.learnt is not None and isinstance(value, nn.Parameter):
                parameters[given] = value
                value = declared.default
            setattr(self, given, value)
        self.__post_init__()
        for given, value in parameters.items():  # in place of what a loss has made of its own
            setattr(self, given, value)

    def _check_forms(self, passed: Mapping[str, object]) -> None:
        """Raise a ValueError if an option was passed in two forms."""
        forms: dict[str, str] = {}
        for name, value in passed.items():
            if value is not None:
                first = forms.setdefault(self._all_options[name].stands_for, name)
                if first != name:
                    raise ValueError(f"{name}: expected None with {first}, another form of it")

    def __post_init__(self) -> None:
        """Make what depends on the options, such as parameters; a subclass calls this one first."""

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; check it if it is an option."""
        declared = self._all_options.get(name)
        if declared is None:
            super().__setattr__(name, value)
            return
        if declared.fixed and name in self.__dict__:
            raise AttributeError(
                f"{name}: cannot be changed, as parameters depend on it; make a new module"
            )
        self._set_option(declared, value)

    def _set_option(self, declared: Option, value: object) -> None:
        """Check and keep the value of an option."""
        self.__dict__[declared.name] = declared.parse(value)

    def _options_in_words(self) -> str:
        """Return the options as they are passed: those by position, and changed ones by name."""
        parts = []
        for name, declared in self._all_options.items():
            if declared.local:
                continue
            value = self._shown(declared)
            if not declared.keyword_only or value != repr(declared.default):
                parts.append(f"{name}={value}")
        return ", ".join(parts)

    def _shown(self, declared: Option) -> str:
        """Return the value of an option in words."""
        value = getattr(self, declared.name, None)
        if isinstance(value, Tensor) and value.is_meta:
            return "on meta"
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(f"{value.item():.4g}")
        return repr(value)


def own_options(cls: type) -> dict[str, Option]:
    """Return the options that a class declares, or gives another default, as ``margin = 0.5`` does;
    take their defaults out of its attributes.
    """
    inherited = all_options(cls)
    annotations = inspect.get_annotations(cls)
    found = {}
    for name, value in vars(cls).items():
        if isinstance(value, Option) and name not in annotations:
            raise TypeError(f"{name}: expected a type, as in {name}: float = option(...), got none")
        if name in inherited and not hasattr(value, "__get__"):  # no property, and no method
            found[name] = replace(inherited[name], default=value)
    keyword_only = False
    for name, annotation in annotations.items():
        kind = evaluated(annotation, cls)
        if kind is KW_ONLY:
            keyword_only = True
        if name in vars(cls) and ClassVar not in (kind, get_origin(kind)):
            given = vars(cls)[name]
            found[name] = given if isinstance(given, Option) else option(default=given)
            found[name].declare(name, kind, keyword_only)
    for name, declared in found.items():
        delattr(cls, name)
        if declared.learnt is not None and declared.learnt.conversions:
            setattr(cls, name, declared)
    return found


def all_options(cls: type) -> dict[str, Option]:
    """Return the options of a class and of its bases.

    First come those by position, of the bases before its own, then those by name, its own first.
    """
    owners = [vars(x).get("_own_options", {}) for x in cls.__mro__]
    latest: dict[str, Option] = {}
    for own in reversed(owners):
        latest |= own
    ordered = {name: x for name, x in latest.items() if not x.keyword_only}
    for own in owners:
        ordered |= {name: latest[name] for name in own}
    return ordered


def extended_signature(cls: type[Options]) -> inspect.Signature:
    """Return the signature of a constructor of one's own, with the options that it passes on by
    ``**``.
    """
    shown = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if shown and shown[-1].kind is inspect.Parameter.VAR_KEYWORD:
        named = [x.name for x in shown]
        for name, declared in cls._all_options.items():
            if name not in named:
                passed_on = declared.parameter().replace(kind=inspect.Parameter.KEYWORD_ONLY)
                shown.insert(-1, passed_on)
    return inspect.Signature(shown)


class WholeState(nn.Module):
    """A module that loads all of its state dict or, if a buffer's shape differs, nothing of it.

    Some keys may be missing or unexpected: so a module loads the state of another one that has the
    same parameters, and neither needs what else the other holds, its ``extra_state``.
    """

    def may_differ(self, name: str) -> bool:
        """Return whether a key of the state, from this module on, may be missing or unexpected."""
        return name.split(".")[-1] == "_extra_state"

    def before_assignment(self, loaded: Mapping[str, Tensor]) -> None:
        """Prepare for a state, by keys from this module on, that is loaded with ``assign=True``."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        loaded = {
            key.removeprefix(prefix): x for key, x in state_dict.items() if key.startswith(prefix)
        }
        for name, p in self._parameters.items():
            x = loaded.get(name)
            # such as the scale of a model (), which this loss shared when it was saved
            if p is not None and p.shape == (1,) and isinstance(x, Tensor) and x.dim() == 0:
                state_dict = {**state_dict, f"{prefix}{name}": x.reshape(1)}
        misfit = self._misfit(loaded)
        if misfit:
            error_msgs.append(f"{prefix}{misfit}")
            return
        if local_metadata.get("assign_to_params_buffers"):
            self.before_assignment(loaded)
        problems = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *problems)
        for keys in (missing_keys, unexpected_keys):
            keys[:] = [key for key in keys if not self._excused(key, prefix)]

    def _misfit(self, loaded: Mapping[str, Tensor]) -> str:
        """Return what is wrong with a buffer of a state; nothing if all fit."""
        for name, own in self._buffers.items():
            new = loaded.get(name)
            if own is not None and new is not None and new.shape != own.shape:
                return f"{name}: expected shape {tuple(own.shape)}, got {tuple(new.shape)}"
        return ""

    def _excused(self, key: str, prefix: str) -> bool:
        """Return whether a key of the whole state dict is this module's, and may differ."""
        return key.startswith(prefix) and self.may_differ(key.removeprefix(prefix))


class KeepsDtypes(nn.Module):
    """A module whose own buffers keep their dtype when it is cast: running means and averages would
    lose small steps in half precision.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: bool, **kwargs: bool) -> KeepsDtypes:
        buffers = dict(self._buffers)
        super()._apply(fn, *args, **kwargs)
        for name, before in buffers.items():
            moved = self._buffers[name]
            if before is not None and moved is not None and moved.dtype != before.dtype:
                self._buffers[name] = before.to(moved.device)
        return self


class CheckedModule(Options, WholeState):
    """A module whose options are checked whenever they are set, and may be learnt."""

    # The parameters in shards, which the optimiser moves, by name: in a forward pass,
    # ``fully_shard`` puts gathered copies in their place.
    _shards: ClassVar[Mapping[str, Tensor]] = {}
    _held: ClassVar[Mapping[str, str]] = {}  # the parameters that stand for options
    _made: ClassVar[frozenset[str]] = frozenset()  # the options whose parameter the module made
    _passed: ClassVar[Mapping[str, tuple[str, float]]] = {}  # options' numbers, with their forms

    def _to_write(self, name: str) -> list[Tensor]:
        """Return what a change of a parameter is written to: it and, if it is a gathered copy, the
        shards.
        """
        own = getattr(self, name)
        shards = self._shards.get(name)
        return [own] if shards is None or shards is own else [own, shards]

    def _set_option(self, declared: Option, value: Any) -> None:
        """Check and keep the value of an option, or the parameter that stands for it."""
        # the replicas of nn.DataParallel have computed copies in place of parameters
        kind = Tensor if getattr(self, "_is_replica", False) else nn.Parameter
        is_learnt = declared.learnt is not None
        if declared.may_be_anything or (is_learnt and isinstance(value, kind)):
            super(Options, self).__setattr__(declared.name, value)  # registers parameters, modules
            self.__dict__["_made"] = self._made - {declared.stands_for}
        elif is_learnt:
            self._set_number(declared, value)
        else:
            super()._set_option(declared, value)

    def _set_number(self, declared: Option, value: Any) -> None:
        """Check and keep the number of an option that may be learnt, in the form that is declared,
        or in the parameter that stands for it.
        """
        name = declared.name
        option = declared.stands_for
        held = self._held.get(option)
        if value is None and held == name:
            self.register_parameter(name, None)
            return
        if value is None and declared.form_of:
            return
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            value = value.item()  # such as a buffer
        number = declared.parse(value)
        if held is not None and held not in self._parameters:
            expected = f"a value of {held}, which a parametrization computes"
            raise AttributeError(f"{name}: cannot be set, as it is {expected}")
        self.__dict__["_passed"] = {**self._passed, option: (name, number)}
        if held is None:
            self.__dict__[option] = self._number_in(option, option)
        else:
            self._fill(option)

    def _number_in(self, form: str, option: str) -> float:
        """Return the number of a learnt option that was set last, in one of its forms."""
        learnt = self._all_options[option].learnt
        assert learnt is not None
        passed, number = self._passed[option]
        return learnt.converted(number, passed, form)

    def _fill(self, option: str) -> None:
        """Give the parameter behind an option the number that was set last."""
        held = self._held.get(option, "")
        parameter = self._parameters.get(held)
        if parameter is not None:
            with torch.no_grad():
                parameter.fill_(self._number_in(held, option))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; the option that it is a form of is then read from it."""
        declared = self._all_options.get(name)
        is_form = declared is not None and declared.learnt is not None
        if is_form:
            if param is not None and param.numel() != 1:
                expected = "expected a parameter of one value"
                raise ValueError(f"{name}: {expected}, got shape {tuple(param.shape)}")
            self._parameters.setdefault(name, None)  # names of a class's attributes are refused
        super().register_parameter(name, param)
        if is_sharded(param):
            self.__dict__["_shards"] = {**self._shards, name: param}
        if declared is None or not is_form:
            return
        option = declared.stands_for
        held = dict(self._held)
        before = held.pop(option, name)
        if param is None:
            self.__dict__[option] = self._number_in(option, option)
        else:
            held[option] = name
            self.__dict__.pop(option, None)
            if before != name:
                del self._parameters[before]
        self.__dict__["_held"] = held
        if "learnable" in self._all_options:
            self.__dict__["learnable"] = param is not None

    def _shown(self, declared: Option) -> str:
        """Return the value of an option in words.

        Shards are not read: that takes all processes, and ``repr`` may be called in one alone.
        """
        if is_sharded(self._parameters.get(self._held.get(declared.name, ""))):
            return "in shards"
        return super()._shown(declared)

    def extra_repr(self) -> str:
        """Return the options, for ``repr``: those by position, and changed ones by name."""
        return self._options_in_words()


def is_sharded(x: object) -> bool:
    """Return whether a tensor is a DTensor, whose module is imported by those who make one."""
    if not hasattr(x, "device_mesh"):
        return False
    require_version("a DTensor, as of FSDP2,", 2, 6)
    return True
