"""Errors that a user can fix. Everything else is a bug and shows its traceback."""


class UserError(ValueError):
    """A mistake in what the user gave: one line that names it, shows it and says what to do."""
