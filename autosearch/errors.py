"""The base of all errors that a user of the search can mend; the message says what is wrong, where, and how."""


class AutosearchError(ValueError):
    """Commands end with its message in one line and exit code 2."""
