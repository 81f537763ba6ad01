"""What can go wrong. Every exception of Paramill is a :class:`ParamillError`; the words are those of the command line.

>>> import paramill as pm
>>> issubclass(pm.errors.DeadlineError, TimeoutError)
True
"""

import builtins


class ParamillError(Exception):
    """The root of all exceptions of this package."""


class UnreachableError(ParamillError, ConnectionError):
    """A server could not be reached within the deadline; the message names it."""


class DeadlineError(ParamillError, TimeoutError):
    """Nothing came within the time. What was asked for may still happen; the wait may be repeated."""


class NotAMemberError(ParamillError, ConnectionError):
    """The job does not know this worker (any more): it was declared dead, or the job has failed."""


class JobOverError(NotAMemberError):
    """The job has ended in good order."""


class ClosedError(ParamillError, RuntimeError):
    """The job was closed in this process, or its worker has ended."""


class ForkError(ParamillError, RuntimeError):
    """A job was used in a fork of the process that joined it. Use ``spawn``."""


class OrderError(ParamillError, RuntimeError):
    """Calls came in an order that makes no sense. Nothing was changed."""


class TableError(ParamillError, ValueError):
    """A table cannot be created like this, or was created differently by another worker."""


class ShapeError(ParamillError, ValueError):
    """An array does not fit its table. Nothing was changed."""


class DtypeError(ParamillError, TypeError):
    """An array has another element type than the table. Nothing was changed."""


class NonFiniteError(ParamillError, ValueError):
    """NaN or Inf in a gradient. It was not applied."""


class DamagedError(ParamillError, RuntimeError):
    """What a subscriber received is not what was published, time and again. What was committed before is whole."""


class PolicyError(ParamillError, ValueError):
    """The text of a policy cannot be used; the message says what is known."""


class UrlError(ParamillError, ValueError):
    """The text is not a job's URL."""


class EnvironmentError(ParamillError, builtins.EnvironmentError):
    """The environment does not say where or as whom to join."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
