"""How many groups a task's own errors may cost before the run stops. Pure."""

from dataclasses import dataclass

WINDOW = 100
"""Groups in a row that the budget counts over."""


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """``allowed`` groups of any WINDOW in a row may end with an error of the task.

    Only groups that the task had its say on are counted: what servers do to a group is neither an error nor a success here.
    ``errors``: numbers, among the counted groups, of those of the last WINDOW that ended with one.
    """

    allowed: int
    groups: int = 0
    errors: tuple[int, ...] = ()

    def after(self, failed: bool) -> "ErrorBudget":
        """With one more group counted.

        >>> once = ErrorBudget(1).after(True)
        >>> once.spent, once.after(False).after(True).spent
        (False, True)
        """
        number = self.groups + 1
        errors = (*self.errors, number) if failed else self.errors
        return ErrorBudget(self.allowed, number, tuple(n for n in errors if n > number - WINDOW))

    @property
    def spent(self) -> bool:
        """Whether there were more errors than allowed: the run must stop."""
        return len(self.errors) > self.allowed
